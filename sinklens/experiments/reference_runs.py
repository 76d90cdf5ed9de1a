"""Values collected from runs of other prompts: donors for resampling, and directions for steering.

Both read each step's values at its real positions, with the labels or at the places of that step. Rows that only wait
for the rest of their batch do not count.

Caveat: a direction between two sets of prompts holds every difference between them, their lengths and wording included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names as hook_names
from sinklens.hooks.names import HookName
from sinklens.hooks.points import Point
from sinklens.interventions.donors import Donors, labels_now
from sinklens.interventions.places import Places
from sinklens.interventions.rules import Rule, as_rule
from sinklens.interventions.streams import Directions, StreamPoint
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs import generate
from sinklens.runs.caches import chosen_points
from sinklens.runs.intervention import Canvas, Pairs, Reader, RunContext, layer_of
from sinklens.runs.request import Hooks, hook_list


def donors(
    model: Model,
    prompts: Prompt,
    names: HookName | Sequence[HookName],
    *,
    only_steps: Sequence[int] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Donors:
    """Run `model` on `prompts` and keep the values of points at every position, for resampling.

        others = donors(model, prompts, "blocks.1.attn.hook_z")
        generate(model, prompt, hooks=AblateHeads(by="resample", reference=others, layers=[1]))

    Args:
        names: points with a position axis; names, or a predicate on names.
        only_steps: steps whose values are kept; by default all. A diffusion run keeps every position at every step.
            ``steps=`` itself is the sampler's setting.
        seed, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: a point without a position axis, or a model whose canvas is random tokens.
    """
    refuse_canvas(model, "donors")
    listed = [names] if isinstance(names, str) or callable(names) else list(names)
    points = [name for entry in listed for name in chosen_points(entry, model, None)]
    for name in points:
        if "pos" not in hook_names.axes_of(name) or name.startswith("denoise."):
            raise SettingError(
                f"{name} has no value for each position, so it has no donors; take a point with a pos axis."
            )
    kept = _Kept(points=points, steps=only_steps)
    generate(model, prompts, seed=seed, record_sinks=False, progress=False, hooks=kept, **settings)
    return kept.donors()


def difference_of_means(
    model: Model,
    positive: Prompt,
    negative: Prompt,
    *,
    where: Any = None,
    only_steps: Sequence[int] | None = None,
    point: StreamPoint = "hook_resid_pre",
    seed: int = 0,
    hooks: Hooks = (),
    **settings: Any,
) -> Directions:
    """The mean stream over runs of `positive` prompts minus that of `negative` ones, at every layer.

    Args:
        where: positions that count, as in interventions: "prompt", "masked", "committed" or "decided", a kind, …
        only_steps: steps that count; by default all. ``steps=`` itself is the sampler's setting.
        point: the point of the stream.
        hooks: of both sets of runs, such as those that plant a behavior; the mean is taken after them.
        seed, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: no position counts, or the model's canvas is random tokens.
    """
    refuse_canvas(model, "difference_of_means")
    found = []
    for name, prompts in (("positive", positive), ("negative", negative)):
        mean = _Mean(where=where, steps=only_steps, point=point)
        changed = [*hook_list(hooks), mean]
        generate(model, prompts, seed=seed, record_sinks=False, progress=False, hooks=changed, **settings)
        if not mean.count:
            raise SettingError(
                f"the runs of the {name} prompts have no position at where={where!r}, only_steps={only_steps!r}."
            )
        found.append(mean)
    values = found[0].mean() - found[1].mean()
    return Directions(values, point, (found[0].count, found[1].count))


def refuse_canvas(model: Model, what: str) -> None:
    """Refuse a model whose rows may still run when no position is undecided: which rows count would be unknown."""
    if model.tree.architecture.encoder:
        raise SettingError(
            f"{what} counts the rows that have undecided positions, and a canvas of a {model.family} model has none "
            f"where every position is accepted; keep the values with Activations in hooks= instead."
        )


@dataclass(kw_only=True, eq=False)
class _Mean(Reader):
    """Sums the stream over the places of a run.

    Attributes:
        where, point: see `difference_of_means`.
        sums, counts: by layer.
    """

    where: Any
    point: StreamPoint
    sums: dict[int, Tensor] = field(default_factory=dict, init=False)
    counts: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def rule(self) -> Rule | None:
        """See `HookSource.rule`."""
        return None if self.where is None else as_rule(self.where)

    @property
    def count(self) -> int:
        """Number of positions."""
        return max(self.counts.values(), default=0)

    def mean(self) -> Float[Tensor, "layer d_model"]:
        """The mean at every layer."""
        return torch.stack([self.sums[layer] / self.counts[layer] for layer in sorted(self.sums)])

    def pairs(self, model: Model, run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        places = Places(self, model, run)

        def add(value: Float[Tensor, "batch pos d_model"], hook: Point) -> None:
            queries, layer = value.shape[1], layer_of(hook)
            rows = places.of_queries(hook, queries, value.device)
            if rows is None:
                return
            counted = rows.any(dim=1) & _counted(run, queries).to(value.device)
            chosen = value[counted.expand(len(value), -1)].double()
            self.sums[layer] = self.sums.get(layer, 0) + chosen.sum(dim=0).cpu()
            self.counts[layer] = self.counts.get(layer, 0) + len(chosen)

        acts = [(f"blocks.{layer}.{self.point}", add) for layer in places.layers]
        return places.around(acts)


@dataclass(kw_only=True, eq=False)
class _Kept(Reader):
    """Keeps the values of points at each step, with the labels of their positions."""

    points: Sequence[str]
    values: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    labels: dict[str, list[Tensor]] = field(default_factory=dict, init=False)

    def donors(self) -> Donors:
        """Everything that was kept."""
        if not self.labels:
            raise SettingError("the runs have no position at these steps; choose others.")
        values = {name: torch.cat(self.values[name]) for name in self.points}
        names = ("step", "state", "position", "kind", "answer")
        return Donors(values, *(torch.cat(self.labels[name]) for name in names))

    def pairs(self, model: Model, run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        in_step, canvas = self.step_test(run), Canvas(run)

        def keep(value: Tensor, hook: Point) -> None:
            step, queries, name = int(hook.step or 0), value.shape[1], str(hook.name)
            if not in_step(step):
                return
            counted = _counted(run, queries)
            self.values.setdefault(name, []).append(value[counted.to(value.device)].detach().cpu())
            if name == self.points[0]:
                first = hook.forward_pass.first(queries)
                now = labels_now(run, canvas.now, step, kinds=model.tokenizer is not None)
                for label, codes in now.items():
                    part = codes[:, first : first + queries][counted.to(codes.device)]
                    self.labels.setdefault(label, []).append(part.cpu())

        return [("denoise.hook_canvas", canvas.hook), *((name, keep) for name in self.points)]


def _counted(run: RunContext, queries: int) -> Bool[Tensor, "batch query"]:
    """The queries of a pass that count: those of this step, real, in rows that have something left to decide."""
    first, own = run.forward_pass.first(queries), run.forward_pass.spans(queries)[-1]
    real = run.real[:, first : first + queries].clone()
    real[:, : own.start] = False
    assert run.forward_pass.active is not None
    return real & run.forward_pass.active[:, None].to(real.device)
