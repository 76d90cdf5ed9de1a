"""Matched comparisons across prompts, with intervals over prompts.

Places of different prompts are comparable if they have the same step and the same position in the answer (formulas:
sinklens/sinks/matching.py). Each prompt contributes to many strata, and every stratum holds several prompts. So a
resample draws prompts, sums their contributions within each stratum, and only then compares.

Pitfall: a stratum with one prompt has nothing to compare with. With few prompts, or when every prompt decides its
tokens in the same order, few strata remain; the tables report the share of the events that they hold.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.intervals import Interval, resampling_weights
from sinklens.sinks.matching import ratio, terms

CHUNK = 2000  # strata per product, so that memory does not grow with their number
StratumTerms = Sequence[Float[np.ndarray, "prompt stratum"]]


class Matched(NamedTuple):
    """A matched comparison of two groups of places.

    Attributes:
        found: the estimate and its interval.
        share: share of the first group's events that lie in strata with places of both groups.
    """

    found: Interval
    share: float


def stratified(
    of_strata: Callable[..., Sequence[np.ndarray]],
    combine: Callable[..., np.ndarray],
    parts: StratumTerms,
    seed: int = 0,
) -> Interval:
    """A statistic of sums over strata, with its 95 % percentile bootstrap interval over prompts.

    ``prompts`` of the result counts those that contribute anything.

    Args:
        of_strata: takes the sum over prompts of each part, [..., stratum], and returns terms of the same shape.
        combine: takes each term summed over the strata, and returns the statistic.
        parts: what each prompt contributes to each stratum, without NaN.
    """
    number, strata = parts[0].shape
    count = np.array(np.any([part.any(axis=1) for part in parts], axis=0).sum())
    drawn = resampling_weights(number, np.random.default_rng(seed))
    weights = np.vstack([np.ones(number), drawn])  # the first row is the estimate
    if not strata:
        return Interval(np.array(np.nan), np.array(np.nan), np.array(np.nan), count)
    totals: Any = 0
    for start in range(0, strata, CHUNK):
        sums = [weights @ part[:, start : start + CHUNK].astype(np.float64) for part in parts]
        totals = totals + np.stack([term.sum(axis=-1) for term in of_strata(*sums)])
    values = combine(*totals)
    known = values[1:][~np.isnan(values[1:])]
    low, high = np.percentile(known, [2.5, 97.5], method="nearest") if number > 1 and len(known) else (np.nan, np.nan)
    return Interval(np.asarray(values[0]), np.asarray(low), np.asarray(high), count)


def compare(parts: StratumTerms, seed: int = 0, difference: bool = False) -> Matched:
    """The matched risk ratio of two groups, or the difference (sinklens/sinks/matching.py).

    Args:
        parts: a, n, b and m: events and places of the first group, events and places of the second.
    """
    totals = [part.sum(axis=0) for part in parts]
    both = (totals[1] > 0) & (totals[3] > 0)
    every, kept = totals[0].sum(), totals[0][both].sum()
    combine = (lambda a, b, w: ratio(a - b, w)) if difference else (lambda a, b, _: ratio(a, b))
    return Matched(stratified(terms, combine, [part[:, both] for part in parts], seed), float(ratio(kept, every)))


def correlation_within(x: np.ndarray, y: np.ndarray, seed: int = 0) -> Interval:
    """Correlation of two quantities [prompt, stratum] within strata: between prompts at the same step and position.

    Σ_s Σ_i (x − x̄_s)(y − ȳ_s) / √(Σ_s Σ_i (x − x̄_s)² · Σ_s Σ_i (y − ȳ_s)²), over the places where both have a value.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = np.where(known, x, 0), np.where(known, y, 0)
    shared = known.sum(axis=0) > 1
    parts = [part[:, shared] for part in (known.astype(float), x, y, x * x, y * y, x * y)]
    return stratified(_within, _correlation, parts, seed)


def _correlation(xy: np.ndarray, xx: np.ndarray, yy: np.ndarray) -> np.ndarray:
    """NaN where a quantity does not vary, e.g. in a resample of copies of one prompt."""
    size = np.sqrt(np.clip(xx, 0, None) * np.clip(yy, 0, None))
    return np.divide(xy, size, out=np.full(size.shape, np.nan), where=size > 1e-9)


def _within(n: np.ndarray, x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray, xy: np.ndarray) -> Sequence:
    """Sums of products about the mean of each stratum."""
    n = np.maximum(n, 1)
    return xy - x * y / n, xx - x * x / n, yy - y * y / n


def two_groups(
    events: xr.DataArray, places: xr.DataArray, first: xr.DataArray, second: xr.DataArray | None = None
) -> list[np.ndarray]:
    """a, n, b and m [prompt, stratum] of places in `first` and in `second` (by default, all others).

    Args:
        events, places: [prompt, …], NaN where there is no place; the strata are all axes after ``prompt``.
        first, second: bool [prompt, …], of the same shape.
    """
    second = ~first if second is None else second
    parts = [value.where(group).fillna(0) for group in (first, second) for value in (events, places)]
    return [part.transpose("prompt", ...).to_numpy().reshape(part.sizes["prompt"], -1) for part in parts]
