"""The data of a sink track: an xarray.Dataset of the attention each key received at each step, and how to read it.

``score`` is the column sum Σ_i A[i, j] over the queries that are not padding: uniform attention gives 1 everywhere, and
the scores of one pattern sum to S, the number of real tokens. The *unit* says how scores are reported:

- "sum": as stored;
- "fraction": (1/S) Σ_i A[i, j], the paper's Ā (Rulli et al., 2510.15731, Sec. 3);
- "percent": 100 times "fraction";
- "visible": the mean over the queries that can see key j (α_k of Gu et al., 2410.10781). Under causal attention more
  queries see early keys than late ones, which alone makes their sums larger; for bidirectional models it equals
  "fraction". Not available for block-causal models. Masks set by hooks are ignored.

In a block-causal run with a cache, a step's scores are sums over the queries that the step computed (its block). They
sum to the number of these queries, and only "sum" is available. The same holds under a cache policy, except that
``fresh`` says which positions a step computed, and the other units divide by the number of its queries.

Pitfall: with ε = 3 (the paper's) and unit "fraction" nothing can be a sink, since no fraction exceeds 1. The paper does
not state the unit of its ε. "sum" is the default here.
"""

import json
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import TrackError, nearest, require
from sinklens.hooks.forward_pass import MODES, Mode
from sinklens.utils.arguments import checked
from sinklens.utils.integers import as_integer

Unit = Literal["sum", "percent", "fraction", "visible"]
REQUIRED = ("score", "token_id", "masked", "committed", "is_real")
AXES = ("batch", "step", "layer", "head", "pos")

Track = TypeVar("Track", bound="TrackData")


class TrackData:
    """Sink scores of a run, and the data needed to read them.

    Attributes:
        data: the Dataset. Variables: ``score`` [batch, step, layer, head, pos] (NaN where a position does not exist
            yet); ``token_id`` [batch, step, pos], the ids at the start of the step (-1 where undecided in an
            autoregressive run); ``masked`` and ``committed`` [batch, step, pos]: still masked when the step began, and
            committed during the step; ``active`` [batch, step], the rows that the step worked on; ``is_real``
            [batch, pos], False on padding; ``unmask_step`` [batch, pos]; ``final_id`` [batch, pos], the ids after the
            run; of a model that changes its attention ``mode`` and ``block_start`` [batch, step], see `modes`; and any
            other recorded variables (`quantities`). Each axis has its indices as coordinate.
            Attributes: model, revision, family, causal (0 or 1), block_length (0 without blocks), settings, seed,
            prompt_length, dtype, device, versions, vocabulary, special.
    """

    ARGUMENT: ClassVar[str] = "a sink track, such as run.sinks"

    @checked
    def __init__(self, data: xr.Dataset) -> None:
        missing = [name for name in REQUIRED if name not in data]
        require(not missing, f"this dataset is not a sink track: it lacks {', '.join(missing)}.", TrackError)
        self.data = data.assign_coords(
            {name: np.arange(data.sizes[name]) for name in AXES if name in data.sizes and name not in data.coords}
        )

    def __getitem__(self, name: str) -> xr.DataArray:
        """A variable as recorded, or a coordinate; `scores` and `need` also mask padding.

        Raises:
            TrackError: the track has no variable of this name.
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

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return self.data.sizes["step"]

    @property
    def causal(self) -> bool:
        """Whether attention is causal."""
        return bool(self.data.attrs.get("causal", 0))

    @property
    def modes(self) -> list[Mode]:
        """The kind of each step's pass, as in `ForwardPass.mode`; rows of one batch share their passes."""
        if "mode" not in self.data:
            return ["causal" if self.causal else "denoise"] * self.steps
        # the largest, as the mode is -1 where a run of several tracks ended earlier
        return [MODES[int(code)] for code in self.data["mode"].max("batch")]

    @property
    def _cached(self) -> bool:
        settings = json.loads(self.data.attrs.get("settings", "{}"))
        return bool(settings.get("use_cache") or settings.get("use_block_cache")) and not self.causal

    @property
    def prompt_length(self) -> int:
        """Number of positions before the answers, including padding."""
        return int(self.data.attrs["prompt_length"])

    @property
    def vocabulary(self) -> dict[int, str]:
        """Text of every token id in the run; empty for a model without a tokenizer."""
        return {int(token): text for token, text in json.loads(self.data.attrs.get("vocabulary", "{}")).items()}

    @property
    def special(self) -> dict[str, list[int]]:
        """Ids of special tokens: "mask", "start", "end" and "markup" (the others, such as chat headers)."""
        return {"mask": [], "start": [], "end": [], "markup": [], **json.loads(self.data.attrs.get("special", "{}"))}

    @property
    def decided(self) -> xr.DataArray:
        """True where a position held a decided token when the step began, [batch, step, pos]; also in the prompt."""
        return ~self.data["masked"].astype(bool) & (self.data["token_id"] >= 0) & self.data["is_real"]

    @property
    def renoised(self) -> xr.DataArray:
        """True where a token that was decided before the last step is undecided again, [batch, step, pos]."""
        return self.decided.shift(step=1, fill_value=False) & self.data["masked"].astype(bool)

    @property
    def edited(self) -> xr.DataArray:
        """True where a token that was decided before the last step was replaced by another one, [batch, step, pos]."""
        token = self.data["token_id"]
        changed = token != token.shift(step=1, fill_value=-1)
        return self.decided.shift(step=1, fill_value=False) & changed & self.decided

    @property
    def on_canvas(self) -> xr.DataArray:
        """True on the positions whose queries the step computed, [batch, step, pos].

        These are all positions, except in a run with canvases of random tokens. There they are the canvas of the step,
        and the other scores, ``track.scores().where(~track.on_canvas)``, belong to the text before it.
        """
        exists = (self.data["token_id"] >= 0) & self.data["is_real"]
        length = self._canvas_length
        if length is None:
            return exists
        stop = (self.data["token_id"] >= 0).cumsum("pos").argmax("pos") + 1
        return exists & (self.data["pos"] >= stop - length)

    @property
    def _canvas_length(self) -> int | None:
        """Queries of a step in a run with canvases of random tokens; None in other runs."""
        return json.loads(self.data.attrs.get("settings", "{}")).get("canvas_length")

    @property
    def _computed(self) -> xr.DataArray | None:
        """The queries that scores sum over, [batch, step, pos]; None for all.

        Those of `Record.queries`, or under a cache policy the positions that are fresh in any layer of the run.
        """
        if "computed" in self.data:
            return self.data["computed"]
        return self.data["fresh"].any("layer") if "fresh" in self.data else None

    @property
    def with_computed(self) -> xr.Dataset:
        """The data, with the queries that scores sum over if the track knows them, for a part without all layers."""
        return self.data if self._computed is None else self.data.assign(computed=self._computed)

    @property
    def running(self) -> xr.DataArray:
        """False after a row's last step, where it only waits for the others of its batch, [batch, step].

        A row that has finished its answer still passes through the model, but nothing in it changes. Run alone, the row
        would not have these steps. (Under `threshold`, it also waits at steps between its own, which are not marked
        here.) In tracks without ``active``, which earlier versions recorded, rows of a diffusion run look as if they
        never waited, and others wait after their end token, if its id is known (`special`).
        """
        if "active" in self.data:
            active = self.data["active"]
            return active.copy(data=np.maximum.accumulate(active.to_numpy()[:, ::-1], axis=1)[:, ::-1])
        ended = self.data["token_id"].isel(pos=slice(self.prompt_length, None)).isin(self.special["end"]).any("pos")
        return ~ended if self.causal else xr.ones_like(ended)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that `scores` takes for this track: not "visible" for block-causal runs, only "sum" if cached."""
        if not self.data.attrs.get("block_length"):
            return get_args(Unit)
        return ("sum",) if self._cached else ("sum", "percent", "fraction")

    def scores(self, unit: Unit = "sum") -> Float[xr.DataArray, "batch step layer head pos"]:
        """The scores in `unit`, in float32; NaN on padding and where a position does not exist yet.

        Raises:
            TrackError: the unit is unknown.
        """
        if unit not in get_args(Unit):
            near = nearest(unit.lower(), get_args(Unit), 1) if isinstance(unit, str) else ""
            raise TrackError(f"unit must be one of {', '.join(get_args(Unit))}; got {unit!r}.{near}")
        score = self.data["score"].astype(np.float32).where(self.data["is_real"])
        if unit == "sum":
            return score
        require(
            unit in self.units,
            f"unit {unit!r} is not available for this track of a block-causal run{' with a cache' * self._cached}: "
            f"its keys are seen by different numbers of queries. Use unit='sum'.",
            TrackError,
        )
        exists = score.notnull()
        if unit == "visible" and self.causal:  # queries j, j + 1, … see key j
            return score / exists.isel(pos=slice(None, None, -1)).cumsum("pos").isel(pos=slice(None, None, -1))
        queries = exists if self._computed is None else self._computed
        fraction = score / (queries if self._canvas_length is None else self.on_canvas).sum("pos")
        return fraction * 100 if unit == "percent" else fraction

    def need(self, *variables: str) -> xr.Dataset:
        """The recorded `variables`, with padding masked.

        Raises:
            TrackError: a variable was not recorded; the message says how to record it.
        """
        from sinklens.sinks.quantities import quantity_of

        for name in variables:
            if name not in self.data:
                quantity = quantity_of(name)
                request = repr(quantity) if quantity else "a Quantity that fills it"
                raise TrackError(
                    f"this track holds no {name}. Record it during the run: sinklens.trace(..., "
                    f"record_sinks=Record([{request}])), with Record from sinklens.sinks."
                )
        chosen = {name: self.data[name].astype(np.float32) for name in variables}
        return xr.Dataset(
            {
                name: value.where(self.data["is_real"]) if "pos" in value.dims else value
                for name, value in chosen.items()
            }
        )

    def isel(self: Track, **places: int | np.integer | slice | Sequence[int] | np.ndarray) -> Track:
        """Part of the track: rows, steps, layers or heads by index; all axes are kept.

        Only the selected part of an opened track is read from disk:
        ``SinkTrack.open(path).isel(step=slice(0, 10)).top()``.

        Raises:
            TrackError: an axis or index that does not exist.
        """
        kept: dict[str, slice | list[int]] = {}
        for name, chosen in places.items():
            require(
                name in ("batch", "step", "layer", "head"),
                f"a track can be cut along batch, step, layer or head; got {name!r}.",
                TrackError,
            )
            size = self.data.sizes[name]
            numbers = range(size)[chosen] if isinstance(chosen, slice) else np.ravel(np.asarray(chosen)).tolist()
            for place in numbers:
                self.require(**{name: place})
            require(
                numbers,
                f"{name}={chosen!r} selects no {name} of this track, which has {size}; select at least one.",
                TrackError,
            )
            kept[name] = chosen if isinstance(chosen, slice) else list(numbers)
        return type(self)((self.with_computed if "layer" in kept else self.data).isel(kept))

    def top(self, k: int = 1) -> xr.DataArray:
        """Positions of the `k` strongest keys, strongest first: [batch, step, layer, head, rank].

        -1 where a head's pattern is all zero (it was set to zero, or every key was masked), and at the remaining
        ranks where fewer than `k` positions exist.

        Raises:
            TrackError: `k` is below 1 or above the number of positions.
        """
        if (number := as_integer(k)) is None or not 1 <= number <= self.data.sizes["pos"]:
            raise TrackError(f"k must be between 1 and {self.data.sizes['pos']}, the number of positions; got {k!r}.")
        values = self.scores().fillna(-np.inf).to_numpy()
        order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
        exists = np.take_along_axis(values, order, axis=-1) > -np.inf
        order = np.where(exists & (values.max(axis=-1, keepdims=True) > 0), order, -1)
        return xr.DataArray(order, coords={axis: self.data[axis] for axis in AXES[:-1]}, dims=(*AXES[:-1], "rank"))

    def trajectory(self, layer: int, head: int, row: int = 0) -> Int[np.ndarray, " step"]:
        """Position of the strongest key at each step of a row; -1 where the head's pattern is all zero.

        The strongest key is the one with the largest column sum; it is a sink only if a detector says so (`detect`).

        Raises:
            TrackError: a layer, head or row that does not exist.
        """
        self.require(layer=layer, head=head, batch=row)
        return self.top(1).isel(layer=layer, head=head, batch=row, rank=0).to_numpy()

    def require(self, **places: int | None) -> None:
        """Check that indices exist in the track, e.g. ``require(layer=3, head=None)``; None is skipped.

        Raises:
            TrackError: a layer, head, step or row that does not exist, or an index that is not an integer.
        """
        for name, value in places.items():
            if value is None:
                continue
            size, numbers = self.data.sizes[name], self.data[name].to_numpy().tolist()
            index = as_integer(value)
            if index is None:
                raise TrackError(f"{name} must be an integer from 0 to {size - 1}; got {value!r}.")
            if not -size <= index < size:
                part = "" if numbers == list(range(size)) else f" It is part of a track and holds {name}s {numbers}."
                raise TrackError(f"{name} {value} does not exist; this track has {size}, 0 to {size - 1}.{part}")

    @property
    def finished(self) -> bool:
        """False for a track read from the store of a killed run, which holds only the steps completed before."""
        return bool(self.data.attrs.get("finished", 1))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.data["score"].sizes.items())
        unfinished = "" if self.finished else ", unfinished"
        return f"{type(self).__name__}({self.data.attrs.get('model', '?')}: {sizes}{unfinished})"


def unmask_steps(
    canvas: Int[Tensor, "batch step pos"],
    undecided: Bool[Tensor, "batch step pos"],
    real: Bool[Tensor, "batch pos"],
    prompt_length: int,
) -> Int[Tensor, "batch pos"]:
    """The step at which each position was last decided or changed.

    -1 in the prompt and on padding; the number of steps where it is still undecided.
    """
    steps = canvas.shape[1] - 1
    changed = (canvas[:, 1:] != canvas[:, :-1]) | (undecided[:, :-1] & ~undecided[:, 1:])
    last = torch.where(changed, torch.arange(steps)[None, :, None], -1).amax(dim=1) if steps else canvas[:, 0] * 0 - 1
    last = torch.where(undecided[:, -1], steps, last)
    last[:, :prompt_length] = torch.where(last[:, :prompt_length] == steps, -1, last[:, :prompt_length])
    return last.masked_fill(~real, -1)
