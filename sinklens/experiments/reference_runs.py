"""Values collected from runs of other prompts: for resampling and ablating, for steering, and for pruning.

At each step, `donors` keeps the values of every real position with its labels, and `difference_of_means` sums those at
the chosen places. Rows that only wait for the rest of their batch do not count.

`input_norms` reads finished runs, for Wanda's score of a weight. It makes one pass over the canvas of each chosen step,
and adds up for every matrix and input j

    ‖X_j‖₂ = (Σ_p (1 − w_p)² x_pj²)^½,

where p runs over the positions of all these canvases without padding and finished rows (Wanda, 2306.11695). w_p is 0,
or with ``without=`` the soft weight of a sink at p (Sink-Aware Pruning, 2602.17664): activations at sinks are scaled
down, so that weights which only serve them are removed first.

Caveat: a direction between two sets of prompts holds every difference between them, their lengths and wording included.
If the reference is unlike the prompt under study, its mean is no more typical than a zero. For `input_norms`, hooks of
the runs are not applied, and the weight of a position is one number for all layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import require
from sinklens.experiments.step_ids import StepIds, exact_step
from sinklens.hooks import names as hook_names
from sinklens.hooks.names import HookName
from sinklens.hooks.points import Point
from sinklens.interventions.donors import MATCHED, Donors, labels_now
from sinklens.interventions.places import Places
from sinklens.interventions.pruning import InputNorms
from sinklens.interventions.rules import Rule, as_rule
from sinklens.interventions.streams import Directions, StreamPoint
from sinklens.interventions.weights import weight_matrices
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs import generate
from sinklens.runs.caches import chosen_points
from sinklens.runs.intervention import Canvas, Pairs, Reader, RunContext, layer_of, whole_numbers
from sinklens.runs.request import Hooks, hook_list
from sinklens.runs.result import Generation
from sinklens.sinks.detectors import MeanPlusStd
from sinklens.utils.arguments import Seed, Words, as_tuple, checked, read_as


@checked
def donors(
    model: Model,
    prompts: Prompt,
    names: HookName | Sequence[HookName],
    *,
    only_steps: Sequence[int] | None = None,
    seed: Seed = 0,
    **settings: Any,
) -> Donors:
    """Run `model` on `prompts` and keep the values of points at every position, for resampling and ablating.

        others = donors(model, prompts, "blocks.1.attn.hook_z")
        generate(model, prompt, hooks=AblateHeads(by="resample", reference=others, layers=[1]))

    Args:
        names: points with a position axis; names, or a predicate on names.
        only_steps: steps whose values are kept; by default all. A diffusion run keeps every position at every step.
            (``steps`` is the sampler's setting.)
        seed, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: a point without a position axis, a model whose canvas is random tokens, or a cache policy, under
            which a run does not compute every position.
    """
    refuse_canvas(model, "donors")
    require(settings.get("cache") is None, "donors reads exact runs; leave cache= out.")
    points = chosen_points(names, model, None)
    for name in points:
        require(
            "pos" in hook_names.axes_of(name) and not name.startswith("denoise."),
            f"{name} has no value for each position, so it has no donors; take a point with a pos axis.",
        )
    kept = _Kept(points=points, steps=only_steps)
    generate(model, prompts, seed=seed, record_sinks=False, progress=False, hooks=kept, **settings)
    return kept.donors()


@checked
def difference_of_means(
    model: Model,
    positive: Prompt,
    negative: Prompt,
    *,
    where: Any = None,
    only_steps: Sequence[int] | None = None,
    point: StreamPoint = "hook_resid_pre",
    seed: Seed = 0,
    hooks: Hooks = (),
    **settings: Any,
) -> Directions:
    """The mean stream over runs of `positive` prompts minus that of `negative` ones, at every layer.

    Args:
        where: positions that count, as in interventions: "prompt", "masked", "committed" or "decided", a kind, …
        only_steps: steps that count; by default all. (``steps`` is the sampler's setting.)
        point: the point of the stream.
        hooks: hooks of both sets of runs, such as those that plant a behavior; the means include their edits.
        seed, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: no position counts, or the model's canvas is random tokens.
    """
    refuse_canvas(model, "difference_of_means")
    found = []
    for name, prompts in (("positive", positive), ("negative", negative)):
        mean = _Mean(where=where, steps=only_steps, point=point)
        generate(
            model, prompts, seed=seed, record_sinks=False, progress=False, hooks=[*hook_list(hooks), mean], **settings
        )
        require(
            mean.count,
            f"the runs of the {name} prompts have no position at where={where!r}, only_steps={only_steps!r}.",
        )
        found.append(mean)
    return Directions(found[0].mean() - found[1].mean(), point, (found[0].count, found[1].count))


def refuse_canvas(model: Model, what: str) -> None:
    """Refuse a model whose rows may still run when no position is undecided: which rows count would be unknown."""
    require(
        not model.tree.architecture.encoder,
        f"{what} counts the rows that have undecided positions, and a canvas of a {model.family} model has none "
        f"where every position is accepted; keep the values with Activations in hooks= instead.",
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
        return None if self.where is None else as_rule(self.where)

    @property
    def count(self) -> int:
        """Number of positions."""
        return max(self.counts.values(), default=0)

    def mean(self) -> Float[Tensor, "layer d_model"]:
        """The mean at every layer."""
        return torch.stack([self.sums[layer] / self.counts[layer] for layer in sorted(self.sums)])

    def pairs(self, model: Model, run: RunContext) -> Pairs:
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

        return places.around([(f"blocks.{layer}.{self.point}", add) for layer in places.layers])


@dataclass(kw_only=True, eq=False)
class _Kept(Reader):
    """Keeps the values of points at each step, with the labels of their positions."""

    points: Sequence[str]
    values: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    labels: dict[str, list[Tensor]] = field(default_factory=dict, init=False)

    def donors(self) -> Donors:
        """Everything that was kept."""
        require(self.labels, "the runs have no position at these steps; choose others.")
        values = {name: torch.cat(self.values[name]) for name in self.points}
        return Donors(values, **{name: torch.cat(self.labels[name]) for name in MATCHED})

    def pairs(self, model: Model, run: RunContext) -> Pairs:
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
    """The real queries of a pass that belong to this step, in rows that have something left to decide."""
    now = run.forward_pass
    first = now.first(queries)
    assert now.active is not None
    found = run.real[:, first : first + queries] & now.active[:, None].to(run.real.device)
    found[:, : now.spans(queries)[-1].start] = False
    return found


@checked
def input_norms(
    runs: Generation | Sequence[Generation],
    *,
    steps: Sequence[int] | None = None,
    without: Annotated[MeanPlusStd, Words("MeanPlusStd(...), whose strength is a share,")] | None = None,
    shuffled: Seed | None = None,
) -> InputNorms:
    """Collect the norms of the inputs of every weight matrix over the canvases of some steps.

    Args:
        runs: one or several runs of one model, whose prompts are the calibration set.
        steps: steps of the runs; negative ones count from the end. Steps that a run did not reach are left out. None
            means all.
        without: definition of the sinks whose activations are multiplied by 1 − their strength, averaged over layers
            and heads; None counts every position fully.
        shuffled: seed with which the strengths of each row and step are put at random positions instead, as a control;
            None leaves them in place.

    Raises:
        SettingError: no run, runs of several models, no step that any run reached, a run without recorded sinks,
            `shuffled` without `without`, or a run that `exact_step` refuses.
    """
    listed = as_tuple(runs)
    _check(listed, without, shuffled)
    model = listed[0].model
    generator = None if shuffled is None else torch.Generator().manual_seed(read_as(Seed, "shuffled", shuffled))
    matrices = [found for layer in range(model.cfg.n_layers) for found in weight_matrices(model, layer)]
    names = {found.module: found.name for found in matrices if found.name.endswith(".weight")}
    totals, counted = dict[str, Tensor](), list[Tensor]()

    def add(module: Any, inputs: tuple[Any, ...]) -> None:
        """Add the inputs of a module: at positions, at tokens (routers), or of rows (conditioning)."""
        x, counts = inputs[0].flatten(0, -2).float(), counted[-1]
        weights = counts.flatten() if len(x) == counts.numel() else counts.amax(dim=1)
        require(
            len(x) == len(weights),
            f"{names[module]} reads {len(x)} inputs in a pass of {counts.numel()} positions, so they cannot be "
            f"assigned to positions; prune with score='magnitude'.",
        )
        totals[names[module]] = totals.get(names[module], 0) + weights.to(x) ** 2 @ x**2

    with torch.no_grad(), ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(add))
        for run in listed:
            for canvas, counts in _canvases(run, steps, without, generator):
                counted.append(counts)
                model.tree.peek(canvas.ids, canvas.attention_mask, [], canvas.time)
    longest = max(run.steps_run for run in listed)
    require(counted, f"no run reached any of the steps {steps!r}; the longest has {longest} steps.")
    norms = {name: total.sqrt().cpu() for name, total in totals.items()}
    return InputNorms(norms, sum(float(counts.sum()) for counts in counted))


def _check(runs: Sequence[Generation], without: MeanPlusStd | None, shuffled: int | None) -> None:
    require(
        without is not None or shuffled is None,
        "shuffled= moves the sinks of without=; pass without=MeanPlusStd(), or leave it out.",
    )
    require(runs, "input_norms needs at least one run.")
    for run in runs:
        require(
            run.model is runs[0].model,
            f"all runs must be of one loaded model; these are of {runs[0].model.name} and {run.model.name}. Load "
            f"it once, model = sinklens.load(...), and pass it to every sinklens.generate.",
        )
        require(
            without is None or run.sinks is not None,
            "without= reads the recorded sinks of every run; generate with record_sinks=True.",
        )


def _canvases(
    run: Generation, steps: Sequence[int] | None, without: MeanPlusStd | None, generator: torch.Generator | None
) -> Iterator[tuple[StepIds, Float[Tensor, "batch pos"]]]:
    """The canvases of a run's chosen steps, and how much each of their positions counts."""
    chosen = range(run.steps_run) if steps is None else whole_numbers("step", steps)
    strength = None
    if without is not None:
        assert run.sinks is not None
        strength = without.strength(run.sinks).mean(("layer", "head")).fillna(0).to_numpy()
    for step in sorted({number % run.steps_run for number in chosen if -run.steps_run <= number < run.steps_run}):
        canvas = exact_step(run, step)
        real = canvas.attention_mask & run.active[:, [step]].to(canvas.attention_mask.device)
        counts = real.float()
        if strength is not None:
            weight = torch.from_numpy(strength[:, step, : real.shape[1]]).to(counts)
            counts = counts - counts * (weight if generator is None else _moved(weight, real, generator))
        yield canvas, counts


def _moved(
    weight: Float[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"], generator: torch.Generator
) -> Float[Tensor, "batch pos"]:
    """The weights of each row at random ones of its real positions."""
    moved = torch.zeros_like(weight)
    for row, places in enumerate(real.cpu()):
        at = places.nonzero()[:, 0]
        moved[row, at] = weight[row, at[torch.randperm(len(at), generator=generator)]]
    return moved
