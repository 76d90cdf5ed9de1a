"""The sink track of a run: an xarray.Dataset of who attracted how much attention, when.

``score`` is the column sum Σ_i A[i, j] over the queries that are not padding: uniform attention gives 1 everywhere, and
the scores of one pattern sum to S, the number of real tokens. ``unit`` of a question says how it is read: "sum" as
stored, "fraction" divided by S (the paper's Ā), "percent" a hundred times that.

One way this fails: with ε = 3 (the paper's) and unit "fraction" nothing can be a sink, since no fraction exceeds 1; the
paper does not say in which unit its ε is meant. "sum" is the default here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from sinklens.errors import TrackError
from sinklens.writing import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinklens.sinks.detectors import Detector

Unit = Literal["sum", "percent", "fraction"]
FORMAT = "sinklens sink track 1"


class SinkTrack:
    """Sink scores of a run, with what is needed to read them.

    Attributes:
        data: the Dataset. Variables: ``score`` [batch, step, layer, head, pos] float32 (NaN where a position does not
            exist yet); ``token_id`` [batch, step, pos], the ids that entered the step; ``masked`` and ``committed``
            [batch, step, pos], still masked when the step began, and given its token in it; ``real`` [batch, pos],
            False on padding; ``unmask_step`` [batch, pos]. Attributes: model, family, settings, versions, seed.
    """

    def __init__(self, data: xr.Dataset) -> None:
        missing = [name for name in ("score", "token_id", "masked", "committed", "real") if name not in data]
        if missing:
            raise TrackError(f"this dataset is no sink track: it lacks {', '.join(missing)}.")
        self.data = data

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return self.data.sizes["step"]

    def scores(self, unit: Unit = "sum") -> xr.DataArray:
        """The scores in `unit`: "sum", "percent" or "fraction" (see the module)."""
        if unit not in ("sum", "percent", "fraction"):
            raise TrackError(f"unit is sum, percent or fraction; got {unit!r}.")
        score = self.data["score"].where(self.data["real"])
        if unit == "sum":
            return score
        fraction = score / score.sum("pos")
        return fraction * 100 if unit == "percent" else fraction

    def detect(self, detector: "Detector | None" = None) -> Bool[xr.DataArray, "batch step layer head pos"]:
        """True where `detector` sees a sink; by default `EpsilonOverMean()`, the paper's definition with ε = 3."""
        from sinklens.sinks.detectors import EpsilonOverMean

        return (detector or EpsilonOverMean()).detect(self)

    def top(self, k: int = 1) -> xr.DataArray:
        """Positions of the `k` strongest keys, strongest first: [batch, step, layer, head, rank].

        -1 where a head attends to nothing at all (its pattern was set to zero, or every key was masked).

        Raises:
            TrackError: `k` is below 1 or above the number of positions.
        """
        if not 1 <= k <= self.data.sizes["pos"]:
            raise TrackError(f"k lies between 1 and {self.data.sizes['pos']}, the number of positions; got {k}.")
        values = self.scores().fillna(-np.inf).to_numpy()
        order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
        order = np.where(values.max(axis=-1, keepdims=True) > 0, order, -1)
        return xr.DataArray(order, dims=("batch", "step", "layer", "head", "rank"))

    def trajectory(self, layer: int, head: int, batch: int = 0) -> Int[np.ndarray, " step"]:
        """Position of the strongest key at each step, of row `batch`; -1 where the head attends to nothing.

        Raises:
            TrackError: no such layer, head or row.
        """
        self.require(layer=layer, head=head, batch=batch)
        return self.top(1).isel(layer=layer, head=head, batch=batch, rank=0).to_numpy()

    def require(self, **places: int | None) -> None:
        """Refuse a place that the track does not have, e.g. ``require(layer=3, head=None)``; None is none asked for.

        Raises:
            TrackError: no such layer, head, step or row.
        """
        for name, value in places.items():
            size = self.data.sizes[name]
            if value is not None and not -size <= value < size:
                raise TrackError(f"{name} {value} does not exist; this track has {size}, 0 to {size - 1}.")

    def plot(
        self, layer: int | None = None, head: int | None = None, batch: int = 0, ax: "Axes | None" = None
    ) -> "Axes":
        """Step × position map of the scores of one head, or averaged over those not named; strongest keys marked."""
        from sinklens.views.figures import sink_map

        return sink_map(self, layer=layer, head=head, batch=batch, ax=ax)

    def save(self, path: str | Path) -> Path:
        """Write to one NetCDF-4 file; a half-written file is never left behind.

        Raises:
            SinklensError: the file cannot be written; the track is still in memory.
        """
        # Through memory: on a full disk the HDF5 library fails while closing, where its error cannot be caught.
        content = self.data.to_netcdf(engine="h5netcdf", encoding={"score": {"zlib": True, "complevel": 1}})
        with whole(path) as part:
            part.write_bytes(content)
        return Path(path)

    @classmethod
    def open(cls, path: str | Path) -> "SinkTrack":
        """Open a saved track; scores are read when they are asked for.

        Raises:
            TrackError: no such file, truncated, or written by something else.
        """
        path = Path(path)
        if not path.is_file():
            raise TrackError(f"{path} does not exist or is not a file; give the path that SinkTrack.save returned.")
        try:
            data = xr.open_dataset(path, engine="h5netcdf")
        except (OSError, ValueError, KeyError) as error:
            raise TrackError(f"{path} is not a whole NetCDF-4 file ({error}); it may be truncated.") from error
        if data.attrs.get("format") != FORMAT:
            raise TrackError(f"{path} is no sink track of this version (format {data.attrs.get('format')!r}).")
        return cls(data)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.data["score"].sizes.items())
        return f"SinkTrack({self.data.attrs.get('model', '?')}: {sizes})"


def build_track(
    score: Float[np.ndarray, "batch step layer head pos"],
    token_id: Any,
    masked: Any,
    committed: Any,
    real: Any,
    unmask_step: Any,
    attrs: dict[str, Any],
) -> SinkTrack:
    """A track from plain arrays; `attrs` must be strings, numbers or lists of them."""
    places = ("batch", "step", "pos")
    data = xr.Dataset(
        {
            "score": (("batch", "step", "layer", "head", "pos"), score),
            "token_id": (places, token_id),
            "masked": (places, masked),
            "committed": (places, committed),
            "real": (("batch", "pos"), real),
            "unmask_step": (("batch", "pos"), unmask_step),
        },
        coords={
            name: np.arange(size) for name, size in zip(("step", "layer", "head", "pos"), score.shape[1:], strict=True)
        },
        attrs={"format": FORMAT, **attrs},
    )
    return SinkTrack(data)
