"""Circuits: sets of edges, each from one component to another, that can be run alone, compared, drawn and stored.

A `Circuit` is a choice of edges out of all that the model has, the same at every step and position, or chosen by step,
by position (the column at which the receiver reads), or both. Its *share* is kept edges / all edges.
circuit_search.py finds circuits and measures them.

Pitfall: an edge says that a receiver reads what a sender writes, not what is written. Two circuits with the same edges
may compute different things on other inputs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from sinklens.errors import CheckpointError, SettingError
from sinklens.experiments.circuit_pictures import CircuitEdge, dot, graph, save_graph
from sinklens.interventions.circuits import KeepEdges
from sinklens.utils.atomic import atomic_write

AXES = ("step", "sender", "receiver", "pos")
FORMAT = "sinklens circuit 1"


class Overlap(NamedTuple):
    """Edges that two circuits share.

    Attributes:
        shared: number of edges in both.
        jaccard: shared / edges in either; NaN if both are empty.
        expected: the shared number of two random circuits of these sizes, |A| |B| / all edges.
    """

    shared: int
    jaccard: float
    expected: float


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
        if self.kept.dims != self.scores.dims or self.kept.shape != self.scores.shape:
            raise SettingError(
                f"kept and scores must have the same axes; got {dict(self.kept.sizes)} and {dict(self.scores.sizes)}."
            )
        if self.kept.dtype != bool or bool((self.kept & np.isnan(self.scores)).any()):
            raise SettingError("kept must be boolean, and False where scores is NaN: there is no such edge.")

    @classmethod
    def strongest(cls, scores: Any, *, count: int | None = None, share: float | int | None = None) -> "Circuit":
        """The edges with the largest scores of either sign.

        Args:
            scores: over ``sender`` and ``receiver``, and perhaps ``step`` and ``pos``; or a Dataset with ``effect``.
            count: number of edges.
            share: share of all edges, instead of a number.

        Raises:
            SettingError: neither or both of count and share, or one out of range.
        """
        scores = _ordered(scores)
        values = np.abs(scores.to_numpy())
        exists = int((~np.isnan(values)).sum())
        if (count is None) == (share is None):
            raise SettingError("pass one of count= and share=.")
        size = round(exists * share) if count is None and share is not None else count
        if size is None or not 0 <= size <= exists:
            raise SettingError(f"a circuit of these scores has 0 to {exists} edges; got count={count}, share={share}.")
        order = np.argsort(-values, axis=None, kind="stable")[:size]  # NaN comes last
        kept: np.ndarray = np.zeros(values.size, dtype=bool)
        kept[order] = True
        return cls(scores.copy(data=kept.reshape(values.shape)), scores)

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
        values, found = self.scores.to_numpy(), []
        for place in zip(*np.nonzero(self.kept.to_numpy()), strict=True):
            labels = {
                str(axis): self.kept[axis].values[index].item()
                for axis, index in zip(self.kept.dims, place, strict=True)
            }
            sender, receiver = str(labels["sender"]), str(labels["receiver"])
            found.append(CircuitEdge(sender, receiver, float(values[place]), labels.get("step"), labels.get("pos")))
        return sorted(found, key=lambda edge: -abs(edge.score))

    def __repr__(self) -> str:
        return f"Circuit({self.size} of {int(self.exists.sum())} edges)"

    def complement(self) -> "Circuit":
        """All other edges."""
        return Circuit(self.kept.copy(data=~self.kept.to_numpy() & self.exists), self.scores)

    def random(self, seed: int = 0) -> "Circuit":
        """As many edges, drawn among all."""
        exists = np.flatnonzero(self.exists)
        chosen = np.random.default_rng(seed).choice(exists, self.size, replace=False)
        kept: np.ndarray = np.zeros(self.exists.size, dtype=bool)
        kept[chosen] = True
        return Circuit(self.kept.copy(data=kept.reshape(self.exists.shape)), self.scores)

    def degree_matched(self, seed: int = 0, swaps: int = 20) -> "Circuit":
        """A random circuit in which every sender and every receiver has as many edges as here.

        Pairs of edges exchange their receivers, a → b and c → d for a → d and c → b, where both new edges exist and
        are not in the circuit yet; at one step and position at a time. A circuit that leaves no exchange open stays
        as it is; compare it with `overlap`.

        Args:
            seed: of the draws.
            swaps: number of tries per edge.
        """
        rng = np.random.default_rng(seed)
        kept = self.kept.transpose("step", "pos", "sender", "receiver", missing_dims="ignore")
        scores = self.scores.transpose(*kept.dims).to_numpy()
        layers = kept.to_numpy().copy().reshape(-1, *kept.shape[-2:])
        exists = ~np.isnan(scores).reshape(layers.shape)
        for layer, possible in zip(layers, exists, strict=True):
            edges = np.argwhere(layer).tolist()
            for _ in range(swaps * len(edges) if len(edges) > 1 else 0):
                first, second = rng.choice(len(edges), 2, replace=False).tolist()
                (a, b), (c, d) = edges[first], edges[second]
                if possible[a, d] and possible[c, b] and not layer[a, d] and not layer[c, b]:
                    layer[a, b] = layer[c, d] = False
                    layer[a, d] = layer[c, b] = True
                    edges[first], edges[second] = [a, d], [c, b]
        return Circuit(kept.copy(data=layers.reshape(kept.shape)).transpose(*self.kept.dims), self.scores)

    def overlap(self, other: "Circuit") -> Overlap:
        """The edges that this circuit shares with another, of another model of the same sizes, step or input.

        Raises:
            SettingError: their edges are not the same: other labels or axes.
        """
        if self.kept.dims != other.kept.dims or not np.array_equal(self.exists, other.exists):
            raise SettingError(
                f"the circuits have different edges to choose from, {dict(self.kept.sizes)} and "
                f"{dict(other.kept.sizes)}; select the same steps and positions, of models with the same sizes."
            )
        shared = int((self.kept.to_numpy() & other.kept.to_numpy()).sum())
        either = self.size + other.size - shared
        total = max(1, int(self.exists.sum()))
        return Overlap(shared, shared / either if either else float("nan"), self.size * other.size / total)

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

    def save(self, path: str | Path) -> None:
        """Write the circuit as JSON: the edges as `CircuitEdge`, and all labels and scores."""
        data = {
            "format": FORMAT,
            "axes": {str(axis): self.kept[axis].values.tolist() for axis in self.kept.dims},
            "edges": [edge._asdict() for edge in self.edges],
            "scores": np.where(self.exists, self.scores, 0.0).tolist(),
            "exists": self.exists.tolist(),
            "kept": self.kept.to_numpy().tolist(),
        }
        with atomic_write(path) as part:
            part.write_text(json.dumps(data))

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Read what `save` wrote.

        Raises:
            CheckpointError: there is no such file, or it holds something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise KeyError(f"format {data['format']!r}")
            scores = np.where(np.array(data["exists"]), np.array(data["scores"], dtype=float), np.nan)
            coords, dims = dict(data["axes"]), tuple(data["axes"])
            kept = xr.DataArray(np.array(data["kept"], dtype=bool), coords, dims)
            return cls(kept, xr.DataArray(scores, coords, dims))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} holds no circuit: {error}. Pass a file that Circuit.save wrote.") from error

    def to_dot(self) -> str:
        """The circuit as Graphviz DOT text: components in layers, edges as wide as their score, negative ones red."""
        return dot(self.edges)

    def to_graph(
        self, tokens: Sequence[str] | None = None, *, slug: str = "circuit", model: str = "", step: int | None = None
    ) -> dict[str, Any]:
        """The circuit as a graph that circuit-tracer's page shows; `save_graph` writes it where the page looks for it.

        Every edge is a link with its score as ``weight`` and its receiver's label as ``receiver``, since a node of the
        graph is a component at a position: a head's queries, keys and values are one node. A key/value head that
        several heads share is at the head of its number. Without positions, all nodes are in one column.

        Args:
            tokens: text of each column of the canvas; needed for a circuit by position.
            slug: name of the graph, of letters, digits, ``-`` and ``_``.
            model: name of the model; the page has no feature examples for it.
            step: the step that is shown, of a circuit that differs by step.

        Returns:
            ``metadata``, ``qParams``, ``nodes`` and ``links``, as in schema version 1 of circuit-tracer 0.5.0.

        Raises:
            SettingError: an invalid slug; a circuit by position without tokens, or with fewer than its positions or
                than two; or a step that the circuit does not have, or that is missing.
        """
        kept, scores = self.kept, self.scores
        steps = kept["step"].values.tolist() if "step" in kept.dims else [None]
        if step not in steps:
            raise SettingError(f"step must be one of {steps} for this circuit; got {step}.")
        if step is not None:
            kept, scores = (array.sel(step=step, drop=True) for array in (kept, scores))
        return graph(Circuit(kept, scores).edges, tokens, slug, model)

    def save_graph(
        self,
        folder: str | Path,
        tokens: Sequence[str] | None = None,
        *,
        slug: str = "circuit",
        model: str = "",
        step: int | None = None,
    ) -> Path:
        """Write `to_graph` to ``folder/slug.json`` and list it in ``folder/graph-metadata.json``.

        ``circuit-tracer start-server --graph_file_dir folder`` shows all graphs of a folder.

        Args:
            folder: created if it is missing; other graphs in it stay.
            tokens, slug, model, step: as in `to_graph`.

        Raises:
            SettingError: see `to_graph`.
            CheckpointError: the folder's ``graph-metadata.json`` is something else.
        """
        return save_graph(self.to_graph(tokens, slug=slug, model=model, step=step), Path(folder))


def _ordered(scores: Any) -> xr.DataArray:
    """Scores as an array with the axes in the order of `AXES`."""
    array = scores["effect"] if isinstance(scores, xr.Dataset) else scores
    if not isinstance(array, xr.DataArray) or not {"sender", "receiver"} <= set(array.dims) <= set(AXES):
        raise SettingError("scores must be an array over sender and receiver, and perhaps step and pos.")
    axes = [axis for axis in AXES if axis in array.dims]
    found = array.transpose(*axes).reset_coords(drop=True)
    missing = {axis: range(array.sizes[axis]) for axis in axes if axis not in found.coords}
    return found.assign_coords(missing).astype(float)
