"""Accuracy with intervals, and paired differences of two runs on the same samples.

Verdicts are booleans, one per sample. Two runs are compared sample by sample: samples that both get right, or both
wrong, carry no information about the difference. Intervals of accuracies and of their differences are score intervals
(`score_interval`), which keep their coverage near 0 and 1, where a bootstrap has zero width.

Pitfall: overlapping intervals do not imply that the paired difference is zero. Look at the difference itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from sinklens.errors import SettingError
from sinklens.utils.integers import as_integer

Z = 1.959963984540054  # the 0.975 quantile of the standard normal distribution
HALVINGS = 45  # of a range of at most 4: the limits are exact to 1e-13


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers.

    Attributes:
        right, total: number of samples answered correctly, and in total.
    """

    right: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.total:
            raise SettingError(f"{self.right} of {self.total} samples cannot be right.")

    @property
    def share(self) -> float:
        """Share of right answers, in [0, 1]; NaN without samples."""
        return self.right / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval of `share`; NaN without samples."""
        from scipy.stats import binomtest

        if not self.total:
            return math.nan, math.nan
        low, high = binomtest(self.right, self.total).proportion_ci(confidence_level=0.95, method="wilson")
        return min(self.share, float(low)), max(self.share, float(high))  # rounding must not exclude share

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.3f} [{low:.3f}, {high:.3f}] of {self.total}"


class Gap(NamedTuple):
    """The difference of two accuracies whose samples are not paired.

    Attributes:
        difference: the second accuracy minus the first.
        low, high: its 95 % interval.
    """

    difference: float
    low: float
    high: float


def unpaired_gap(base: Accuracy, other: Accuracy) -> Gap:
    """Difference of two accuracies, with Newcombe's hybrid score interval for independent samples.

    With shares p, q and Wilson's limits (l, u) and (m, v), the limits of q − p are q − p − √((q − m)² + (u − p)²) and
    q − p + √((v − q)² + (p − l)²) (Newcombe, Statistics in Medicine 17, 1998, 873–890, method 10). Where both were
    measured on the same questions, the interval is too wide, never too narrow, as long as the verdicts agree more often
    than by chance.
    """
    (low, high), (lower, upper) = base.interval, other.interval
    gap = other.share - base.share
    down = math.hypot(other.share - lower, high - base.share)
    return Gap(gap, gap - down, gap + math.hypot(upper - other.share, base.share - low))


@dataclass(frozen=True)
class Paired:
    """The difference of two runs on the same samples.

    Attributes:
        difference: accuracy of the second run minus that of the first.
        low, high: Tango's 95 % score interval, see `score_interval`.
        lost, gained: number of samples that only the first, or only the second, got right.
        p: McNemar's exact test, two-sided: the probability, if losing and gaining were equally likely, of a split of
            lost + gained at least as uneven as this one.
        total: number of samples.
    """

    difference: float
    low: float
    high: float
    lost: int
    gained: int
    p: float
    total: int


def paired(base: Bool[np.ndarray, " sample"], changed: Bool[np.ndarray, " same"]) -> Paired:
    """Compare the verdicts of two runs, arrays or lists, on the same samples in the same order.

    Raises:
        SettingError: they are not verdicts, True or False; there is no sample, or the numbers of samples differ.
    """
    base, changed = np.asarray(base), np.asarray(changed)
    for verdicts in (base, changed):
        if verdicts.ndim != 1 or not (verdicts.dtype == bool or not len(verdicts)):
            raise SettingError(
                f"paired verdicts are lists of True and False; got {verdicts.dtype} values of shape "
                f"{list(verdicts.shape)}."
            )
    if len(base) != len(changed) or not len(base):
        raise SettingError(f"paired verdicts need the same samples, at least one; got {len(base)} and {len(changed)}.")
    lost, gained, total = int((base & ~changed).sum()), int((~base & changed).sum()), len(base)
    low, high = score_interval(np.array([lost, total - lost - gained, gained]), (-1, 0, 1))
    return Paired((gained - lost) / total, float(low), float(high), lost, gained, mcnemar(lost, gained), total)


def mcnemar(lost: int, gained: int) -> float:
    """McNemar's exact test, two-sided: the sign test of the discordant samples; 1 without any.

    Raises:
        SettingError: a count is not an integer of at least 0.
    """
    from scipy.stats import binomtest

    if any(as_integer(count) is None or count < 0 for count in (lost, gained)):
        raise SettingError(f"lost and gained must be counts of samples, 0 or more; got {lost!r} and {gained!r}.")

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


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
    n = 25 to 500 is at least 0.93 (tests/evaluation/test_coverage.py).

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
    if np.shape(counts)[-1:] != (len(values),):
        raise SettingError(f"counts needs an entry for each of {len(values)} values; got {list(np.shape(counts))}.")
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


def holm(p_values: Mapping[str, float] | Sequence[float]) -> list[float]:
    """Holm's correction for multiple tests: adjusted p values, in the given order.

    The k-th smallest of n values becomes the largest (n + 1 − i) p_(i) of i ≤ k, at most 1. It bounds the probability
    of any false claim; SciPy has only corrections of the share of false claims (``false_discovery_control``).
    """
    values = np.array(list(p_values.values()) if isinstance(p_values, Mapping) else p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(np.fmin(np.arange(len(values), 0, -1) * values[order], 1))
    return adjusted.tolist()
