"""Values of one run, kept and put into another.

`Activations` keeps the values of points at chosen steps, as one TransformerLens `ActivationCache` per step.
`PatchHooks` puts them into another run: clean into corrupted or back, by step, layer, head and position.
`FreezePattern` puts the attention of one step into later ones.

One way this fails: two prompts of different length have different positions. Patching then needs ``positions=`` and
``source_positions=`` that say which belongs to which; guessing would put values where they never were.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.interventions.base import Intervention, Pairs, Surroundings, position_mask, within

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

    from sinklens.hooks.tree import HookTree
    from sinklens.model import Model


class StepCaches(Mapping[int, "ActivationCache"]):
    """Values of points by step: ``caches[step]`` is an `ActivationCache`, ``caches[step]["blocks.0.hook_z"]`` a value.

    Steps that did not run are not there.
    """

    def __init__(self, tree: "HookTree") -> None:
        self._tree = tree
        self._values: dict[int, dict[str, Tensor]] = {}

    def keep(self, value: Tensor, point: Point) -> None:
        """Keep a copy of what passes `point` in the step being run."""
        self._values.setdefault(point.step or 0, {})[str(point.name)] = value.detach().clone()

    def __getitem__(self, step: int) -> "ActivationCache":
        from transformer_lens import ActivationCache

        if step not in self._values:
            raise SettingError(f"nothing was kept at step {step}; kept: {sorted(self._values) or 'no step'}.")
        return ActivationCache(self._values[step], self._tree)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        points = sorted({name for kept in self._values.values() for name in kept})
        return f"StepCaches(steps {sorted(self._values)}, points {points})"


@dataclass(frozen=True, kw_only=True)
class Activations(Intervention):
    """Keeps values of a run and changes none: ``kept = Activations(names=[...]); generate(..., hooks=[kept])``.

    Listed last, it sees what other hooks leave. After the run ``kept.caches[step]`` is an `ActivationCache`; a second
    run replaces it. Without a run (a single pass) everything is kept as step 0.

    Attributes:
        names: points, in any accepted spelling, or a predicate on names; `layers` restricts those below a block.
        caches: what the last run kept.
    """

    names: Sequence[str] | Any
    caches: dict[int, "ActivationCache"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        in_step = self.step_test(run)
        kept = StepCaches(model.tree)
        self.caches.clear()

        def keep(value: Tensor, hook: Point) -> None:
            if in_step(hook.step):
                kept.keep(value, hook)
                self.caches[hook.step or 0] = kept[hook.step or 0]

        return [(name, keep) for name in chosen_points(self.names, model, self.layers)]


def chosen_points(wanted: Any, model: "Model", layers: Sequence[int] | None) -> list[str]:
    """Points that a name, a list of names or a predicate means, below a block only those of `layers`.

    Raises:
        HookNameError: an unknown name, or a predicate that matches nothing.
        SettingError: a layer that does not exist, or no point left.
    """
    listed = [wanted] if isinstance(wanted, str) or callable(wanted) else list(wanted)
    known, size = model.hook_names(), model.cfg.n_layers
    found = {point for entry in listed for point in names.select(entry, known, size)}
    if layers is not None:
        numbers = {str(layer) for layer in within("layer", layers, size)}
        found = {name for name in found if not name.startswith("blocks.") or name.split(".")[1] in numbers}
    if not found:
        raise SettingError(f"no point is left of {wanted!r} in layers {layers}; name one at least.")
    return [name for name in known if name in found]


@dataclass(frozen=True, kw_only=True)
class PatchHooks(Intervention):
    """Put the values of another run into this one.

    Attributes:
        source: step -> point -> value: ``activations.caches``, ``t.cache(...)``, or any such mapping. One row, or as
            many as this run has.
        names: points to patch; by default all that `source` holds.
        shift: the value at step t comes from step t + shift of the source.
        heads: of points that have a head axis (key/value heads where the point has those).
        positions: where values are put (queries, for scores and patterns).
        source_positions: where they come from, as many; by default the same positions.

    Raises:
        SettingError: a step or point that `source` does not hold; lengths that differ without `positions`.
    """

    source: Mapping[int, Any]
    names: Sequence[str] | Any | None = None
    shift: int = 0
    source_positions: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.source_positions is not None and len(self.source_positions) != len(self.positions or ()):
            raise SettingError(
                f"source_positions belong to positions one by one; got {len(self.source_positions)} and "
                f"{len(self.positions or ())}."
            )
        if not len(self.source):
            raise SettingError("source holds no step; has its run taken place?")

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        held = sorted(self.source)
        steps = [0] if run is None else within("step", self.steps, run.steps)
        if run is not None and self.steps is None:
            steps = [step - self.shift for step in held]
        elif run is None:
            self.step_test(run)
        missing = [step for step in steps if step + self.shift not in self.source]
        if missing:
            raise SettingError(
                f"source holds steps {held}; for step {missing[0]} it would need {missing[0] + self.shift}."
            )
        chosen = frozenset(steps)
        wanted = self.names if self.names is not None else [str(name) for name in self.source[held[0]]]
        points = chosen_points(wanted, model, self.layers)
        for name in points:
            if name not in self.source[steps[0] + self.shift]:
                raise SettingError(f"source does not hold {name!r}; it holds {', '.join(self.source[held[0]])}.")

        def patch(value: Tensor, hook: Point) -> Tensor | None:
            step = hook.step or 0
            return self._patched(value, str(hook.name), step) if step in chosen else None

        return [(name, patch) for name in points]

    def _patched(self, value: Tensor, name: str, step: int) -> Tensor:
        new = self.source[step + self.shift][name].to(value)
        axis = names.position_axis(name) % value.ndim
        if len(new) not in (1, len(value)):
            raise SettingError(f"source has {len(new)} rows at {name}, this run {len(value)}; give one row or as many.")
        new = new.expand(len(value), *new.shape[1:])
        if self.positions is not None:
            new = self._moved(value, new, axis, name)
        if new.shape != value.shape:
            raise SettingError(
                f"{name} has shape {list(new.shape)} in the source and {list(value.shape)} here (step {step}); for "
                f"prompts of different length say positions= and source_positions=."
            )
        if self.heads is None:
            return new
        of = head_axis(name, value.ndim)
        mask = torch.zeros(value.shape[of], dtype=torch.bool, device=value.device)
        mask[within("head", self.heads, value.shape[of])] = True
        return torch.where(mask.view([-1 if axis == of else 1 for axis in range(value.ndim)]), new, value)

    def _moved(self, value: Tensor, new: Tensor, axis: int, name: str) -> Tensor:
        """`value` with the chosen positions of `new` put at theirs."""
        put = _places(self.positions, value.shape[axis], name)
        take = _places(self.source_positions or self.positions, new.shape[axis], name)
        taken = new.index_select(axis, torch.tensor(take, device=value.device))
        here = value.index_select(axis, torch.tensor(put, device=value.device))
        if taken.shape != here.shape:
            raise SettingError(
                f"{name}: values of shape {list(taken.shape)} cannot stand for {list(here.shape)}; patterns and scores "
                f"can be patched between runs of one length only."
            )
        return value.index_copy(axis, torch.tensor(put, device=value.device), taken)


def _places(positions: Sequence[int] | None, size: int, name: str) -> list[int]:
    for position in positions or ():
        if not -size <= position < size:
            raise SettingError(f"position {position} does not exist at {name}, which has {size} here.")
    return [position % size for position in positions or ()]


def head_axis(name: str, ndim: int) -> int:
    """The axis of a point's value that counts heads.

    Raises:
        SettingError: the point has none.
    """
    axes = next(spec.axes for _, spec in names.table() if spec.name == name.rsplit(".", 1)[-1]).split()
    for axis in ("head", "kv_head"):
        if axis in axes:
            return axes.index(axis)
    raise SettingError(f"{name} has no heads ({' '.join(axes)}); leave heads= out, or patch a point of attn.")


@dataclass(frozen=True, kw_only=True)
class FreezePattern(Intervention):
    """Reuse the attention pattern of step `at` in all later steps (among `steps`): how much does attention adapt?

    For diffusion models only: the patterns of an autoregressive run grow with the text.

    Attributes:
        at: the step whose pattern is kept; negative ones count from the end of those planned.
        positions: queries whose attention is frozen.
    """

    at: int

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        if run is None or run.causal:
            raise SettingError(
                "FreezePattern reuses the pattern of an earlier step of a diffusion run; there is none here."
            )
        layers, heads, in_step = self.chosen_layers(model), self.chosen_heads(model), self.step_test(run)
        at = within("step", [self.at], run.steps)[0]
        kept: dict[str, Float[Tensor, "batch head query key"]] = {}

        def freeze(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            step, name = hook.step or 0, str(hook.name)
            if step == at:
                kept[name] = value.detach().clone()
            if step <= at or not in_step(step):
                return None
            of = torch.zeros(value.shape[1], dtype=torch.bool, device=value.device)
            of[heads] = True
            rows = position_mask(self.positions, value.shape[2], value.device)
            return torch.where(of[:, None, None] & rows[:, None], kept[name], value)

        return [(f"blocks.{layer}.attn.hook_pattern", freeze) for layer in layers]
