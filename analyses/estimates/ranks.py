"""Rank correlations along the last axis, with and without adjustment for a third quantity; NaN entries are left out."""

import numpy as np
from scipy.stats import rankdata

FEWEST = 4  # values; with fewer, a partial correlation is always 1 or −1


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis from 0 (smallest) to 1; ties get their mean rank, NaN stays, a single entry is NaN."""
    count = (~np.isnan(values)).sum(axis=-1, keepdims=True)
    place = (rankdata(values, axis=-1, nan_policy="omit") - 1) / np.maximum(count - 1, 1)
    return np.where(count > 1, place, np.nan)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's correlation of `x` and `y` [..., n] over the entries that both have; ties get their mean rank.

    NaN with fewer than `FEWEST` entries, or where one of them is constant.
    """
    x, y = _centred_ranks(*np.broadcast_arrays(x, y))
    return _correlation(x, y)


def partial_rank_correlation(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Spearman's correlation of `x` and `y` that is left when `given` is held fixed, [...].

    (ρ_xy − ρ_xz ρ_yz) / √((1 − ρ_xz²)(1 − ρ_yz²)), z the ranks of `given`. NaN as in `rank_correlation`, and where
    `given` determines the order of one of them.
    """
    x, y, z = _centred_ranks(*np.broadcast_arrays(x, y, given))
    xy, xz, yz = _correlation(x, y), _correlation(x, z), _correlation(y, z)
    left = (1 - xz**2) * (1 - yz**2)
    return np.divide(xy - xz * yz, np.sqrt(left), out=np.full(xy.shape, np.nan), where=left > 1e-9)


def _centred_ranks(*values: np.ndarray) -> list[np.ndarray]:
    """Ranks of each quantity among the entries that all have, minus their mean; 0 elsewhere. NaN with too few."""
    known = ~np.isnan(values).any(axis=0)
    count = known.sum(axis=-1, keepdims=True)
    places = (rankdata(np.where(known, value, np.nan), axis=-1, nan_policy="omit") for value in values)
    centred = (np.where(known, place - (count + 1) / 2, 0) for place in places)  # 1 to n have the mean (n + 1) / 2
    return [np.where(count >= FEWEST, value, np.nan) for value in centred]


def _correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    size = np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    return np.divide((x * y).sum(axis=-1), size, out=np.full(size.shape, np.nan), where=size > 0)
