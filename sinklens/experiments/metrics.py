"""A metric of every intervention at every step, for `sweep`.

A metric is a function of one step's output, `StepOutput`, with one number per prompt. Under replay every step begins on
the base run's canvas, so the steps are separate passes. Interventions that act on each step alone
(`Intervention.within_step`) then need only the steps that they name: `measured` runs these directly, all interventions
of a step in one batch. All others run from the first step on, and have a value at every step.

Pitfall: under replay a step's canvas is the base run's even where the intervention would have decided another token; a
metric sees what the step would decide, not what follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.experiments.stacking import Repeated, Stacked
from sinklens.hooks.forward_pass import ForwardPass
from sinklens.hooks.points import Point
from sinklens.interventions.places import follows_run
from sinklens.runs.denoising import Denoising
from sinklens.runs.intervention import Canvas, Intervention, Pairs, Reader, RunContext
from sinklens.runs.result import Generation


class StepOutput(NamedTuple):
    """What a metric reads: one step of one intervention.

    Attributes:
        step: number of the step.
        logits: of the token at each position that the step computes, in float32; in an autoregressive run, of the token
            being decoded.
        base: the logits without the intervention.
        canvas: ids of these positions; in an autoregressive run, of all positions.
        undecided: which of these positions are undecided when the step begins.
        first: number of the batch's first prompt in the sweep.
    """

    step: int
    logits: Float[Tensor, "prompt pos vocab"]
    base: Float[Tensor, "prompt pos vocab"]
    canvas: Int[Tensor, "prompt canvas"]
    undecided: Bool[Tensor, "prompt canvas"]
    first: int


Metric = Callable[[StepOutput], Tensor | float | int]


Output = tuple[
    Float[Tensor, "row pos vocab"], Int[Tensor, "row canvas"], Bool[Tensor, "row canvas"], Bool[Tensor, " row"]
]
"""Logits, canvas, undecided positions and active rows of one pass: of several copies of the prompts."""
Start = Callable[[Any, Any, Repeated | None, int], Denoising]
"""(prompts, hooks, canvases to replay, copies of the prompts) -> a run that has not begun."""


def measured(
    start: Start, listed: Sequence[list[Any]], metric: Metric, rows: int, batch: Any, first: int, replay: bool
) -> xr.Dataset:
    """``metric`` [intervention, prompt, step] and ``metric_base`` [prompt, step] of a batch of prompts.

    Args:
        start: begins a run.
        listed: the interventions.
        metric: see `StepOutput`.
        rows: largest number of rows in a pass.
        batch: the prompts, of which the first has the number `first` in the sweep.
        replay: whether every step begins on the canvas of the run without interventions.
    """
    base = finished(start(batch, [], None, 1))
    found = _MetricValues(metric, len(listed), len(base.answers), base.steps_run, first)
    alone = [_steps_alone(hooks, base) if replay else None for hooks in listed]
    at_once = max(1, rows // len(base.answers) - 1)  # copies of the batch, besides the one without interventions
    for step in sorted({step for steps in alone if steps is not None for step in steps}):
        plain = _pass(start(batch, [], None, 1), base, step)
        found.keep([None], step, plain)
        for part in _parts([n for n, steps in enumerate(alone) if steps is not None and step in steps], at_once):
            denoising = start(batch, [Stacked([listed[number] for number in part])], None, len(part))
            output = _pass(denoising, base, step)
            denoising.controls.report(refuse=False)
            found.keep(part, step, output, plain[0])
    for part in _parts([number for number, steps in enumerate(alone) if steps is None], at_once):
        stacked, reader = Stacked([[], *(listed[n] for n in part)]), _MetricReader(numbers=[None, *part], found=found)
        canvases = Repeated.of(base, len(part) + 1) if replay else None
        finished(start(batch, [stacked, reader], canvases, len(part) + 1))
    return found.dataset()


def finished(denoising: Denoising) -> Generation:
    """The result of a run that has not begun; a control without any key is not refused."""
    denoising.carry_out()
    denoising.controls.report(refuse=False)
    return denoising.result()


def _parts(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _steps_alone(hooks: Sequence[Any], base: Generation) -> list[int] | None:
    """The steps that have to be run, each alone; None if the run has to begin at its first step."""
    settings, tree = base.settings, base.model.tree
    reuses = settings.reuses_keys or settings.caches_keys or settings.guided
    acts_alone = (isinstance(entry, Intervention) and entry.within_step and not follows_run(entry) for entry in hooks)
    if tree.causal or tree.architecture.encoder or tree.changes_attention or reuses or not hooks or not all(acts_alone):
        return None
    named = {step for entry in hooks for step in entry.acting_steps(settings.most_steps)}
    return sorted(step for step in named if 0 <= step < base.steps_run)


@torch.no_grad()
def _pass(denoising: Denoising, base: Generation, step: int) -> Output:
    """One step of a run that has not begun, on the canvas of the base run."""
    state = denoising.state
    tree, canvas = state.tree, base.canvas[:, step].to(state.canvas.device)
    copies, time = len(state.canvas) // len(canvas), base.time_at(step)
    state.canvas = canvas.repeat(copies, 1)
    state.undecided = base.undecided[:, step].to(canvas.device).repeat(copies, 1)
    with tree.hooks(fwd_hooks=denoising.hooks):
        state.announce(step)
        if time is not None:
            state.time = time.to(canvas.device).repeat(copies)
        try:
            ids = state.begin_step()
            logits = state.logits(ids, torch.ones_like(ids, dtype=torch.bool))
        finally:
            tree.watch.forward_pass = ForwardPass()
    return (
        logits.view(*ids.shape, -1), ids, state.undecided_before() & state.real, base.active[:, step].repeat(copies),
    )  # fmt: skip


class _MetricValues:
    """Collects the metric of every intervention and step."""

    def __init__(self, metric: Metric, interventions: int, prompts: int, steps: int, first: int) -> None:
        self._metric, self._first, self._prompts = metric, first, prompts
        self.values = np.full((interventions, prompts, steps), np.nan)
        self.base = np.full((prompts, steps), np.nan)

    def keep(
        self,
        numbers: Sequence[int | None],
        step: int,
        output: Output,
        base: Float[Tensor, "prompt pos vocab"] | None = None,
    ) -> None:
        """Evaluate the metric for interventions, or for the base run (None); NaN in rows that wait for others.

        Args:
            numbers: the intervention of each copy of the prompts in `output`.
            base: logits of the base run; by default those of the first copy.
        """
        if step >= self.base.shape[1]:  # a run of other prompts of the batch may be longer
            return
        for number, (logits, canvas, undecided, active) in zip(
            numbers, zip(*(value.chunk(len(numbers)) for value in output), strict=True), strict=True
        ):
            base = logits if base is None else base
            shown = StepOutput(step, logits, base, canvas, undecided, self._first)
            value = torch.as_tensor(self._metric(shown)).detach()
            require(
                value.numel() == self._prompts,
                f"a metric must return one number for each of the {self._prompts} prompts in the batch; got a value of "
                f"shape {list(value.shape)}.",
            )
            (self.base if number is None else self.values[number])[:, step] = (
                value.reshape(-1).double().masked_fill(~active.to(value.device), torch.nan).cpu().numpy()
            )

    def dataset(self) -> xr.Dataset:
        """The values, with numbers for interventions."""
        steps = {"step": np.arange(self.base.shape[1])}
        dims = ("intervention", "prompt", "step")
        return xr.Dataset({"metric": (dims, self.values), "metric_base": (dims[1:], self.base)}, steps)


@dataclass(kw_only=True, eq=False)
class _MetricReader(Reader):
    """Evaluates the metric at every step of a run of several copies of the prompts.

    Attributes:
        numbers: the intervention of each copy; None for the copy without one.
        found: collects the values.
    """

    on_canvas: ClassVar[bool] = True

    numbers: Sequence[int | None]
    found: _MetricValues

    def pairs(self, model: Any, run: RunContext) -> Pairs:
        canvas = Canvas(run)

        def read(value: Float[Tensor, "row pos vocab"], hook: Point) -> None:
            described = hook.forward_pass
            assert canvas.now is not None
            assert described.active is not None
            ids, size = canvas.now.ids, value.shape[1]
            undecided = canvas.now.undecided & (run.real if described.decidable is None else described.decidable)[
                :, : ids.shape[1]
            ].to(ids.device)
            if not run.causal and size < ids.shape[1]:  # with cached blocks, or a canvas after its text
                first = described.first(size)  # where the logits begin: all queries, or their last block
                ids, undecided = ids[:, first : first + size], undecided[:, first : first + size]
            self.found.keep(self.numbers, hook.step or 0, (value.detach().float(), ids, undecided, described.active))

        return [("denoise.hook_canvas", canvas.hook), ("denoise.hook_logits", read)]


def at_places(found: xr.Dataset, names: Sequence[Any]) -> xr.Dataset:
    """The values over the names of the interventions; of places over layer, head and step."""
    if isinstance(names[0], str):
        return found.assign_coords(intervention=list(names))
    metric, axes = found["metric"], ["layer", "head", "step"][: len(names[0])]
    if "step" in axes:  # the value at the step that the name has
        metric = metric.sel(step=xr.DataArray([name[2] for name in names], dims="intervention")).drop_vars("step")
    index = pd.MultiIndex.from_tuples(list(names), names=axes)
    grid = metric.assign_coords(xr.Coordinates.from_pandas_multiindex(index, "intervention")).unstack("intervention")
    grid = grid.transpose("layer", "head", "step", "prompt")
    base = found["metric_base"].transpose("step", "prompt").sel(step=grid["step"])
    return xr.Dataset({"metric": grid, "metric_base": base})
