"""What the planted checkpoint computes in exact arithmetic, from the tokens alone."""

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from planted_model import DISTANCE_PAIR, HEADS, ROTATIONS, planted_sinks


def planted_paths(
    token_id: Int[np.ndarray, "batch step pos"], real: Bool[np.ndarray, "batch pos"]
) -> Int[xr.DataArray, "batch step layer head"]:
    """Position of each head's sink at each step, the first of several; -1 if it has none.

    Args:
        token_id, real: as in `planted_sinks`.
    """
    found = planted_sinks(token_id, real)
    return found.argmax("pos").where(found.any("pos"), -1)


def planted_scores(
    token_id: Int[np.ndarray, "batch step pos"], real: Bool[np.ndarray, "batch pos"]
) -> Float[xr.DataArray, "batch step layer head pos"]:
    """``track.scores()`` in exact arithmetic, up to 1e-6; NaN on padding.

    A head with n sinks gives S / n to each; one whose sink is missing gives 1 to every key. *previous* and *next* give
    1 to every key except 2 to the first (last) and 0 to the last (first); *fading* is a softmax of its scores.

    Args:
        token_id, real: as in `planted_sinks`.
    """
    sinks = planted_sinks(token_id, real)
    found = sinks.to_numpy()
    exists = np.broadcast_to(real[:, None, None, None], found.shape)
    number, size = found.sum(-1, keepdims=True), exists.sum(-1, keepdims=True)
    scores = np.where(number > 0, found * size / np.maximum(number, 1), 1.0)
    order = np.cumsum(exists[:, :, 0, 0], axis=-1) * exists[:, :, 0, 0]  # from 1; 0 on padding
    first, last = order == 1, order == order.max(-1, keepdims=True)
    scores[:, :, *HEADS["previous"]] = 1.0 + first - last
    scores[:, :, *HEADS["next"]] = 1.0 + last - first
    scores[:, :, *HEADS["fading"]] = _fading_scores(found[:, :, *HEADS["fading"]], exists[:, :, 0, 0])
    return sinks.copy(data=np.where(exists, scores, np.nan))


def _fading_scores(
    start: Bool[np.ndarray, "batch step key"], exists: Bool[np.ndarray, "batch step key"]
) -> Float[np.ndarray, "batch step key"]:
    """Column sums of the head *fading*, by its formula."""
    places = np.arange(start.shape[-1])
    angle = (places[:, None] - places) * ROTATIONS[DISTANCE_PAIR]
    scores = 16 * (np.cos(angle) / 2 - 7 / 8 * np.sin(angle)) * start[..., None, :]
    weights = np.exp(scores) * exists[..., None, :]
    return (weights / weights.sum(-1, keepdims=True) * exists[..., :, None]).sum(-2)
