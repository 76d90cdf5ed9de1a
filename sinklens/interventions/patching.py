"""Keep values of one run and patch them into another.

`Activations` keeps the values of points at chosen steps, as one TransformerLens `ActivationCache` per step.
`PatchHooks` puts them into another run: clean into corrupted or vice versa, by step, layer, head and position.
`FreezePattern` reuses the attention of one step in later ones.

Limitation: prompts of different lengths have different positions. Patching between them needs ``positions=`` and
``source_positions=`` that state which position corresponds to which; a guess would put values at unrelated positions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names
from sinklens.hooks.forward_pass import QuerySpan
from sinklens.hooks.names import READ_ONLY
from sinklens.hooks.points import Point
from sinklens.interventions.kept_patterns import KeptPatterns
from sinklens.interventions.places import CANVAS, AtPositions, Places, along, at_heads, head_axis
from sinklens.runs.caches import StepCaches, chosen_points, require_columns
from sinklens.runs.intervention import (
    Pairs,
    Reader,
    RunContext,
    place_mask,
    refuse,
    refuse_empty,
    whole_numbers,
    within,
)
from sinklens.utils.integers import as_integer

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

    from sinklens.model import Model


@dataclass(kw_only=True, eq=False)
class Activations(Reader):
    """Keeps values of a run and changes none: ``kept = Activations(names=[...]); generate(..., hooks=[kept])``.

    List it last to see the edits of other hooks. After the run ``kept.caches[step]`` is an `ActivationCache`; a second
    run replaces it. In a single pass everything is kept as step 0.

    Attributes:
        names: points, in any accepted spelling, or a predicate on names; `layers` restricts those inside a block.
        caches: the values kept from the last run.
    """

    on_canvas: ClassVar[bool] = True

    names: Sequence[str] | Any
    caches: Mapping[int, "ActivationCache"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        refuse(self, "heads", "positions")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        in_step = self.step_test(run)
        kept = StepCaches(model.tree)
        self.caches = kept  # a new one: the old one may be the source of a patch in this run

        def keep(value: Tensor, hook: Point) -> None:
            if in_step(hook.step):
                kept.keep(value, hook)

        return [(name, keep) for name in chosen_points(self.names, model, self.layers)]


@dataclass(frozen=True, kw_only=True)
class PatchHooks(AtPositions):
    """Patch the values of another run into this one.

    In an autoregressive run the values of a step are those of the queries that belong to it, with or without a
    key/value cache; keys and masks are those of the pass. With cached blocks (``use_cache`` of a block sampler), the
    pass of a batch begins at the earliest current block of its rows; to make changes independent of the batch, restrict
    them with `positions` or `where`, such as "masked".

    Attributes:
        source: step -> point -> value: ``activations.caches``, ``t.cache(...)``, or any such mapping. One row, or as
            many as this run has. If values cover all columns and a pass computes only some, the pass takes those.
        names: points to patch; by default all that `source` holds, except the read-only ones (`READ_ONLY`).
        shift: the value at step t comes from step t + shift of the source.
        steps: steps of this run; by default those for which `source` holds values (step t + shift). Without a shift,
            this run must have all of them.
        heads: heads to patch at points with a head axis (key/value heads where the point has those).
        positions: positions to patch (queries, for scores and patterns; keys, for the additive mask); every row must
            have them.
        where: positions to patch that may differ by row, step, layer and head; see `AtPositions`. A key/value head has
            those of any of its heads; a point without a head axis, those of any head of its layer.
        source_positions: columns of the source's values to take, one for each of `positions`. By default the same
            columns, or if the source has another length, those with the numbers in `positions`.

    Raises:
        SettingError: a step or point that `source` does not hold; a step of `source` that the run does not have;
            lengths that differ without `positions`.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True

    source: Mapping[int, Any]
    names: Sequence[str] | Any | None = None
    shift: int = 0
    source_positions: Sequence[int] | None = None

    def __post_init__(self) -> None:
        refuse_empty(self)
        count = 0 if self.positions is None else len(whole_numbers("position", self.positions))
        if self.source_positions is not None and len(self.source_positions) != count:
            raise SettingError(
                f"source_positions and positions must have the same length; got {len(self.source_positions)} and "
                f"{count}."
            )
        known = isinstance(self.source, Mapping) and not any(as_integer(step) is None for step in self.source)
        if not known or not all(isinstance(cache, Iterable) for cache in self.source.values()):
            raise SettingError(
                f"source maps steps to caches: pass the .caches of Activations, or what t.cache(...) returned; got "
                f"{type(self.source).__name__}. For the cache of a single pass write source={{0: cache}}."
            )
        if not len(self.source):
            raise SettingError("source holds no step; run the model that fills it first.")
        if as_integer(self.shift) is None:
            raise SettingError(f"shift must be a number of steps, 0 or an integer below or above; got {self.shift!r}.")

    def acting_steps(self, steps: int) -> list[int]:
        """See `Intervention.acting_steps`."""
        return patched_steps(self.source, self.shift) if self.steps is None else super().acting_steps(steps)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        chosen, example = self._chosen_steps(run), self.source[min(self.source)]
        default = [str(name) for name in example if not str(name).endswith(READ_ONLY)]
        points = chosen_points(default if self.names is None else self.names, model, self.layers)
        for name in points:
            if any(name not in self.source[step + self.shift] for step in chosen):
                raise SettingError(f"source does not hold {name!r}; it holds {', '.join(example)}.")
            if self.heads is not None:
                axes = names.axes_of(name)
                sizes = {"head": model.cfg.n_heads, "kv_head": model.cfg.n_key_value_heads}
                within("head", self.heads, sizes[axes[head_axis(name)]])
        if self.where is not None and self.source_positions is not None:
            raise SettingError(
                "source_positions= pairs with positions=; where= takes the values of the same positions."
            )
        limited = self.positions is not None or self.where is not None
        columns = None if run.single or self.positions is None else _columns(self.positions, run.real)
        places = self._places(points, model, run, limited)

        def patch(value: Tensor, hook: Point) -> Tensor | None:
            name, step = str(hook.name), hook.step or 0
            axis = names.position_axis(name) % value.ndim
            first, parts = _parts(name, value.shape[axis], run, step)
            changed = None
            for part in parts:
                if part.step not in chosen:
                    continue
                mask = places.of_span(hook, part, first, value.device) if limited else None
                if limited and mask is None:
                    continue
                here = value.narrow(axis, part.start, part.stop - part.start)
                columns_here = range(first + part.start, first + part.stop)
                require_columns(self.source[part.step + self.shift], name, part.step, columns_here)
                new = self._of_step(part.step, here, name, axis, run)
                if not run.single and not run.causal:
                    new = of_window(new, here, name, hook, run)
                shifted = None if columns is None else columns.to(value.device) - first - part.start
                new = self._chosen_of(here, new, name, axis, shifted, mask)
                value = new if part.stop - part.start == value.shape[axis] else _put(value, new, axis, part)
                changed = value
            return changed

        return places.around([(name, patch) for name in points])

    def _places(self, points: Sequence[str], model: "Model", run: RunContext, limited: bool) -> Places:
        """The positions to patch at `points`."""
        layered = [name for name in points if name.startswith("blocks.")]
        layers = sorted({int(name.split(".")[1]) for name in layered})
        places = Places(self, model, run, layers, of="queries" if any(map(of_queries, points)) else None)
        for name in points:
            if name not in layered:
                places.refuse_by_layer(name)
            if limited and model.tree.architecture.encoder and name.startswith("denoise.") and name != CANVAS:
                raise SettingError(
                    f"{name} has the positions of the current canvas only, so positions= and where=, which count from "
                    f"the prompt, do not apply; leave them out, or patch a point of the layers."
                )
        return places

    def _chosen_steps(self, run: RunContext) -> frozenset[int]:
        """Steps of this run at which values are patched."""
        available = sorted(self.source)
        if run.single:
            self.step_test(run)
            steps = [0]
        else:
            steps = self._default_steps(run) if self.steps is None else within("step", self.steps, run.steps)
        missing = [step for step in steps if step + self.shift not in self.source]
        if missing:
            raise SettingError(
                f"source holds steps {available}, but step {missing[0]} needs {missing[0] + self.shift}; record it, or "
                f"change steps= or shift=."
            )
        return frozenset(steps)

    def _default_steps(self, run: RunContext) -> list[int]:
        """The steps for which `source` holds values; with a shift, those among them that the run has.

        Raises:
            SettingError: it holds a step that the run does not have, or with a shift, only such steps.
        """
        found = patched_steps(self.source, self.shift)
        inside = [step for step in found if step < run.steps]
        if (inside == found) if self.shift == 0 else inside:
            return inside or [0]
        last = max(self.source)
        shifted = f" (step {last - self.shift} here, with shift={self.shift})" if self.shift else ""
        raise SettingError(
            f"source holds step {last}{shifted}, which does not exist in this run; it has {run.steps}, 0 to "
            f"{run.steps - 1}. Name the steps to patch (steps=), or pass a part of source."
        )

    def _of_step(self, step: int, here: Tensor, name: str, axis: int, run: RunContext) -> Tensor:
        """The source's values for the queries `here`, which belong to `step`."""
        new = self.source[step + self.shift][name].to(here)
        if len(new) not in (1, len(here)):
            raise SettingError(
                f"source has {len(new)} rows at {name}, this run {len(here)}; pass one row or {len(here)}."
            )
        new = new.expand(len(here), *new.shape[1:])
        if run.single or not run.causal or not of_queries(name):
            return new
        if here.shape[axis] == 1:  # the source may have recomputed the queries of earlier steps
            new = new.narrow(axis, new.shape[axis] - 1, 1)
        if "key" in names.axes_of(name) and new.shape[-1] == run.prompt_length + step + self.shift:
            hidden = -torch.inf if name.endswith("hook_attn_scores") else 0.0  # keys after the query
            new = torch.nn.functional.pad(new, (0, max(0, here.shape[-1] - new.shape[-1])), value=hidden)
        return new

    def _chosen_of(
        self,
        here: Tensor,
        new: Tensor,
        name: str,
        axis: int,
        places: Int[Tensor, "batch place"] | None,
        mask: Bool[Tensor, "#batch #head pos"] | None,
    ) -> Tensor:
        """`here` with the chosen positions and heads of `new`."""
        if name.endswith("hook_attn_mask") and here.shape[2] != new.shape[2]:  # one row applies to all queries
            queries = max(here.shape[2], new.shape[2])
            here, new = here.expand(-1, -1, queries, -1), new.expand(-1, -1, queries, -1)
        if self.positions is not None and (self.source_positions is not None or new.shape[axis] != here.shape[axis]):
            if places is None:
                places = _columns(self.positions, here.new_ones(len(here), here.shape[axis]).bool())
            new = self._moved(here, new, name, axis, places)
        if new.shape != here.shape:
            raise SettingError(
                f"{name} has shape {list(new.shape)} in the source and {list(here.shape)} here; for prompts of "
                f"different lengths pass positions= and source_positions=."
            )
        if mask is not None:
            new = torch.where(along(mask, name, here), new, here)
        return new if self.heads is None else torch.where(at_heads(self.heads, name, here), new, here)

    def _moved(self, here: Tensor, new: Tensor, name: str, axis: int, places: Int[Tensor, "batch place"]) -> Tensor:
        """`here` with values of `new` at `places`; places outside of it belong to other steps."""
        changed, source = here.movedim(axis, 1).clone(), new.movedim(axis, 1)
        if changed.shape[2:] != source.shape[2:]:
            raise SettingError(
                f"{name}: values of shape {list(source.shape[2:])} cannot replace {list(changed.shape[2:])}; "
                f"patterns and scores can be patched only between runs of one length."
            )
        length = source.shape[1]
        given = self.positions if self.source_positions is None else self.source_positions
        numbers = whole_numbers("position", () if given is None else given)
        for number, target in zip(numbers, places.T, strict=True):
            rows = ((target >= 0) & (target < changed.shape[1])).nonzero()[:, 0]
            changed[rows, target[rows]] = source[rows, _column(number, length, name) if length > 1 else 0]
        return changed.movedim(1, axis)


def of_window(new: Tensor, here: Tensor, name: str, hook: Point, run: RunContext) -> Tensor:
    """`new`, a value at all columns, at those that the pass of a diffusion run computes; others are unchanged."""
    length, keys, queries = run.real.shape[1], hook.forward_pass.keys, hook.forward_pass.queries
    for axis, kind in enumerate(names.axes_of(name)):
        size = here.shape[axis] if kind in ("pos", "key") else len(queries)  # a mask may have one row for all
        if kind in ("pos", "query", "query|1", "key") and new.shape[axis] == length > size:
            new = new.narrow(axis, keys.start if kind == "key" else queries.start, size)
    return new


def patched_steps(source: Mapping[int, Any], shift: int) -> list[int]:
    """Steps of a run for which `source` holds the step `shift` later; a run has no steps before 0."""
    return sorted(step - shift for step in source if step >= shift)


def _parts(name: str, size: int, run: RunContext, step: int) -> tuple[int, list[QuerySpan]]:
    """Canvas column at which a value of `size` positions begins, and its positions by step."""
    if run.single:
        return 0, [QuerySpan(step, 0, size)]
    if not run.causal:  # with cached blocks, a pass has only the later queries, and logits
        part = of_queries(name) or name == "denoise.hook_logits"
        return run.forward_pass.first(size) if part else 0, [QuerySpan(step, 0, size)]
    if of_queries(name):
        return run.forward_pass.first(size), run.forward_pass.spans(size)
    decoding = name.startswith("denoise.") and name != CANVAS  # a single position, the one being decoded
    return run.prompt_length + step if decoding else 0, [QuerySpan(step, 0, size)]


def _put(value: Tensor, new: Tensor, axis: int, part: QuerySpan) -> Tensor:
    """`value` with `new` at the queries of `part`."""
    value = value.clone()
    value.narrow(axis, part.start, part.stop - part.start).copy_(new)
    return value


def _column(position: int, size: int, name: str) -> int:
    if not -size <= position < size:
        raise SettingError(
            f"position {position} does not exist at {name} in the source, which has {size}; choose "
            f"-{size} to {size - 1}."
        )
    return position % size


def _columns(positions: Sequence[int], real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch place"]:
    """Column of each position in each row.

    Raises:
        SettingError: a row lacks one of the positions.
    """
    numbers = whole_numbers("position", positions)
    found = torch.zeros(len(real), len(numbers), dtype=torch.long, device=real.device)
    for place, position in enumerate(numbers):
        mask = place_mask([position], real)
        if not bool(mask.any(dim=1).all()):
            raise SettingError(
                f"position {position} does not exist in every row; patch rows of different lengths separately."
            )
        found[:, place] = mask.long().argmax(dim=1)
    return found


def of_queries(name: str) -> bool:
    """Whether a point's positions are the queries of a pass; with a key/value cache there are fewer than keys."""
    return not name.startswith("denoise.") and not {"pos", "query"}.isdisjoint(names.axes_of(name))


@dataclass(frozen=True, kw_only=True)
class FreezePattern(AtPositions):
    """Reuse the attention pattern of step `at` in all later steps (of `steps`): how much does attention adapt?

    For diffusion models only, since the patterns of an autoregressive run grow with the text.

    Attributes:
        at: the step whose pattern is kept; negative values count from the end of the planned steps.
        positions, where: queries whose attention is frozen.

    Raises:
        SettingError: a step that computes other positions than step `at`, under a cache policy or with cached blocks.
    """

    needs_run: ClassVar[str] = (
        "FreezePattern reuses the pattern of an earlier step of a diffusion run; use it in generate or trace with a "
        "diffusion model."
    )

    on_canvas: ClassVar[bool] = True

    at: int

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if run.causal:
            raise SettingError(self.needs_run)
        at = within("step", [self.at], run.steps)[0]
        kept = KeptPatterns("FreezePattern", at)

        def keep(value: Float[Tensor, "batch head query key"], hook: Point) -> None:
            if hook.step == at:
                kept.keep(value, hook)

        def frozen(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            return kept.of(value, hook) if (hook.step or 0) > at else None

        keeps = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in self.chosen_layers(model)]
        return [*keeps, *self.edits(model, run, "attn.hook_pattern", frozen)]
