"""Circuits: sets of edges between components, found, run alone and measured.

A `Circuit` is a choice of edges out of all that the model has, the same at every step and position, or chosen by step,
by position (the column at which the receiver reads), or both. Its *share* is kept edges / all edges.

A *case* is one denoising step under replay: a canvas, the same canvas with a corrupted prompt, and a metric m of the
step's logits. A circuit C is run on the clean canvas with every other edge taken from the corrupted pass
(`KeepEdges`). With m(all) the metric of the clean pass and m(none) that of the corrupted one,

    faithfulness(C) = (m(C) − m(none)) / (m(all) − m(none))          1: the circuit does what the model does
    completeness(C) = 1 − faithfulness(all edges but C)              1: without the circuit nothing is left

(Wang et al., 2211.00593; Marks et al., 2403.19647; Hanna et al., 2403.17806). Over several cases, numerator and
denominator are summed. Both may leave the range 0 to 1: an edge can work against the metric.

`edge_scores` estimates what removing each edge would do, for all edges and steps; `Circuit.random`, with as
many edges, is the control; `greedy_circuit` removes edges one by one, measuring each removal exactly (Conmy et al.,
2304.14997).

Pitfall: an edge says that a receiver reads what a sender writes, not what is written. A faithful circuit need not be
complete, since other edges may do the same; report both. A circuit found and measured on one example fits that example;
measure it on other cases.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import CheckpointError, SettingError, require, warn_caller
from sinklens.experiments.attribution import LogitMetric, Pair, metric_value
from sinklens.experiments.circuit_pictures import CircuitEdge, graph, save_graph
from sinklens.experiments.edges import edge_effects
from sinklens.experiments.reruns import replaced_prompts
from sinklens.experiments.step_ids import exact_step
from sinklens.hooks.modulation import Time
from sinklens.interventions.circuits import AXES, KeepEdges
from sinklens.interventions.paths import senders_of
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs.intervention import within
from sinklens.runs.result import Generation
from sinklens.utils.arguments import NonNegative, Seed, as_tuple, checked
from sinklens.utils.atomic import write_file

Most = Annotated[int, Ge(0)] | None
FORMAT = "sinklens circuit 2"


@dataclass(frozen=True, eq=False)
class Circuit:
    """A set of edges; `Circuit.strongest` makes one from scores.

    Attributes:
        kept: True at the edges of the circuit, over ``sender`` and ``receiver``, and perhaps ``step`` and ``pos``.
        scores: a score for each edge of the model, over the same axes; NaN where there is no such path.
    """

    kept: xr.DataArray
    scores: xr.DataArray

    def __post_init__(self) -> None:
        require(
            self.kept.dims == self.scores.dims and self.kept.shape == self.scores.shape,
            f"kept and scores must have the same axes; got {dict(self.kept.sizes)} and {dict(self.scores.sizes)}.",
        )
        require(
            self.kept.dtype == bool and not bool((self.kept & np.isnan(self.scores)).any()),
            "kept must be boolean, and False where scores is NaN: there is no such edge.",
        )

    @classmethod
    @checked
    def strongest(cls, scores: Any, *, count: int | None = None, share: float | int | None = None) -> "Circuit":
        """The edges with the largest scores of either sign.

        Args:
            scores: over ``sender`` and ``receiver``, and perhaps ``step`` and ``pos``; or a Dataset with ``effect``,
                from `edge_attribution` or `path_patching_effects`.
            count: number of edges.
            share: share of all edges, instead of a number.

        Raises:
            SettingError: neither or both of count and share, or one out of range.
        """
        array = scores["effect"] if isinstance(scores, xr.Dataset) else scores
        require(
            isinstance(array, xr.DataArray) and {"sender", "receiver"} <= set(array.dims) <= set(AXES),
            "scores must be an array over sender and receiver, and perhaps step and pos.",
        )
        axes = [axis for axis in AXES if axis in array.dims]
        found = array.transpose(*axes).reset_coords(drop=True)
        missing = {axis: range(array.sizes[axis]) for axis in axes if axis not in found.coords}
        scores = found.assign_coords(missing).astype(float)
        values = np.abs(scores.to_numpy())
        exists = int((~np.isnan(values)).sum())
        require((count is None) != (share is None), "pass one of count= and share=.")
        size = round(exists * share) if count is None and share is not None else count
        require(
            size is not None and 0 <= size <= exists,
            f"a circuit of these scores has 0 to {exists} edges; got count={count}, share={share}.",
        )
        return cls(_marked(scores, np.argsort(-values, axis=None, kind="stable")[:size]), scores)  # NaN comes last

    @property
    def exists(self) -> np.ndarray:
        """True at all edges of the model."""
        return ~np.isnan(self.scores.to_numpy())

    @property
    def size(self) -> int:
        """Number of its edges."""
        return int(self.kept.sum())

    @property
    def share(self) -> float:
        """Its edges / all edges."""
        return self.size / max(1, int(self.exists.sum()))

    @property
    def edges(self) -> list[CircuitEdge]:
        """Its edges, largest scores first."""
        scores = self.scores.where(self.kept).to_series().dropna()
        return sorted(
            (
                CircuitEdge(score=score, **dict(zip(scores.index.names, labels, strict=True)))
                for labels, score in scores.items()
            ),
            key=lambda edge: -abs(edge.score),
        )

    def __repr__(self) -> str:
        return f"Circuit({self.size} of {int(self.exists.sum())} edges)"

    def complement(self) -> "Circuit":
        """All other edges."""
        return Circuit(self.kept.copy(data=~self.kept.to_numpy() & self.exists), self.scores)

    @checked
    def random(self, seed: Seed = 0) -> "Circuit":
        """A circuit of as many edges, drawn from all."""
        chosen = np.random.default_rng(seed).choice(np.flatnonzero(self.exists), self.size, replace=False)
        return Circuit(_marked(self.scores, chosen), self.scores)

    def alone(self, source: Mapping[int, Any], **restrictions: Any) -> KeepEdges:
        """The intervention that runs this circuit, and gives all other edges the values of `source`.

            kept = Activations(names=circuit_points)
            corrupted(base, {" 6": " 8"}, hooks=kept)
            sinklens.generate(model, prompt, replay=base, hooks=circuit.alone(kept.caches))

        Args:
            source: as in `KeepEdges`.
            **restrictions: ``steps``.
        """
        return KeepEdges(kept=self.kept, source=source, **restrictions)

    @checked
    def save(self, path: str | Path) -> None:
        """Write the circuit as NetCDF: `kept` and `scores` with their labels."""
        data = xr.Dataset({"kept": self.kept, "scores": self.scores}, attrs={"format": FORMAT})
        write_file(path, data.to_netcdf(engine="h5netcdf"))

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "Circuit":
        """Read what `save` wrote.

        Raises:
            CheckpointError: there is no such file, or it holds something else.
        """
        try:
            data = xr.load_dataset(path, engine="h5netcdf")
            require(data.attrs["format"] == FORMAT, f"format {data.attrs['format']!r}", KeyError)
            require(
                all(isinstance(one, str) for axis in ("sender", "receiver") for one in data[axis].values.tolist()),
                "its senders and receivers have no names",
                TypeError,
            )
            return cls(data["kept"].astype(bool), data["scores"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} holds no circuit: {error}. Pass a file that Circuit.save wrote.") from error

    @checked
    def to_graph(
        self, tokens: Sequence[str] | None = None, *, slug: str = "circuit", model: str = "", step: int | None = None
    ) -> dict[str, Any]:
        """The circuit as a graph that circuit-tracer's page shows; `save_graph` writes it where the page looks for it.

        Every edge is a link with its score as ``weight`` and its receiver's label as ``receiver``, since a node of the
        graph is a component at a position: a head's queries, keys and values are one node. A key/value head that
        several heads share stands at the head with its own number. Without positions, all nodes are in one column.

        Args:
            tokens: text of each column of the canvas; needed for a circuit by position.
            slug: name of the graph, of letters, digits, ``-`` and ``_``.
            model: name of the model; the page has no feature examples for it.
            step: the step to show; for a circuit that differs by step.

        Returns:
            ``metadata``, ``qParams``, ``nodes`` and ``links``, as in schema version 1 of circuit-tracer 0.5.0.

        Raises:
            SettingError: an invalid slug; a circuit by position without tokens, or with fewer tokens than positions or
                than two; a missing `step`, or one that the circuit does not have.
        """
        steps = self.kept["step"].values.tolist() if "step" in self.kept.dims else [None]
        require(step in steps, f"step must be one of {steps} for this circuit; got {step}.")
        return graph([edge for edge in self.edges if edge.step == step], tokens, slug, model)

    @checked
    def save_graph(self, path: str | Path, tokens: Sequence[str] | None = None, **about: Any) -> Path:
        """Write `to_graph` to ``folder/slug.json`` and list it in ``folder/graph-metadata.json``.

        ``circuit-tracer start-server --graph_file_dir folder`` shows all graphs of a folder.

        Args:
            path: created if it is missing; other graphs in it stay.
            tokens, **about: as in `to_graph`.

        Raises:
            SettingError: see `to_graph`.
            CheckpointError: the folder's ``graph-metadata.json`` is something else.
        """
        return save_graph(self.to_graph(tokens, **about), Path(path))


def _marked(scores: xr.DataArray, places: np.ndarray) -> xr.DataArray:
    """True at flat indices."""
    return scores.copy(data=np.isin(np.arange(scores.size), places).reshape(scores.shape))


@dataclass(frozen=True, eq=False, repr=False)
class CircuitCase:
    """One pass in which a circuit is measured.

    Attributes:
        pair: the clean and the corrupted ids.
        metric: logits -> one number, as in `attribution_patching`.
        step: the step of the run; 0 for a pass of its own.
    """

    pair: Pair
    metric: LogitMetric
    step: int = 0

    def __repr__(self) -> str:
        rows, columns = self.pair.clean.shape
        changed = int((self.pair.clean != self.pair.corrupted).sum())
        name = self.pair.model.name
        return f"CircuitCase({name}, step {self.step}, {rows} × {columns} ids, of which {changed} corrupted)"

    @cached_property
    def full(self) -> float:
        """The metric of the clean pass."""
        with torch.no_grad():
            return float(metric_value(self.metric, self.pair.logits(self.pair.hidden(self.pair.clean, []))))

    @cached_property
    def _source(self) -> tuple[dict[str, Tensor], Tensor]:
        points = dict.fromkeys(sender.point for sender in senders_of(self.pair.model))
        with torch.no_grad():
            return self.pair.values(self.pair.corrupted, points)

    @property
    def empty(self) -> float:
        """The metric of the corrupted pass."""
        return float(metric_value(self.metric, self._source[1]))

    @torch.no_grad()
    @checked
    def value(self, circuit: Circuit) -> float:
        """The metric with the circuit alone.

        Raises:
            SettingError: a circuit by step that lacks this step.
        """
        kept = circuit.kept
        if "step" in kept.dims:
            if (steps := kept["step"].values.tolist()).count(self.step) != 1:
                raise SettingError(
                    f"the circuit has steps {steps}, and a case step {self.step}, which must be one of them, once; "
                    f"average the scores over step for one circuit of all cases."
                )
            kept = kept.sel(step=self.step, drop=True)
        hooks = KeepEdges(kept=kept, source={0: self._source[0]}).hooks_for(self.pair.model)
        return float(metric_value(self.metric, self.pair.logits(self.pair.hidden(self.pair.clean, hooks))))


@checked
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
    return CircuitCase(Pair.of(model, clean_ids, corrupted_ids, attention_mask, time), metric)


@checked
def circuit_cases(
    run: "Generation",
    changes: Mapping[str, str],
    metric: Callable[[Tensor, int], Tensor] | None = None,
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
        SettingError: a step that did not run, or a run that `exact_step` refuses.
    """
    found = []
    for step in within("step", steps, run.steps_run):
        ids, real, time = exact_step(run, step)
        pair = Pair(run.model, ids, replaced_prompts(ids, run, changes).to(ids.device), real, time)
        found.append(CircuitCase(pair, _at_step(run, metric, step), step))
    return found


def _at_step(run: "Generation", metric: Callable[[Tensor, int], Tensor] | None, step: int) -> LogitMetric:
    """The metric of one step."""
    if metric is not None:
        return lambda logits: metric(logits, step)

    def likely(logits: Float[Tensor, "batch pos vocab"]) -> Tensor:
        here: Bool[Tensor, "batch pos"] = (run.undecided[:, step] & run.real)[:, : logits.shape[1]].to(logits.device)
        final = run.canvas[:, -1, : logits.shape[1]].to(logits.device)
        return logits[here].log_softmax(dim=-1).gather(1, final[here][:, None]).mean()

    return likely


@checked
def edge_scores(
    cases: CircuitCase | Sequence[CircuitCase], *, ig_steps: int = 0, by_position: bool = False
) -> xr.DataArray:
    """What keeping each edge adds to the metric, estimated from gradients, in every case.

    The score is the negative of the first-order effect of replacing what the edge carries in the clean pass by what it
    carries in the corrupted one (edge attribution patching, 2310.10348; with `ig_steps` integrated gradients, EAP-IG,
    2403.17806).

    Args:
        cases: one or several cases.
        ig_steps: number of gradients that are averaged; 0 for that of the clean pass.
        by_position: whether to keep positions apart.

    Returns:
        [step, sender, receiver] and perhaps ``pos``; NaN where there is no such path. Average over ``step`` for one
        circuit of all steps.

    Raises:
        SettingError: no case, or what `edge_attribution` refuses.
    """
    cases, found = _listed(cases), []
    for case in cases:
        back = case.pair._replace(clean=case.pair.corrupted, corrupted=case.pair.clean)
        found.append(-edge_effects(back, case.metric, ig_steps, by_position)["effect"])
    return xr.concat(found, dim="step").assign_coords({"step": [case.step for case in cases]}).reset_coords(drop=True)


class CircuitValue(NamedTuple):
    """How well a circuit does what the model does, over some cases.

    Attributes:
        faithfulness, completeness: see the module.
        metric: mean metric of the circuit.
        full, empty: mean metric of the clean passes, and of the corrupted ones.
    """

    faithfulness: float
    completeness: float
    metric: float
    full: float
    empty: float


@checked
def measure_circuit(cases: CircuitCase | Sequence[CircuitCase], circuit: Circuit) -> CircuitValue:
    """Faithfulness and completeness of a circuit.

    Raises:
        SettingError: no case, a circuit by step that lacks the step of a case, or clean and corrupted passes with the
            same metric.
    """
    cases = _listed(cases)
    full, empty = _ends(cases)
    metric, rest = (float(np.mean([case.value(one) for case in cases])) for one in (circuit, circuit.complement()))
    faithful, left = ((value - empty) / (full - empty) for value in (metric, rest))
    return CircuitValue(faithful, 1 - left, metric, full, empty)


def _ends(cases: Sequence[CircuitCase]) -> tuple[float, float]:
    """The mean metric of the clean passes, and of the corrupted ones."""
    full, empty = (float(np.mean(values)) for values in zip(*((case.full, case.empty) for case in cases), strict=True))
    require(
        full != empty,
        "the metric is the same in the clean and in the corrupted passes, so no circuit can explain its "
        "change; choose another corruption or metric.",
    )
    return full, empty


@checked
def greedy_circuit(
    cases: CircuitCase | Sequence[CircuitCase], start: Circuit, *, tolerance: NonNegative = 0.01, most: Most = None
) -> Circuit:
    """Remove edges one by one, weakest scores first, while each costs little faithfulness.

    Every removal is measured exactly, together with all earlier ones; an edge stays removed if faithfulness falls by no
    more than `tolerance`. The tolerance holds for each edge, so the losses of many edges add up: a warning appears if
    no edge is left.

    Args:
        cases: where faithfulness is measured.
        start: the circuit to begin with, such as the strongest 20 % of the edges; its scores give the order.
        tolerance: largest loss of faithfulness for one edge.
        most: largest number of edges that are tried; one pass per edge and case.

    Raises:
        SettingError: as `measure_circuit`; a negative tolerance, or a start without edges.
    """
    require(start.size, "the circuit to begin with has no edges; pass one that has, such as the strongest 20 %.")
    cases = _listed(cases)
    full, empty = _ends(cases)

    def share(circuit: Circuit) -> float:
        return (float(np.mean([case.value(circuit) for case in cases])) - empty) / (full - empty)

    first = share(start)
    best, now = start, first
    places = np.argwhere(start.kept.to_numpy())
    order = np.argsort(np.abs(start.scores.to_numpy()[start.kept.to_numpy()]), kind="stable")[:most]
    for place in (tuple(places[number]) for number in order):
        kept = best.kept.copy()
        kept[place] = False
        without = Circuit(kept, start.scores)
        if now - (left := share(without)) <= tolerance:
            best, now = without, left
    if not best.size:
        warn_caller(
            f"greedy_circuit removed all {start.size} edges, since none costs more faithfulness than "
            f"tolerance={tolerance:g} when it is removed. With all of them faithfulness is {first:.3g}, without "
            f"{now:.3g}. Pass a smaller tolerance, or begin with more edges if faithfulness is small with all of them.",
            UserWarning,
        )
    return best


def _listed(cases: CircuitCase | Sequence[CircuitCase]) -> tuple[CircuitCase, ...]:
    require(found := as_tuple(cases), "pass at least one case, from circuit_case or circuit_cases.")
    return found
