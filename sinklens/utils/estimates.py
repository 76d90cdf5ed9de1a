"""Estimates with 95 % limits, and the paired tests and corrections that go with them.

A *unit* is what was sampled: a prompt, a sample of a task, a document. Limits are over units, never over steps or
heads. Which limits fit depends on the values:

- *Outcomes* take few values, e.g. right or wrong, or a difference of two of those: score limits (`outcomes`,
  `proportion`, `paired`; Wilson's and Tango's), which keep their coverage near 0 and 1.
- *Means* of other values: percentile bootstrap (`bootstrap`). Zero width there means that these units agree, not that
  all others would.
- *Pooled* estimates are functions of sums over units, such as all sinks on newlines divided by all sinks: bootstrap
  (`pooled`).
- *Few values*, such as training seeds: Student's t (`student`).

A resample is a weight for each unit (`resampling_weights`), so all resamples of all entries are one matrix product.
``scipy.stats.bootstrap`` follows the same procedure with indices; it needs memory for every value of every resample and
draws other random numbers, which would change stored findings.

Pitfall: a paired difference can exclude zero although the limits of the two overlap. Look at the difference itself.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from sinklens.errors import SettingError, require
from sinklens.utils.arguments import checked

Z = 1.959963984540054  # the 0.975 quantile of the standard normal distribution
HALVINGS = 45  # of a range of at most 4: the limits are exact to 1e-13
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % limits, or an array of them.

    Attributes:
        value: the estimate; NaN where no unit has a value.
        low, high: its limits; NaN where fewer than two units have a value, except those of `proportion`.
        n: number of units with a value.
        p: two-sided p value of the hypothesis that the making function names; None if none was tested.
    """

    value: Any
    low: Any
    high: Any
    n: Any
    p: Any = None

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.n}"


class Paired(NamedTuple):
    """Two runs on the same samples.

    Attributes:
        difference: accuracy of the second run minus that of the first, with Tango's score limits and the p value of
            McNemar's exact test.
        lost, gained: number of samples that only the first, or only the second, got right.
    """

    difference: Estimate
    lost: int
    gained: int


@checked
def proportion(right: int, total: int) -> Estimate:
    """Share of right answers with Wilson's 95 % score limits; NaN without samples.

    Raises:
        SettingError: the number of right answers is negative, or larger than the number of answers.
    """
    from scipy.stats import binomtest

    require(
        0 <= right <= total,
        f"{right} of {total} samples cannot be right.",
    )
    if not total:
        return Estimate(math.nan, math.nan, math.nan, 0)
    share = right / total
    low, high = binomtest(right, total).proportion_ci(confidence_level=0.95, method="wilson")
    return Estimate(share, min(share, float(low)), max(share, float(high)), total)  # rounding must not exclude share


def unpaired(base: Estimate, other: Estimate) -> Estimate:
    """Difference of two shares, `other` minus `base`, with Newcombe's hybrid score limits for independent samples.

    With shares p, q and Wilson's limits (l, u) and (m, v), the limits of q − p are q − p − √((q − m)² + (u − p)²) and q
    − p + √((v − q)² + (p − l)²) (Newcombe, Statistics in Medicine 17, 1998, 873–890, method 10). If both were measured
    on the same questions, these limits are too wide, never too narrow, as long as the verdicts agree more often than by
    chance. ``n`` is the smaller number of samples.
    """
    gap = other.value - base.value
    down = math.hypot(other.value - other.low, base.high - base.value)
    up = math.hypot(other.high - other.value, base.value - base.low)
    return Estimate(gap, gap - down, gap + up, min(base.n, other.n))


@checked
def paired(base: Bool[np.ndarray, " sample"], changed: Bool[np.ndarray, " same"]) -> Paired:
    """Compare the verdicts of two runs, arrays or lists, on the same samples in the same order.

    Samples that both get right, or both wrong, carry no information about the difference.

    Raises:
        SettingError: they are not verdicts, True or False; there is no sample, or the numbers of samples differ.
    """
    base, changed = np.asarray(base), np.asarray(changed)
    for verdicts in (base, changed):
        require(
            verdicts.ndim == 1 and (verdicts.dtype == bool or not len(verdicts)),
            f"paired verdicts are lists of True and False; got {verdicts.dtype} values of shape "
            f"{list(verdicts.shape)}.",
        )
    require(
        len(base) == len(changed) and len(base),
        f"paired verdicts need the same samples, at least one; got {len(base)} and {len(changed)}.",
    )
    lost, gained, total = int((base & ~changed).sum()), int((~base & changed).sum()), len(base)
    low, high = score_interval(np.array([lost, total - lost - gained, gained]), (-1, 0, 1))
    found = Estimate((gained - lost) / total, float(low), float(high), total, mcnemar(lost, gained))
    return Paired(found, lost, gained)


def mcnemar(lost: int, gained: int) -> float:
    """McNemar's exact test, two-sided: the probability, if losing and gaining were equally likely, of a split of
    lost + gained at least as uneven as this one; 1 without any.
    """
    from statsmodels.stats.contingency_tables import mcnemar as test

    return float(test([[0, lost], [gained, 0]], exact=True).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for multiple tests: adjusted p values, in the given order.

    It bounds the probability of any false claim. NaN values are not counted as tests and stay NaN.
    """
    from statsmodels.stats.multitest import multipletests

    adjusted = np.array(p_values, dtype=np.float64)
    known = ~np.isnan(adjusted)
    if known.any():
        adjusted[known] = multipletests(adjusted[known], method="holm")[1]
    return adjusted.tolist()


def outcomes(values: Shaped[np.ndarray, "unit *rest"], lowest: int, highest: int) -> Estimate:
    """Mean over units of integers with its 95 % score limits; NaN units are left out, entry by entry.

    See `score_interval`: Wilson's limits of 0 and 1, Tango's of −1, 0 and 1.

    Args:
        lowest, highest: range of the possible values.

    Raises:
        SettingError: a value that is not an integer from `lowest` to `highest`.
    """
    counts, possible = counted(values, lowest, highest)
    count = counts.sum(axis=-1)
    with np.errstate(invalid="ignore"):
        value = counts @ possible / count
    low, high = (np.where(count > 1, bound, np.nan) for bound in score_interval(counts, possible.tolist()))
    return Estimate(value, np.minimum(low, value), np.maximum(high, value), count.astype(int))


def bootstrap(values: Shaped[np.ndarray, "unit *rest"], seed: int = 0) -> Estimate:
    """Mean over units with its 95 % percentile bootstrap limits; NaN units are left out, entry by entry."""
    values = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(values)
    found = pooled(np.divide, [np.where(known, values, 0.0), known.astype(np.float64)], seed)
    count = known.sum(axis=0)
    low, high = (np.where(count > 1, bound, np.nan) for bound in (found.low, found.high))
    return Estimate(found.value, low, high, count)


def pooled(
    statistic: Callable[..., np.ndarray], parts: Sequence[Shaped[np.ndarray, "unit *rest"]], seed: int = 0
) -> Estimate:
    """A statistic of sums over units with its 95 % percentile bootstrap limits.

    Args:
        statistic: takes one sum per part, [..., *rest], and returns [..., *out].
        parts: what each unit contributes to each sum, without NaN.
    """
    sizes = [np.asarray(part, dtype=np.float64) for part in parts]
    number = len(sizes[0])
    drawn = resampling_weights(number, seed)
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an entry without a value in any resample is NaN, as intended
        value = np.asarray(statistic(*(size.sum(axis=0) for size in sizes)))
        if number < 2:
            return Estimate(value, value * np.nan, value * np.nan, np.full(value.shape, number))
        resampled = statistic(*(np.tensordot(drawn, size, axes=1) for size in sizes))
        low, high = np.nanpercentile(resampled, [2.5, 97.5], axis=0)
    return Estimate(value, low, high, np.full(value.shape, number))


@lru_cache(maxsize=8)  # a table has many rows over the same prompts
def resampling_weights(units: int, seed: int) -> Float[np.ndarray, "resample unit"]:
    """How often each unit is drawn in each of `RESAMPLES` resamples; not to be written to."""
    return np.random.default_rng(seed).multinomial(units, [1 / units] * units, size=RESAMPLES).astype(np.float64)


def student(value: float, error: float, freedom: int, n: int) -> Estimate:
    """value ± t₍freedom, 0.975₎ · error, and the t test that the true value is 0; no limits with n < 2.

    Args:
        error: standard error of `value`.
        freedom: degrees of freedom of `error`.
        n: number of units.
    """
    from scipy.stats import t

    if n < 2:
        return Estimate(value, math.nan, math.nan, n, math.nan)
    half = float(t.isf(0.025, freedom)) * error
    size = 0.0 if value == 0 else abs(value) / error if error > 0 else math.inf
    return Estimate(value, value - half, value + half, n, float(2 * t.sf(size, freedom)))


def score_interval(
    counts: Shaped[np.ndarray, "*rest value"], values: Sequence[int]
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """95 % score interval of the mean of a variable that takes few values, from how often each occurred.

    The limits are the extreme θ with

        n (m − θ)² ≤ z² Σ_v p̃_v(θ) (v − θ)²

    n is the number of samples, m their mean, z = 1.96, and p̃(θ) the maximum-likelihood probabilities of the values v
    among those with mean θ. With values (0, 1) this is Wilson's interval; with (−1, 0, 1), the differences of paired
    verdicts, it is Tango's (Statistics in Medicine 17, 1998, 891–908). It never has zero width: where all n
    differences are 0 the limits are ±z² / (n + z²), a little beyond the rule of three, ±3 / n. Coverage for
    n = 25 to 500 is at least 0.93 (tests/utils/test_coverage.py).

    Args:
        counts: number of samples with each value.
        values: every possible value in increasing order, whether it occurred or not.

    Returns:
        Lower and upper limits; NaN without samples.
    """
    shares, number, ascending = _shares(counts, values)
    shape = np.shape(counts)[:-1]
    mirrored = np.broadcast_to(-ascending[::-1], shares.shape), np.broadcast_to(ascending, shares.shape)
    both = _upper_limit(np.concatenate([shares[:, ::-1], shares]), np.tile(number, 2), np.concatenate(mirrored))
    low, high = np.split(both, 2)
    return (-low).reshape(shape), high.reshape(shape)


def score_p(
    counts: Shaped[np.ndarray, "*rest value"], values: Sequence[int], null: float = 0.0
) -> Float[np.ndarray, "*rest"]:
    """Two-sided p value of the score test that the mean is `null`: the test that `score_interval` inverts.

    NaN without samples.
    """
    from scipy.stats import norm

    shares, number, ascending = _shares(counts, values)
    mean = shares @ ascending
    theta = np.full_like(mean, null)
    above = _null_variance(shares, ascending, theta)
    below = _null_variance(shares[:, ::-1], -ascending[::-1], -theta)
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = np.sqrt(number) * np.abs(mean - null) / np.sqrt(np.where(mean < null, above, below))
    return np.where(mean == null, 1.0, 2 * norm.sf(distance)).reshape(np.shape(counts)[:-1])


def _shares(
    counts: np.ndarray, values: Sequence[int]
) -> tuple[Float[np.ndarray, "entry value"], Float[np.ndarray, " entry"], Float[np.ndarray, " value"]]:
    """Shares of each value, NaN without samples; the numbers of samples; and the values."""
    flat = np.asarray(counts, dtype=np.float64).reshape(-1, len(values))
    number = flat.sum(axis=1)
    shares = np.divide(flat, number[:, None], out=np.full_like(flat, np.nan), where=number[:, None] > 0)
    return shares, number, np.asarray(values, dtype=np.float64)


def _upper_limit(
    shares: Float[np.ndarray, "entry value"],
    number: Float[np.ndarray, " entry"],
    values: Float[np.ndarray, "entry value"],
) -> Float[np.ndarray, " entry"]:
    """The largest mean that the score test does not reject, by bisection between the observed mean and the maximum."""
    mean = (shares * values).sum(axis=1)
    inside, outside = mean, values[:, -1]
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        accepted = number * (mean - middle) ** 2 <= Z**2 * _null_variance(shares, values, middle)
        inside, outside = np.where(accepted, middle, inside), np.where(accepted, outside, middle)
    return np.where(np.isnan(mean), np.nan, inside)


def _null_variance(
    shares: Float[np.ndarray, "entry value"],
    values: Float[np.ndarray, "*entries value"],
    theta: Float[np.ndarray, " entry"],
) -> Float[np.ndarray, " entry"]:
    """Variance of the values under the maximum-likelihood probabilities with mean `theta`, above the observed mean.

    Lagrange: p̃_v = p̂_v / (1 − r (v − θ) / (v_max − θ)), where r in (0, 1) makes them sum to 1. Where no r does, because
    v_max did not occur, r is 1 and v_max has the remaining probability.
    """
    offset = values - theta[:, None]
    reach = np.maximum(offset[:, -1:], 1e-300)
    low, high = np.zeros_like(theta), np.ones_like(theta)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            tilted = np.where(shares > 0, shares / (1 - middle[:, None] * offset / reach), 0.0)
            beyond = tilted.sum(axis=1) > 1
            low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
        tilted = np.where(shares > 0, shares / (1 - low[:, None] * offset / reach), 0.0)
    tilted[:, -1] += np.maximum(1 - tilted.sum(axis=1), 0.0)
    return (tilted * offset**2).sum(axis=1)


def counted(
    values: Shaped[np.ndarray, "unit *rest"], lowest: int, highest: int
) -> tuple[Float[np.ndarray, "*rest value"], Shaped[np.ndarray, " value"]]:
    """How often each integer of a range occurs over units, and the integers.

    Raises:
        SettingError: a value that is not an integer from `lowest` to `highest`.
    """
    possible = np.arange(lowest, highest + 1)
    values = np.asarray(values)
    others = values[~np.isnan(values) & ~np.isin(values, possible)]
    if len(others):
        raise SettingError(
            f"outcomes are the integers from {lowest} to {highest}, or NaN; got {others[0]:g}. Give the range of all "
            "possible values (0 and 1 of verdicts, −1 and 1 of their differences), or use bootstrap for other values."
        )
    return (values[..., None] == possible).sum(axis=0).astype(np.float64), possible
