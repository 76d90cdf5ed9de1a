"""The sink track that a run returns: its data (data.py), detection, drawing and files.

Caveat: a track opened from disk reads its variables when they are used; keep the file until then.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sinklens.errors import TrackError, require
from sinklens.sinks import files
from sinklens.sinks.data import TrackData, Unit
from sinklens.sinks.detectors import Detector, EpsilonOverMean
from sinklens.sinks.drawing import sink_map
from sinklens.utils.arguments import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SinkTrack", "Unit", "build_track"]


class SinkTrack(TrackData):
    """Sink scores of a run, and the data needed to read them; `TrackData` lists the variables of `data`."""

    @checked
    def detect(self, detector: Detector | None = None) -> Bool[xr.DataArray, "batch step layer head pos"]:
        """True where `detector` finds a sink; by default `EpsilonOverMean()`, the paper's definition with ε = 3.

        Under a cache policy scores are sums over fewer queries, so use a detector that takes another unit.

        Raises:
            SettingError: `detector` is not a detector.
            TrackError: it needs a quantity that was not recorded, or does not return booleans on the five axes of the
                scores.
        """
        found, score = (detector or EpsilonOverMean()).detect(self), self.data["score"]
        require(
            found.dims == score.dims and found.shape == score.shape and found.dtype == bool,
            f"detect of {type(detector).__name__} returned {found.dtype} over {dict(found.sizes)}; it must return "
            f"bool over {dict(score.sizes)}. sinklens.sinks.everywhere broadcasts values to all five axes.",
            TrackError,
        )
        return found

    @checked
    def plot(
        self,
        layer: int | None = None,
        head: int | None = None,
        row: int = 0,
        ax: "Axes | None" = None,
        *,
        caption: bool = True,
    ) -> "Axes":
        """Plot scores over steps × positions, averaged over layers or heads not given; marks strongest keys."""
        return sink_map(self, layer, head, row, ax, caption=caption)

    @checked
    def save(self, path: str | Path) -> Path:
        """Write one NetCDF-4 file, or a Zarr store if `path` ends in ``.zarr``; leaves no partial files.

        An earlier track at `path` is replaced, other files never.

        Raises:
            SettingError: `path` exists and is not a sink track.
            SinklensError: the file cannot be written; the track is still in memory.
        """
        return files.save(self, Path(path))

    @classmethod
    @checked
    def open(cls, path: str | Path, *, revision: str | None = None) -> "SinkTrack":
        """Open a saved track, or the store that a run appended to (even an unfinished one); data are read lazily.

        Args:
            path: a file or a store; or a name on the hub, ``owner/repository/folder``.
            revision: branch, tag or commit on the hub; None means the main branch.

        Raises:
            TrackError: the file does not exist, is truncated, or is not a sink track.
            CheckpointError: it could not be downloaded.
        """
        return cls(files.open_dataset(files.found(path, revision)))

    @classmethod
    @checked
    def concat(cls, tracks: "Sequence[SinkTrack]") -> "SinkTrack":
        """Concatenate the rows of tracks of one model and settings, e.g. of batches of prompts.

        Shorter prompts are padded on the left; runs that ended earlier are padded with missing (NaN) steps.

        Raises:
            SettingError: `tracks` is neither a track nor a list of tracks.
            TrackError: no tracks, or runs that differ in model, settings or recorded quantities.
        """
        return cls(files.concat([track.data for track in tracks]))


def build_track(
    score: Float[np.ndarray, "batch step layer head pos"],
    token_id: Any,
    masked: Any,
    committed: Any,
    is_real: Any,
    unmask_step: Any,
    attrs: dict[str, Any],
    **recorded: Any,
) -> SinkTrack:
    """Build a track from plain arrays, e.g. of attention computed by another program.

    Args:
        attrs: strings, numbers or lists of them; at least ``model`` and ``prompt_length``.
        **recorded: variables of built-in quantities, [batch, step, layer, ...], such as ``value_norm``.

    Raises:
        TrackError: `recorded` holds a variable that no built-in quantity fills.
    """
    from sinklens.sinks.quantities import BY_NAME

    axes = {name: tail for kind in BY_NAME.values() for name, tail in kind.variables.items()}
    unknown = sorted(set(recorded) - set(axes))
    require(not unknown, f"unknown variables {', '.join(unknown)}; known: {', '.join(axes)}.", TrackError)
    places = ("batch", "step", "pos")
    data = xr.Dataset(
        {
            "score": (("batch", "step", "layer", "head", "pos"), score),
            "token_id": (places, token_id),
            "masked": (places, masked),
            "committed": (places, committed),
            "is_real": (("batch", "pos"), is_real),
            "unmask_step": (("batch", "pos"), unmask_step),
            **{name: (("batch", "step", "layer", *axes[name]), value) for name, value in recorded.items()},
        },
        attrs=attrs,
    )
    return SinkTrack(data)
