"""What a number of prompts can show: power, the smallest effect that would have shown, and equivalence.

"Cannot tell" has two reasons: the effect is small, or the prompts are few. The *smallest effect shown* is the effect
that a test with this many prompts finds with a probability of 80 %, at the level that the first step of Holm's
correction leaves it, 0.05 divided by the number of tests. It is a property of the design and of the spread of the
values, not of the estimate. An effect is *equivalent* to none if two one-sided tests reject that it is as large as the
smallest effect of interest, in either direction (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15,
1987).

- Differences of paired verdicts (−1, 0, 1): exact, for McNemar's test, with the observed share of prompts that changed
  the other way.
- Other outcomes and means: (z₁₋ₐ + z₀.₈) σ / √n, with the observed σ.

Limitation: σ is estimated from the same prompts, and the formula for means assumes that they are many; with ten
heavy-tailed values it is too optimistic.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from jaxtyping import Float, Int

from sinklens.errors import SettingError
from sinklens.utils.estimates import score_p

LEVEL = 0.05
POWER = 0.8
TINY = 1e-12  # in place of a spread of 0
OF_INTEREST = 0.05
"""Smallest difference of shares of interest by default: the paper's bound for the cost of masking."""


def paired_power(effect: float, number: int, level: float = LEVEL, against: float = 0.0) -> float:
    """Probability that McNemar's exact test finds a difference of paired verdicts.

    Args:
        effect: true share of prompts lost, minus those gained.
        number: number of prompts.
        level: the test's level after correction.
        against: share gained; the share lost is `effect` + `against`.

    Raises:
        SettingError: shares or numbers that cannot be.
    """
    lost, gained = abs(effect) + against, against
    if number < 1 or not 0 < level < 1 or against < 0 or lost + gained > 1 + 1e-12:
        raise SettingError(
            f"power needs at least 1 prompt, a level between 0 and 1, and shares lost and gained with a sum of at most "
            f"1; got {number} prompts, level {level}, {lost:.3f} lost and {gained:.3f} gained."
        )
    if lost + gained == 0:
        return 0.0
    from scipy.stats import binom

    differing = np.arange(number + 1)
    chance = binom.pmf(differing, number, min(1.0, lost + gained))
    few, share = _critical(number, level), lost / (lost + gained)
    found = binom.cdf(few, differing, share) + binom.cdf(few, differing, 1 - share)
    return float(min(1.0, (chance * np.where(few >= 0, found, 0.0)).sum()))


@cache
def smallest_paired(number: int, level: float = LEVEL, against: float = 0.0, power: float = POWER) -> float:
    """The smallest difference of paired verdicts that McNemar's exact test finds with probability `power`.

    Infinite where none would be found. Arguments as in `paired_power`.
    """
    if number < 1:
        return math.inf
    against = round(float(against), 6)
    most = max(0.0, 1.0 - 2 * against)
    return _smallest(lambda effect: paired_power(effect, int(number), level, against), most, power)


def smallest_mean(number: int, spread: float, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest mean that a two-sided test finds with probability `power`; infinite where none would be found."""
    from scipy.stats import norm

    if number < 2 or 2.0 ** (1 - number) > level:  # random signs never reject
        return math.inf
    return float((norm.isf(level / 2) + norm.isf(1 - power)) * spread / math.sqrt(number))


def t_power(effect: float, number: int, spread: float, level: float = LEVEL) -> float:
    """Probability that a two-sided t test of `number` values with standard deviation `spread` finds a mean."""
    from statsmodels.stats.power import TTestPower

    size = abs(effect) / max(spread, TINY)
    if number < 2 or size * math.sqrt(number) > 30:
        return float(number >= 2)
    return float(TTestPower().power(size, number, level))


def smallest_t(number: int, spread: float, level: float = LEVEL) -> float:
    """The smallest mean that a two-sided t test finds with a probability of 80 %; infinite where none would be."""
    return _smallest(lambda effect: t_power(effect, number, 1.0, level), 100.0, POWER) * max(spread, TINY)


def _smallest(power_of: Callable[[float], float], most: float, power: float) -> float:
    """The smallest effect up to `most` that is found with probability `power`, by bisection; infinite without one."""
    low, high = 0.0, most
    if power_of(high) < power:
        return math.inf
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(middle) >= power else (middle, high)
    return high


def smallest_shown(
    number: int, level: float, *, against: float = math.nan, spread: float = math.nan, null: float = 0.0
) -> float:
    """The smallest effect that a row of a table could have shown.

    Args:
        against: of paired verdicts, the share that changed the other way; NaN for other values.
        spread: of other values, their standard deviation over prompts.
        null: the hypothesis, of paired verdicts; a threshold other than 0 is tested by a score test.
    """
    if number < 2 or (math.isnan(against) and math.isnan(spread)):
        return math.nan
    if math.isnan(against):
        return smallest_mean(number, spread, level)
    if null == 0:
        return smallest_paired(number, level, against)
    return smallest_mean(number, max(spread, math.sqrt(abs(null) * (1 - abs(null)))), level)


def equivalence_power(number: int, of_interest: float, differing: float, level: float = LEVEL) -> float:
    """Probability that a difference of paired verdicts is found equivalent to none, if it is exactly 0.

    Args:
        of_interest: the smallest difference of interest.
        differing: share of prompts whose verdicts differ, half in each direction.
    """
    from scipy.stats import binom

    total = 0.0
    for count in range(number + 1):
        chance = binom.pmf(count, number, differing)
        if chance > 1e-9:
            lost = np.arange(count + 1)
            passed = equivalent_p(lost, count - lost, number, of_interest) <= level
            total += chance * float((binom.pmf(lost, count, 0.5) * passed).sum())
    return float(total)


def equivalent_p(
    lost: Int[np.ndarray, "*rest"] | int, gained: Int[np.ndarray, "*rest"] | int, number: int, of_interest: float
) -> Float[np.ndarray, "*rest"]:
    """p value of two one-sided score tests that a difference of paired verdicts is at least `of_interest` in size.

    Args:
        lost, gained: number of prompts with a difference of 1 and −1.
    """
    up, down = np.broadcast_arrays(np.asarray(lost), np.asarray(gained))
    counts = np.stack([down, number - up - down, up], axis=-1)
    mean = (up - down) / number
    flat = counts.reshape(-1, 3)
    tests = [score_p(flat, (-1, 0, 1), bound).reshape(mean.shape) for bound in (of_interest, -of_interest)]
    sides = [mean < of_interest, mean > -of_interest]
    one_sided = [np.where(side, p / 2, 1 - p / 2) for p, side in zip(tests, sides, strict=True)]
    return np.asarray(np.maximum(*one_sided))


@cache
def _critical(number: int, level: float) -> Int[np.ndarray, " count"]:
    """For 0 to `number` differing prompts, the largest smaller count that McNemar's exact test rejects; −1 for none."""
    from scipy.stats import binom

    found = []
    for count in range(number + 1):
        tail = 2 * binom.cdf(np.arange(count // 2 + 1), count, 0.5)
        found.append(int((tail <= level).sum()) - 1)
    return np.array(found)
