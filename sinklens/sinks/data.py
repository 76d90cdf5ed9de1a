"""The data of a sink track: an xarray.Dataset of which key received how much attention, when, and how to read it.

``score`` is the column sum Σ_i A[i, j] over the queries that are not padding: uniform attention gives 1 everywhere, and
the scores of one pattern sum to S, the number of real tokens. The *unit* of a question says how it is read:

- "sum": as stored;
- "fraction": (1/S) Σ_i A[i, j], the paper's Ā (Rulli et al., 2510.15731, Sec. 3);
- "percent": a hundred times that;
- "visible": the mean over the queries that can see key j (α_k of Gu et al., 2410.10781). Under causal attention early
  keys are seen by more queries than late ones, which alone makes their sums larger; for bidirectional models it equals
  "fraction". Masks set by hooks are not taken into account.

One way this fails: with ε = 3 (the paper's) and unit "fraction" nothing can be a sink, since no fraction exceeds 1; the
paper does not say in which unit its ε is meant. "sum" is the default here.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from sinklens.errors import TrackError, nearest

Unit = Literal["sum", "percent", "fraction", "visible"]
REQUIRED = ("score", "token_id", "masked", "committed", "is_real")
AXES = ("batch", "step", "layer", "head", "pos")

Track = TypeVar("Track", bound="TrackData")


class TrackData:
    """Sink scores of a run, with what is needed to read them.

    Attributes:
        data: the Dataset. Variables: ``score`` [batch, step, layer, head, pos] (NaN where a position does not exist
            yet); ``token_id`` [batch, step, pos], the ids that entered the step (-1 where undecided in an
            autoregressive run); ``masked`` and ``committed`` [batch, step, pos], still masked when the step began, and
            given its token in it; ``is_real`` [batch, pos], False on padding; ``unmask_step`` [batch, pos]; and
            whatever else was recorded (`quantities`). Each axis has the numbers of its places as coordinate.
            Attributes: model, revision, family, causal (0 or 1), settings, seed, prompt_length, dtype, device,
            versions, vocabulary, special.
    """

    def __init__(self, data: xr.Dataset) -> None:
        missing = [name for name in REQUIRED if name not in data]
        if missing:
            raise TrackError(f"this dataset is no sink track: it lacks {', '.join(missing)}.")
        self.data = data.assign_coords(
            {name: np.arange(data.sizes[name]) for name in AXES if name in data.sizes and name not in data.coords}
        )

    def __getitem__(self, name: str) -> xr.DataArray:
        """A variable as it was recorded, or a coordinate; `scores` and `need` also leave padding out.

        Raises:
            TrackError: the track has none of this name.
        """
        if name not in self:
            from sinklens.sinks.quantities import quantity_of

            if isinstance(name, str) and quantity_of(name):
                self.need(name)  # says how to record it
            raise TrackError(
                f"this track has no variable {name!r}; it holds {', '.join(map(str, self.data.variables))}."
                f"{nearest(str(name), map(str, self.data.variables))}"
            )
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data.variables

    def __iter__(self) -> Iterator[str]:
        return map(str, self.data.data_vars)

    def to_dataset(self) -> xr.Dataset:
        """A Dataset of its own: variables added there or taken away leave the track as it is."""
        return self.data.copy()

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return self.data.sizes["step"]

    @property
    def causal(self) -> bool:
        """Whether queries see earlier keys only."""
        return bool(self.data.attrs.get("causal", 0))

    @property
    def prompt_length(self) -> int:
        """Positions before the answers, padding included."""
        return int(self.data.attrs["prompt_length"])

    @property
    def vocabulary(self) -> dict[int, str]:
        """Text of every token id in the run; empty for a model without a tokenizer."""
        return {int(token): text for token, text in json.loads(self.data.attrs.get("vocabulary", "{}")).items()}

    @property
    def special(self) -> dict[str, list[int]]:
        """Ids of special tokens: "mask", "start", "end" and "markup" (the others, such as chat headers)."""
        return {"mask": [], "start": [], "end": [], "markup": [], **json.loads(self.data.attrs.get("special", "{}"))}

    def scores(self, unit: Unit = "sum") -> Float[xr.DataArray, "batch step layer head pos"]:
        """The scores in `unit`, in float32; NaN on padding and where a position does not exist yet.

        Raises:
            TrackError: no such unit.
        """
        if unit not in get_args(Unit):
            raise TrackError(f"unit is one of {', '.join(get_args(Unit))}; got {unit!r}.")
        score = self.data["score"].astype(np.float32).where(self.data["is_real"])
        if unit == "sum":
            return score
        exists = score.notnull()
        if unit == "visible" and self.causal:  # key j is seen by the queries from j on
            return score / exists.isel(pos=slice(None, None, -1)).cumsum("pos").isel(pos=slice(None, None, -1))
        fraction = score / exists.sum("pos")
        return fraction * 100 if unit == "percent" else fraction

    def need(self, *variables: str) -> xr.Dataset:
        """The recorded `variables`, with padding left out.

        Raises:
            TrackError: one was not recorded; says how to record it.
        """
        from sinklens.sinks.quantities import quantity_of

        for name in variables:
            if name not in self.data:
                quantity = quantity_of(name)
                asked = repr(quantity) if quantity else "a Quantity that fills it"
                raise TrackError(
                    f"this track holds no {name}. Record it while the run goes on: sinklens.trace(..., "
                    f"record_sinks=Record([{asked}])), with Record from sinklens.sinks."
                )
        chosen = {name: self.data[name].astype(np.float32) for name in variables}
        return xr.Dataset(
            {
                name: value.where(self.data["is_real"]) if "pos" in value.dims else value
                for name, value in chosen.items()
            }
        )

    def isel(self: Track, **places: int | np.integer | slice | Sequence[int] | np.ndarray) -> Track:
        """Part of the track: rows, steps, layers or heads by number; all axes stay.

        A part of an opened track is read from disk alone: ``SinkTrack.open(path).isel(step=slice(0, 10)).top()``.

        Raises:
            TrackError: no such axis or place.
        """
        kept: dict[str, slice | list[int]] = {}
        for name, chosen in places.items():
            if name not in ("batch", "step", "layer", "head"):
                raise TrackError(f"a track is cut along batch, step, layer or head; got {name!r}.")
            if isinstance(chosen, slice):
                kept[name] = chosen
                continue
            for place in (numbers := np.ravel(np.asarray(chosen)).tolist()):
                self.require(**{name: place})
            kept[name] = numbers
        for name, chosen in kept.items():
            size = self.data.sizes[name]
            if not len(range(size)[chosen] if isinstance(chosen, slice) else chosen):
                raise TrackError(f"{name}={places[name]!r} holds no {name} of this track, which has {size}; name one.")
        return type(self)(self.data.isel(kept))

    def top(self, k: int = 1) -> xr.DataArray:
        """Positions of the `k` strongest keys, strongest first: [batch, step, layer, head, rank].

        -1 where a head's pattern is all zero (it was set to zero, or every key was masked), and behind the
        last where fewer than `k` positions exist.

        Raises:
            TrackError: `k` is below 1 or above the number of positions.
        """
        if not _is_whole(k) or not 1 <= k <= self.data.sizes["pos"]:
            raise TrackError(f"k lies between 1 and {self.data.sizes['pos']}, the number of positions; got {k}.")
        values = self.scores().fillna(-np.inf).to_numpy()
        order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
        exists = np.take_along_axis(values, order, axis=-1) > -np.inf
        order = np.where(exists & (values.max(axis=-1, keepdims=True) > 0), order, -1)
        coords = {axis: self.data[axis] for axis in AXES[:-1]}
        return xr.DataArray(order, coords=coords, dims=(*AXES[:-1], "rank"))

    def trajectory(self, layer: int, head: int, batch: int = 0) -> Int[np.ndarray, " step"]:
        """Position of the strongest key at each step, of row `batch`; -1 where the head's pattern is all zero.

        The strongest key is the one with the largest column sum; it is a sink only if a detector says so (`detect`).

        Raises:
            TrackError: no such layer, head or row.
        """
        self.require(layer=layer, head=head, batch=batch)
        return self.top(1).isel(layer=layer, head=head, batch=batch, rank=0).to_numpy()

    def require(self, **places: int | None) -> None:
        """Refuse a place that the track does not have, e.g. ``require(layer=3, head=None)``; None is none asked for.

        Raises:
            TrackError: no such layer, head, step or row, or not a whole number.
        """
        for name, value in places.items():
            if value is None:
                continue
            size, numbers = self.data.sizes[name], self.data[name].to_numpy().tolist()
            if not _is_whole(value):
                raise TrackError(f"{name} is a whole number, 0 to {size - 1}; got {value!r}.")
            if not -size <= value < size:
                part = "" if numbers == list(range(size)) else f" It is a part of a track, with {name}s {numbers}."
                raise TrackError(f"{name} {value} does not exist; this track has {size}, 0 to {size - 1}.{part}")

    @property
    def finished(self) -> bool:
        """False for a track read from the store of a run that was killed: it holds the steps before that."""
        return bool(self.data.attrs.get("finished", 1))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.data["score"].sizes.items())
        unfinished = "" if self.finished else ", unfinished"
        return f"{type(self).__name__}({self.data.attrs.get('model', '?')}: {sizes}{unfinished})"


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
