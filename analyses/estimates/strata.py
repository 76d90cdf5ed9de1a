"""Matched comparisons across prompts, with intervals over prompts, or over groups of prompts.

Places of different prompts are comparable if they have the same step and the same position in the answer (formulas:
analyses/matching.py), and belong to the same *group* (a template, document, author, …; `Study.run`): in another
template, the same place has other neighbors and other tokens. Each prompt contributes to many strata, and every
stratum holds several prompts. So a resample draws prompts, sums their contributions within each stratum, and only then
compares. With several groups it draws groups instead: prompts of one group are not independent. With k groups, the
interval is

    g⁻¹(g(θ) ± t₍k₋₁, 0.975₎ √(k / (k − 1)) sd g(θ*)),

θ* the resampled estimates, on the scale g of the measure (scales.py): log for ratios, linear for differences.

Pitfall: a stratum with one prompt has nothing to compare with. With few prompts, or when every prompt decides its
tokens in the same order, few strata remain; the tables report the share of the events that they hold. If each prompt is
a group of its own, nothing remains.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from sinklens.analyses.estimates.scales import DIFFERENCE, LINEAR, LOG, Scale
from sinklens.analyses.matching import ratio, terms
from sinklens.utils.estimates import Estimate, resampling_weights

CHUNK = 2000  # strata per product, so that memory does not grow with their number
UNBOUNDED = 0.025  # with more infinite resamples than this, the interval is infinite on their side
StratumTerms = Sequence[Float[np.ndarray, "prompt stratum"]]
Groups = Int[np.ndarray, " prompt"]


class Matched(NamedTuple):
    """A matched comparison of two groups of places.

    Attributes:
        found: the estimate, with the p value of "no difference" (a ratio of 1, a difference or correlation of 0), NaN
            if it has none.
        share: share of the first group's events that lie in strata with places of both groups.
        groups: number of groups of prompts that the interval resamples; 0 if it resamples prompts.
    """

    found: Estimate
    share: float
    groups: int = 0


def groups_of(data: xr.Dataset) -> Groups | None:
    """The number of each prompt's group, from the coordinate ``prompt_group``; None without groups."""
    known = "prompt_group" in data.coords
    return np.unique(data["prompt_group"].to_numpy(), return_inverse=True)[1] if known else None


def matched_row(
    model: str, measure: str, found: Matched, labels: Mapping[str, Any], claim: bool = True
) -> dict[str, Any]:
    """A table's row, with a p value if it is a claim."""
    one = found.found
    numbers = {"estimate": one.value, "low": one.low, "high": one.high, "prompts": one.n}
    about = {"matched_share": found.share, "groups": found.groups, "p": one.p if claim else np.nan}
    return {"model": model, "measure": measure, **labels, **numbers, **about}


def mean_rows(
    model: str, measure: str, values: xr.DataArray, seed: int = 0, group: Groups | None = None, claim: bool = False
) -> list[dict[str, Any]]:
    """One table row per entry of `values` along its axes other than ``prompt``: the mean over prompts and its interval.

    The interval resamples groups of prompts if there are several. NaN prompts are left out, entry by entry.

    Args:
        claim: whether rows have a p value, that the mean is 0.
    """
    values, rows = values.transpose("prompt", ...), []
    labels = {str(name): values[name].to_numpy() for name in values.dims if name != "prompt"}
    array = values.to_numpy()
    for place in np.ndindex(array.shape[1:]):
        at = {name: values_of[number] for (name, values_of), number in zip(labels.items(), place, strict=True)}
        rows.append(matched_row(model, measure, mean_over(array[(slice(None), *place)], seed, group), at, claim))
    return rows


def mean_over(
    values: Float[np.ndarray, " prompt"], seed: int, group: Groups | None, scale: Scale = LINEAR, null: float = 0.0
) -> Matched:
    """The mean of the prompts that have a value, with its interval and the p value of `null`, as in `stratified`."""
    parts = [np.nan_to_num(values)[:, None], (~np.isnan(values)).astype(float)[:, None]]
    return stratified(lambda *sums: sums, ratio, parts, seed, group, within=False, scale=scale, null=null)


def stratified(
    of_strata: Callable[..., Sequence[np.ndarray]],
    combine: Callable[..., np.ndarray],
    parts: StratumTerms,
    seed: int = 0,
    group: Groups | None = None,
    within: bool = True,
    scale: Scale = LINEAR,
    null: float = np.nan,
) -> Matched:
    """A statistic of sums over strata, with its 95 % interval over prompts, or over groups if there are several.

    ``prompts`` of the result counts those that contribute anything. Its share is 1.

    Args:
        of_strata: takes the sum over prompts of each part, [..., stratum], and returns terms of the same shape.
        combine: takes each term summed over the strata, and returns the statistic.
        parts: what each prompt contributes to each stratum, without NaN.
        group: number of each prompt's group. Intervals over prompts are percentile intervals.
        within: whether prompts are compared with those of their group only; otherwise groups are merely resampled.
        scale: where the interval over groups is computed.
        null: value of the statistic under the hypothesis that p tests.
    """
    number, strata = parts[0].shape
    contributes = np.any([part.any(axis=1) for part in parts], axis=0)
    group = np.zeros(number, dtype=int) if group is None else group
    clusters = np.unique(group[contributes])
    if not strata or not len(clusters):
        return Matched(Estimate(np.nan, np.nan, np.nan, 0, np.nan), 1.0)
    drawn, unit = _drawn(group, clusters, seed)
    totals: Any = 0
    for cluster in clusters if within else (None,):
        rows = contributes if cluster is None else contributes & (group == cluster)
        totals = totals + _totals(of_strata, [part[rows] for part in parts], drawn, unit[rows])
    values = combine(*totals)
    prompts, several = int(contributes.sum()), len(clusters) > 1
    low, high, p = _over_clusters(values, len(clusters) if several else prompts, scale, null)
    if not several:
        known = values[1:][~np.isnan(values[1:])]
        enough = prompts > 1 and len(known)
        low, high = np.percentile(known, [2.5, 97.5], method="nearest") if enough else (np.nan, np.nan)
    found = Estimate(float(values[0]), float(low), float(high), prompts, p if prompts > 1 else np.nan)
    return Matched(found, 1.0, len(clusters) if several else 0)


def _drawn(
    group: Groups, clusters: np.ndarray, seed: int
) -> tuple[Float[np.ndarray, "resample unit"], Int[np.ndarray, " prompt"]]:
    """How often each unit is drawn (once in the first row, which is the estimate), and the unit of each prompt."""
    several = len(clusters) > 1
    unit = np.searchsorted(clusters, group).clip(max=len(clusters) - 1) if several else np.arange(len(group))
    number = len(clusters) if several else len(group)
    return np.vstack([np.ones(number), resampling_weights(number, seed)]), unit


def _totals(
    of_strata: Callable[..., Sequence[np.ndarray]],
    parts: StratumTerms,
    drawn: Float[np.ndarray, "resample unit"],
    unit: Int[np.ndarray, " prompt"],
) -> Float[np.ndarray, "term resample"]:
    """Each term summed over the strata.

    If all prompts are of one unit, its terms are multiplied: a cluster drawn twice is two clusters, not one with twice
    the prompts.
    """
    if len(np.unique(unit)) == 1:
        once = np.stack([term.sum() for term in of_strata(*(part.sum(axis=0, dtype=np.float64) for part in parts))])
        return np.asarray(once[:, None] * drawn[:, unit[0]])
    members = (np.arange(drawn.shape[1])[:, None] == unit).astype(np.float64)  # [unit, prompt]
    totals: Any = 0
    for start in range(0, parts[0].shape[1], CHUNK):
        sums = [drawn @ (members @ part[:, start : start + CHUNK].astype(np.float64)) for part in parts]
        totals = totals + np.stack([term.sum(axis=-1) for term in of_strata(*sums)])
    return np.asarray(totals)


def _over_clusters(
    values: Float[np.ndarray, " resample"], number: int, scale: Scale, null: float
) -> tuple[float, float, float]:
    """Interval and p value of the module's formula; the first of `values` is the estimate."""
    from scipy.stats import t

    on_scale = scale.to(values)
    centre, drawn = on_scale[0], on_scale[1:][~np.isnan(on_scale[1:])]
    finite = drawn[np.isfinite(drawn)]
    if np.isnan(centre) or number < 2 or len(finite) < 2:
        return np.nan, np.nan, np.nan
    error = float(np.sqrt(number / (number - 1)) * finite.std())
    half = t.ppf(0.975, number - 1) * error
    lowest, highest = ((drawn == side).mean() > UNBOUNDED for side in (-np.inf, np.inf))
    centre_or_median = centre if np.isfinite(centre) else np.median(finite)
    low = float(scale.back(-np.inf if lowest else centre_or_median - half))
    high = float(scale.back(np.inf if highest or centre == np.inf else centre_or_median + half))
    away = abs(centre - float(scale.to(null)))
    if not np.isfinite(away) or lowest or highest:
        return low, high, np.nan
    return low, high, float(2 * t.sf(away / error, number - 1)) if error else float(away == 0)


def compare(
    parts: StratumTerms, seed: int = 0, difference: bool = False, group: Groups | None = None, within: bool = True
) -> Matched:
    """The matched risk ratio of two groups of places, or the difference (analyses/matching.py).

    Args:
        parts: a, n, b and m: events and places of the first group, events and places of the second.
        group: number of each prompt's group.
        within: whether places are compared within groups of prompts only; otherwise these are merely resampled.
    """
    usable = _comparable(parts[1], parts[3], group if within else None)
    kept = [np.where(usable, part, 0) for part in parts]
    combine = (lambda a, b, w: ratio(a - b, w)) if difference else (lambda a, b, _: ratio(a, b))
    scale, null = (LINEAR, 0.0) if difference else (LOG, 1.0)
    found = stratified(terms, combine, kept, seed, group, within, scale, null)
    return found._replace(share=float(ratio(kept[0].sum(), parts[0].sum())))


def _comparable(n: np.ndarray, m: np.ndarray, group: Groups | None) -> np.ndarray:
    """bool [prompt, stratum]: whether the stratum has places of both groups, in the group of the prompt if given."""
    usable = np.zeros(n.shape, dtype=bool)
    for cluster in np.unique(group) if group is not None else (None,):
        rows = slice(None) if cluster is None else group == cluster
        usable[rows] = (n[rows].sum(axis=0) > 0) & (m[rows].sum(axis=0) > 0)
    return usable


def correlation_within(
    x: np.ndarray, y: np.ndarray, seed: int = 0, group: Groups | None = None, within: bool = True
) -> Matched:
    """Correlation of two quantities [prompt, stratum] within strata: between prompts at the same step and position.

    Σ_s Σ_i (x − x̄_s)(y − ȳ_s) / √(Σ_s Σ_i (x − x̄_s)² · Σ_s Σ_i (y − ȳ_s)²), over the places where both have a value.
    ``share`` of the result is the share of these places with others in their stratum.

    Args:
        group, within: as in `compare`.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    shared = np.zeros(known.shape, dtype=bool)
    for cluster in np.unique(group) if group is not None and within else (None,):
        rows = slice(None) if cluster is None else group == cluster
        shared[rows] = known[rows] & (known[rows].sum(axis=0) > 1)
    x, y = np.where(shared, x, 0), np.where(shared, y, 0)
    parts = [shared.astype(float), x, y, x * x, y * y, x * y]
    found = stratified(_within, _correlation, parts, seed, group, within, DIFFERENCE, 0.0)
    return found._replace(share=float(ratio(shared.sum(), known.sum())))


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
