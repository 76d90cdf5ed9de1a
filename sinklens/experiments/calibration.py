"""The norms of the inputs of weight matrices, from finished runs: what Wanda's score of a weight needs.

For each chosen step of each run, one pass over the canvas of the step is made, and for every matrix and input j

    ‖X_j‖₂ = (Σ_p (1 − w_p)² x_pj²)^½,

p over the positions of all these canvases, padding and finished rows left out (Wanda, 2306.11695). w_p is 0, or with
``without=`` the soft weight of a sink at p (Sink-Aware Pruning, 2602.17664): activations at sinks are scaled down, so
that weights which only serve them are removed first.

Limitation: hooks of the runs are not applied, and the weight of a position is one number for all layers.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.step_ids import StepIds, exact_step
from sinklens.interventions.pruning import InputNorms
from sinklens.interventions.weights import weight_matrices
from sinklens.runs.intervention import whole_numbers
from sinklens.runs.result import require_run
from sinklens.sinks.detectors import MeanPlusStd
from sinklens.utils.arguments import Seed, read_as

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


class _Canvas(NamedTuple):
    """A canvas of the calibration, and how much each of its positions counts."""

    step: StepIds
    counts: Float[Tensor, "batch pos"]


def input_norms(
    runs: "Generation | Sequence[Generation]",
    *,
    steps: Sequence[int] | None = None,
    without: MeanPlusStd | None = None,
    shuffled: Seed | None = None,
) -> InputNorms:
    """Collect the norms of the inputs of every weight matrix over the canvases of some steps.

    Args:
        runs: one or several runs of one model, whose prompts are the calibration set.
        steps: steps of the runs; negative ones count from the end. Steps that a run did not reach are left out. None
            means all.
        without: definition of the sinks that are scaled down by 1 − their strength, averaged over layers and heads;
            None counts every position fully.
        shuffled: seed with which the strengths of each row and step are put at random positions instead, as a control;
            None leaves them in place.

    Raises:
        SettingError: no run, runs of several models, no step that any run reached, a run without recorded sinks,
            `shuffled` without `without`, or see `exact_step` in step_ids.py.
    """
    listed = list(runs) if isinstance(runs, Sequence) else [runs]
    _check(listed, without, shuffled)
    model = listed[0].model
    sums = _Sums(model)
    generator = None if shuffled is None else torch.Generator().manual_seed(read_as(Seed, "shuffled", shuffled))
    with torch.no_grad(), sums:
        for run in listed:
            for canvas in _canvases(run, steps, without, generator):
                sums.begin(canvas.counts)
                model.tree.peek(*canvas.step[:2], [], canvas.step.time)
    if not sums.positions:
        longest = max(run.steps_run for run in listed)
        raise SettingError(f"no run reached any of the steps {steps!r}; the longest has {longest} steps.")
    return InputNorms({name: total.sqrt().cpu() for name, total in sums.totals.items()}, sums.positions)


def _check(runs: "list[Generation]", without: MeanPlusStd | None, shuffled: int | None) -> None:
    if not isinstance(without, MeanPlusStd | None):
        raise SettingError(
            f"without must be MeanPlusStd(...), whose strength is a share, or None; got {without!r:.80}."
        )
    if without is None and shuffled is not None:
        raise SettingError("shuffled= moves the sinks of without=; pass without=MeanPlusStd(), or leave it out.")
    if not runs:
        raise SettingError("input_norms needs at least one run.")
    for run in runs:
        require_run(run, "runs")
        if run.model is not runs[0].model:
            raise SettingError(
                f"all runs must be of one loaded model; these are of {runs[0].model.name} and {run.model.name}. Load "
                f"it once, model = sinklens.load(...), and pass it to every sinklens.generate."
            )
        if without is not None and run.sinks is None:
            raise SettingError("without= reads the recorded sinks of every run; generate with record_sinks=True.")


def _canvases(
    run: "Generation", steps: Sequence[int] | None, without: MeanPlusStd | None, generator: torch.Generator | None
) -> Iterator[_Canvas]:
    """The canvases of a run's chosen steps."""
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
        yield _Canvas(canvas, counts)


def _moved(
    weight: Float[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"], generator: torch.Generator
) -> Float[Tensor, "batch pos"]:
    """The weights of each row at random ones of its real positions."""
    moved = torch.zeros_like(weight)
    for row, places in enumerate(real.cpu()):
        at = places.nonzero()[:, 0]
        moved[row, at] = weight[row, at[torch.randperm(len(at), generator=generator)]]
    return moved


class _Sums:
    """Adds up the squared inputs of every matrix in the passes of a block.

    Attributes:
        totals: name of a matrix -> Σ (1 − w)² x² of each input.
        positions: Σ (1 − w).
    """

    def __init__(self, model: Any) -> None:
        matrices = [found for layer in range(model.cfg.n_layers) for found in weight_matrices(model, layer)]
        self._names = {found.module: found.name for found in matrices if found.name.endswith(".weight")}
        self.totals: dict[str, Tensor] = {}
        self.positions = 0.0
        self._counts = torch.zeros(0, 0)

    def __enter__(self) -> "_Sums":
        self._handles = [module.register_forward_pre_hook(self._add) for module in self._names]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, counts: Float[Tensor, "batch pos"]) -> None:
        """Begin a pass in which position p counts by ``counts[..., p]``."""
        self._counts = counts
        self.positions += float(counts.sum())

    def _add(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """Add the inputs of a module: at positions, at tokens (routers), or of rows (conditioning)."""
        x = inputs[0].flatten(0, -2).float()
        counts = self._counts.flatten() if len(x) == self._counts.numel() else self._counts.amax(dim=1)
        if len(x) != len(counts):
            raise SettingError(
                f"{self._names[module]} reads {len(x)} inputs in a pass of {self._counts.numel()} positions, so they "
                f"cannot be assigned to positions; prune with score='magnitude'."
            )
        name = self._names[module]
        self.totals[name] = self.totals.get(name, 0) + counts.to(x) ** 2 @ x**2
