"""The steps at which each row of a batch was active, and a track reduced to them.

In a batch, a row that has finished waits for the others: it still passes through the model, but nothing in it changes.
Run alone, the row would not have these steps, so measures of a row must not count them. An autoregressive row is
finished once its canvas holds its end token, which its track records. A row of a diffusion run that waits for others to
finish a block looks like any other here; the caller must pass its active steps (`active_steps`).

Limitation: without end-token ids (``special``) in the track, rows never end.
"""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Bool, Int

from sinklens.sinks.data import Track, TrackData
from sinklens.sinks.store import nothing


def holds_end(ids: Int[np.ndarray, "batch step pos"], ends: Sequence[int]) -> Bool[np.ndarray, "batch step"]:
    """Whether each answer contains an end token at each step."""
    return np.asarray(np.isin(ids, list(ends)).any(axis=-1))


def running(track: TrackData) -> Bool[xr.DataArray, "batch step"]:
    """False at the steps of an autoregressive batch after a row's end token."""
    token = track.data["token_id"]
    if not track.causal:
        return xr.ones_like(token.isel(pos=0, drop=True), dtype=bool)
    answer = token.isel(pos=slice(track.prompt_length, None)).to_numpy()
    return token.isel(pos=0, drop=True).copy(data=~holds_end(answer, track.special["end"]))


def active_steps(track: Track, active: Bool[np.ndarray, "batch step"]) -> Track:
    """`track` with each row's active steps first; the remaining steps are empty.

    ``unmask_step`` counts the batch's steps, so it is dropped.
    """
    data = track.data.drop_vars("unmask_step", errors="ignore")
    order = np.argsort(~active, axis=1, kind="stable")[:, : active.sum(axis=1).max()]
    rows, steps = xr.DataArray(np.arange(len(active)), dims="batch"), xr.DataArray(order, dims=("batch", "step"))
    kept = xr.DataArray(np.take_along_axis(active, order, axis=1), dims=("batch", "step"))
    moved = {}
    for name, value in data.data_vars.items():
        if "step" in value.dims:
            chosen = value.drop_vars("step", errors="ignore").isel(batch=rows, step=steps)
            moved[name] = chosen.where(kept, nothing(value.dtype))
    return type(track)(data.drop_dims("step").assign(moved))
