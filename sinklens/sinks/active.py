"""Which steps of a track are a row's own, and the track of those alone.

In a batch, a row that is through waits for the others: it is passed through the model again, and nothing of it changes.
Alone it would not have these steps, so no measure of a row may count them. An autoregressive row is through once its
end token stands on the canvas, which its track tells; a row of a diffusion run that waits for others to finish a block
looks like any other here, and whoever knows says so (`active_steps`).

One way this fails: a track without the ids of its end tokens (``special``) tells of no end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Int

from sinklens.sinks.data import Track, TrackData


def holds_end(ids: Int[np.ndarray, "batch step pos"], ends: Sequence[int]) -> Bool[np.ndarray, "batch step"]:
    """Whether answers, as they stand at each step, hold an end token."""
    return np.asarray(np.isin(ids, list(ends)).any(axis=-1))


def running(track: TrackData) -> Bool[xr.DataArray, "batch step"]:
    """False at the steps that a row of an autoregressive batch spends behind its end token."""
    token = track.data["token_id"]
    if not track.causal:
        return xr.ones_like(token.isel(pos=0, drop=True), dtype=bool)
    answer = token.isel(pos=slice(track.prompt_length, None)).to_numpy()
    return token.isel(pos=0, drop=True).copy(data=~holds_end(answer, track.special["end"]))


def active_steps(track: Track, own: Bool[np.ndarray, "batch step"]) -> Track:
    """`track` with each row's own steps at the front; behind them nothing exists.

    ``unmask_step`` counts the batch's steps and is left out.
    """
    data = track.data.drop_vars("unmask_step", errors="ignore")
    order = np.argsort(~own, axis=1, kind="stable")[:, : own.sum(axis=1).max()]
    rows, steps = xr.DataArray(np.arange(len(own)), dims="batch"), xr.DataArray(order, dims=("batch", "step"))
    kept = xr.DataArray(np.take_along_axis(own, order, axis=1), dims=("batch", "step"))
    moved = {}
    for name, value in data.data_vars.items():
        if "step" in value.dims:
            chosen = value.drop_vars("step", errors="ignore").isel(batch=rows, step=steps)
            moved[name] = chosen.where(kept, nothing(value.dtype))
    return type(track)(data.drop_dims("step").assign(moved))


def nothing(dtype: np.dtype) -> Any:
    """What stands in a variable where there is no position or step."""
    if np.issubdtype(dtype, np.floating):
        return np.nan
    return -1 if np.issubdtype(dtype, np.integer) else False
