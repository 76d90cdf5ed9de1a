"""Accuracy with intervals, and paired differences of two runs on the same samples; see sinklens/utils/estimates.py.

Pitfall: overlapping intervals do not imply that the paired difference is zero. Look at the difference itself.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from sinklens.errors import SettingError
from sinklens.utils import estimates
from sinklens.utils.estimates import holm, mcnemar, score_interval, score_p

__all__ = ["Accuracy", "Gap", "Paired", "holm", "mcnemar", "paired", "score_interval", "score_p", "unpaired_gap"]


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
        found = estimates.proportion(self.right, self.total)
        return found.low, found.high

    def __str__(self) -> str:
        return str(estimates.proportion(self.right, self.total))


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
    """Difference of two accuracies, with Newcombe's interval; see `sinklens.utils.estimates.unpaired`."""
    pair = (estimates.proportion(one.right, one.total) for one in (base, other))
    found = estimates.unpaired(*pair)
    return Gap(found.value, found.low, found.high)


@dataclass(frozen=True)
class Paired:
    """The difference of two runs on the same samples.

    Attributes:
        difference: accuracy of the second run minus that of the first.
        low, high: Tango's 95 % score interval, see `score_interval`.
        lost, gained: number of samples that only the first, or only the second, got right.
        p: McNemar's exact test, two-sided.
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
    """Compare the verdicts of two runs on the same samples; see `sinklens.utils.estimates.paired`."""
    found, lost, gained = estimates.paired(base, changed)
    return Paired(found.value, found.low, found.high, lost, gained, found.p, found.n)
