"""Accuracy with intervals, and paired differences of two runs on the same samples.

Verdicts are booleans, one a sample. Two runs are compared sample by sample: samples that both get right, or both
wrong, say nothing about their difference.

One way this misleads: intervals that overlap do not mean that a paired difference is nothing. Look at the difference.
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
        right, total: samples.
    """

    right: int
    total: int

    @property
    def share(self) -> float:
        """Right answers, in [0, 1]; NaN of none."""
        return self.right / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval of `share`."""
        from scipy.stats import binomtest

        if not self.total:
            return math.nan, math.nan
        low, high = binomtest(self.right, self.total).proportion_ci(confidence_level=0.95, method="wilson")
        return min(self.share, float(low)), max(self.share, float(high))  # despite rounding, share is inside

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.3f} [{low:.3f}, {high:.3f}] of {self.total}"


@dataclass(frozen=True)
class Paired:
    """The difference of two runs on the same samples.

    Attributes:
        difference: accuracy of the second less that of the first.
        low, high: 95 % percentile bootstrap interval over samples.
        lost, gained: samples that only the first, and only the second, got right.
        p: McNemar's exact test, two-sided: the probability, if losing and gaining were equally likely, of a split of
            lost + gained at least as uneven as this.
        total: samples.
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
        SettingError: no sample, or differently many.
    """
    from scipy.stats import binomtest

    if len(base) != len(changed) or not len(base):
        raise SettingError(
            f"paired verdicts are of the same samples, one at least; got {len(base)} and {len(changed)}."
        )
    lost, gained = int((base & ~changed).sum()), int((~base & changed).sum())
    rng = np.random.default_rng(seed)
    # The mean difference of a resample depends only on how many lost and gained samples it holds.
    drawn = rng.multinomial(len(base), np.array([lost, gained, len(base) - lost - gained]) / len(base), RESAMPLES)
    differences = (drawn[:, 1] - drawn[:, 0]) / len(base)
    low, high = np.percentile(differences, [2.5, 97.5])
    p = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    return Paired((gained - lost) / len(base), float(low), float(high), lost, gained, float(p), len(base))


def holm(p_values: Mapping[str, float] | Sequence[float]) -> list[float]:
    """Holm's correction for several tests: adjusted p values, in the order given."""
    values = list(p_values.values()) if isinstance(p_values, Mapping) else list(p_values)
    order = np.argsort(values, kind="stable")
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted
