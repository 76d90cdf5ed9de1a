"""Accuracy with intervals, and paired differences of two runs on the same samples.

Verdicts are booleans, one per sample. Two runs are compared sample by sample: samples that both get right, or both
wrong, carry no information about the difference.

Pitfall: overlapping intervals do not imply that the paired difference is zero. Look at the difference itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from sinklens.errors import SettingError

RESAMPLES = 10_000


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers.

    Attributes:
        right, total: number of samples answered correctly, and in total.
    """

    right: int
    total: int

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


@dataclass(frozen=True)
class Paired:
    """The difference of two runs on the same samples.

    Attributes:
        difference: accuracy of the second run minus that of the first.
        low, high: 95 % percentile bootstrap interval over samples.
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


def paired(base: Bool[np.ndarray, " sample"], changed: Bool[np.ndarray, " same"], seed: int = 0) -> Paired:
    """Compare the verdicts of two runs on the same samples, in the same order.

    Raises:
        SettingError: there is no sample, or the numbers of samples differ.
    """
    from scipy.stats import binomtest

    if len(base) != len(changed) or not len(base):
        raise SettingError(f"paired verdicts need the same samples, at least one; got {len(base)} and {len(changed)}.")
    lost, gained = int((base & ~changed).sum()), int((~base & changed).sum())
    rng = np.random.default_rng(seed)
    # The mean difference of a resample depends only on its numbers of lost and gained samples.
    drawn = rng.multinomial(len(base), np.array([lost, gained, len(base) - lost - gained]) / len(base), RESAMPLES)
    differences = (drawn[:, 1] - drawn[:, 0]) / len(base)
    low, high = np.percentile(differences, [2.5, 97.5])
    p = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    return Paired((gained - lost) / len(base), float(low), float(high), lost, gained, float(p), len(base))


def holm(p_values: Mapping[str, float] | Sequence[float]) -> list[float]:
    """Holm's correction for multiple tests: adjusted p values, in the given order."""
    values = list(p_values.values()) if isinstance(p_values, Mapping) else list(p_values)
    order = np.argsort(values, kind="stable")
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted
