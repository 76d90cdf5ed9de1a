"""Find circuits, and measure them: faithfulness and completeness against the share of edges kept.

A *case* is one denoising step under replay: a canvas, the same canvas with a corrupted prompt, and a metric m of the
step's logits. A circuit C is run on the clean canvas with every other edge taken from the corrupted pass
(`KeepEdges`). With m(all) the metric of the clean pass and m(none) that of the corrupted one,

    faithfulness(C) = (m(C) − m(none)) / (m(all) − m(none))          1: the circuit does what the model does
    completeness(C) = 1 − faithfulness(all edges but C)              1: without the circuit nothing is left

(Wang et al., 2211.00593; Marks et al., 2403.19647; Hanna et al., 2403.17806). Over several cases, numerator and
denominator are summed. Both may leave the range 0 to 1: an edge can work against the metric.

`edge_scores` estimates what removing each edge would do, for all edges and steps; `circuit_curves` compares the
strongest edges with as many random ones and with random ones of the same degrees; `greedy_circuit` removes edges one by
one, measuring each removal exactly (Conmy et al., 2304.14997).

Pitfall: a faithful circuit need not be complete, since other edges may do the same; report both. A circuit found and
measured on one example fits that example; measure it on other cases.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.attribution import LogitMetric, Pair, metric_value
from sinklens.experiments.circuit import Circuit
from sinklens.experiments.corruption import replaced_prompts
from sinklens.experiments.edges import edge_attribution
from sinklens.experiments.step_ids import exact_step
from sinklens.hooks.modulation import Time
from sinklens.interventions.circuits import KeepEdges, senders_of
from sinklens.model.prompts import Prompt
from sinklens.runs.intervention import within
from sinklens.runs.result import require_run

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

StepMetric = Callable[[Tensor, int], Tensor]
KINDS = ("circuit", "random", "degree")


class CircuitCase(NamedTuple):
    """One pass in which a circuit is measured.

    Attributes:
        model: the model.
        clean, corrupted: ids of the same shape.
        metric: logits -> one number, as in `attribution_patching`.
        real: False on left padding; None without.
        time: noise level, for a network that reads it.
        step: the step of the run; 0 for a pass of its own.
    """

    model: "Model"
    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    metric: LogitMetric
    real: Bool[Tensor, "batch pos"] | None = None
    time: Time = None
    step: int = 0

    def __repr__(self) -> str:
        rows, columns = self.clean.shape
        changed = int((self.clean != self.corrupted).sum())
        return f"CircuitCase({self.model.name}, step {self.step}, {rows} × {columns} ids, of which {changed} corrupted)"


def circuit_case(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
) -> CircuitCase:
    """A case of two single passes; arguments and errors are those of `edge_attribution`."""
    pair = Pair.of(model, clean_ids, corrupted_ids, attention_mask, time)
    return CircuitCase(model, pair.clean, pair.corrupted, metric, pair.real, pair.time)


def circuit_cases(
    run: "Generation",
    changes: Mapping[str, str],
    metric: StepMetric | None = None,
    steps: Sequence[int] | None = None,
) -> list[CircuitCase]:
    """A case for each step of a run: its canvas, and the same canvas with other text in the prompt.

    Args:
        run: a run of a diffusion model, without a cache policy; its hooks are not applied.
        changes: old text -> new text, as in `corrupted`.
        metric: logits and step -> one number; by default the mean log-probability of the final tokens at the positions
            that are undecided at the step.
        steps: steps of the run; negative ones count from the end. None means all.

    Raises:
        PromptError: as `corrupted`.
        SettingError: a step that did not run, or see `exact_step`.
    """
    require_run(run, "run")
    found = []
    for step in within("step", steps, run.steps_run):
        ids, real, time = exact_step(run, step)
        other = replaced_prompts(ids, run, changes).to(ids.device)
        found.append(CircuitCase(run.model, ids, other, _at_step(run, metric, step), real, time, step))
    return found


def _at_step(run: "Generation", metric: StepMetric | None, step: int) -> LogitMetric:
    """The metric of one step."""
    if metric is not None:
        return lambda logits: metric(logits, step)
    undecided, final = run.undecided[:, step] & run.real, run.canvas[:, -1]

    def likely(logits: Float[Tensor, "batch pos vocab"]) -> Tensor:
        here = undecided[:, : logits.shape[1]].to(logits.device)
        logs = logits[here].log_softmax(dim=-1)
        return logs.gather(1, final[:, : logits.shape[1]].to(logits.device)[here][:, None]).mean()

    return likely


def edge_scores(cases: Sequence[CircuitCase], *, path: int = 0, by_position: bool = False) -> xr.DataArray:
    """What keeping each edge adds to the metric, estimated from gradients, in every case.

    The score is minus the first-order effect of replacing what the edge carries in the clean pass by what it carries in
    the corrupted one (edge attribution patching, 2310.10348; with `path` integrated gradients, EAP-IG, 2403.17806).

    Args:
        cases: the cases.
        path: number of gradients that are averaged; 0 for that of the clean pass.
        by_position: whether to keep positions apart.

    Returns:
        [step, sender, receiver] and perhaps ``pos``; NaN where there is no such path. Average over ``step`` for one
        circuit of all steps.

    Raises:
        SettingError: no case, or see `edge_attribution`.
    """
    _check_cases(cases)
    found = [
        -edge_attribution(
            case.model, case.corrupted, case.clean, case.metric, case.real, time=case.time, path=path,
            by_position=by_position,
        )["effect"]
        for case in cases
    ]  # fmt: skip
    coords = {"step": [case.step for case in cases]}
    return xr.concat(found, dim="step").assign_coords(coords).reset_coords(drop=True)


class CircuitValue(NamedTuple):
    """How well a circuit does what the model does, over some cases.

    Attributes:
        faithfulness, completeness: see the module.
        metric: mean metric of the circuit.
        full, empty: mean metric of the clean pass, and of the corrupted one.
    """

    faithfulness: float
    completeness: float
    metric: float
    full: float
    empty: float


def measure_circuit(cases: Sequence[CircuitCase], circuit: Circuit) -> CircuitValue:
    """Faithfulness and completeness of a circuit.

    Raises:
        SettingError: no case, a circuit by step that lacks the step of a case, or clean and corrupted passes with the
            same metric.
    """
    return _Measured(cases).value(circuit)


class _Measured:
    """Cases with their values in the source, computed once."""

    def __init__(self, cases: Sequence[CircuitCase]) -> None:
        _check_cases(cases)
        self._cases, self._pairs, self._sources = list(cases), [], []
        full, empty = [], []
        for case in cases:
            pair = Pair.of(case.model, case.clean, case.corrupted, case.real, case.time)
            points = dict.fromkeys(sender.point for sender in senders_of(case.model))
            with torch.no_grad():
                source, corrupted = pair.values(pair.corrupted, points)
                clean = pair.logits(pair.hidden(pair.clean, []))
                full.append(float(metric_value(case.metric, clean)))
                empty.append(float(metric_value(case.metric, corrupted)))
            self._pairs.append(pair)
            self._sources.append(source)
        self.full, self.empty = float(np.mean(full)), float(np.mean(empty))
        if self.full == self.empty:
            raise SettingError(
                "the metric is the same in the clean and in the corrupted passes, so no circuit can explain its "
                "change; choose another corruption or metric."
            )

    @torch.no_grad()
    def metric(self, circuit: Circuit) -> float:
        """Mean metric with the circuit alone."""
        values = []
        for case, pair, source in zip(self._cases, self._pairs, self._sources, strict=True):
            kept = circuit.kept
            if "step" in kept.dims:
                if (steps := kept["step"].values.tolist()).count(case.step) != 1:
                    raise SettingError(
                        f"the circuit has steps {steps}, and a case step {case.step}, which must be one of them, once; "
                        f"average the scores over step for one circuit of all cases."
                    )
                kept = kept.sel(step=case.step, drop=True)
            hooks = KeepEdges(kept=kept, source={0: source}).hooks_for(case.model)
            values.append(float(metric_value(case.metric, pair.logits(pair.hidden(pair.clean, hooks)))))
        return float(np.mean(values))

    def share(self, circuit: Circuit) -> float:
        """Faithfulness."""
        return (self.metric(circuit) - self.empty) / (self.full - self.empty)

    def value(self, circuit: Circuit) -> CircuitValue:
        """All measures."""
        metric = self.metric(circuit)
        faithful = (metric - self.empty) / (self.full - self.empty)
        return CircuitValue(faithful, 1 - self.share(circuit.complement()), metric, self.full, self.empty)


def circuit_curves(
    cases: Sequence[CircuitCase],
    scores: xr.DataArray,
    shares: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *,
    draws: int = 5,
    seed: int = 0,
) -> xr.Dataset:
    """Faithfulness and completeness of the strongest edges, beside random circuits of the same size.

    Args:
        cases: where the circuits are measured; others than those of the scores test whether they carry over.
        scores: from `edge_scores`, or their mean over steps.
        shares: shares of all edges that are kept.
        draws: number of random circuits of each kind.
        seed: of the draws.

    Returns:
        ``faithfulness`` and ``completeness`` [share, kind, draw]: kind "circuit" (the same at every draw), "random",
        and "degree", in which every component has as many edges as in the circuit (`Circuit.degree_matched`); and
        ``edges`` [share], and ``changed`` [share, draw], the share of the edges of "degree" that are not in the
        circuit: where it is near 0, the control says little.

    Raises:
        SettingError: as `measure_circuit`; no draws.
    """
    if draws < 1:
        raise SettingError(f"draws must be at least 1; got {draws}.")
    measured = _Measured(cases)
    found = np.full((2, len(shares), len(KINDS), draws), np.nan)
    sizes, changed = [], np.full((len(shares), draws), np.nan)
    for at, share in enumerate(shares):
        circuit = Circuit.strongest(scores, share=share)
        sizes.append(circuit.size)
        value = measured.value(circuit)
        found[:, at, 0] = np.array([value.faithfulness, value.completeness])[:, None]
        for draw in range(draws):
            matched = circuit.degree_matched(seed + draw)
            changed[at, draw] = 1 - circuit.overlap(matched).shared / max(1, circuit.size)
            for kind, other in enumerate((circuit.random(seed + draw), matched), start=1):
                value = measured.value(other)
                found[:, at, kind, draw] = value.faithfulness, value.completeness
    axes = ("share", "kind", "draw")
    data: dict[str, Any] = {"faithfulness": (axes, found[0]), "completeness": (axes, found[1])}
    data |= {"edges": (("share",), np.array(sizes)), "changed": (("share", "draw"), changed)}
    coords = {"share": list(shares), "kind": list(KINDS), "draw": list(range(draws))}
    return xr.Dataset(data, coords, {"full": measured.full, "empty": measured.empty})


def greedy_circuit(
    cases: Sequence[CircuitCase], start: Circuit, *, tolerance: float = 0.01, most: int | None = None
) -> Circuit:
    """Remove edges one after the other, weakest scores first, while each costs little faithfulness.

    Every removal is measured exactly, with all edges that were removed before: an edge goes if faithfulness falls by no
    more than `tolerance`.

    Args:
        cases: where faithfulness is measured.
        start: the circuit to begin with, such as the strongest 20 % of the edges; its scores give the order.
        tolerance: largest loss of faithfulness for one edge.
        most: largest number of edges that are tried; one pass per edge and case.

    Raises:
        SettingError: as `measure_circuit`; a negative tolerance.
    """
    if tolerance < 0:
        raise SettingError(f"tolerance must not be negative; got {tolerance}.")
    measured = _Measured(cases)
    kept, scores = start.kept.to_numpy().copy(), start.scores.to_numpy()
    now = measured.share(start)
    places = np.argwhere(kept)
    order = np.argsort(np.abs(scores[kept]), kind="stable")[:most]
    for place in (tuple(places[number]) for number in order):
        kept[place] = False
        without = measured.share(Circuit(start.kept.copy(data=kept.copy()), start.scores))
        if now - without <= tolerance:
            now = without
        else:
            kept[place] = True
    return Circuit(start.kept.copy(data=kept), start.scores)


def _check_cases(cases: Sequence[CircuitCase]) -> None:
    if not cases:
        raise SettingError("pass at least one case, from circuit_case or circuit_cases.")
