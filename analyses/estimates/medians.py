"""What stands beside the mean of a quantity that few prompts dominate, such as a KL divergence.

The top tenth of prompts can hold most of a mean KL. The bootstrap interval of such a mean is too narrow (docs/concepts/
error-rates.md has its coverage), and a mean says little about a typical prompt. So tables of means
(`tables.interval_table`) give for the measures `HEAVY` also the *median*, with an interval between two order
statistics that needs no assumption, and the share of prompts *above 0*, with Wilson's score interval.

Caveat: these describe other quantities than the mean. If a few prompts matter, as for a total cost, the mean does too.
"""

import numpy as np
from jaxtyping import Float

from sinklens.utils.estimates import Estimate, outcomes

HEAVY = ("kl", "kl_age", "kl_step", "policy_kl")
"""Measures with a heavy tail, in all studies."""


def median(values: Float[np.ndarray, " prompt"]) -> Estimate:
    """Median and its distribution-free 95 % interval: the order statistics l and n + 1 − l, l the largest rank with
    P(B < l) ≤ 0.025 for B ~ Binomial(n, ½). Infinite with fewer than six values; NaN entries are left out.
    """
    from scipy.stats import binom

    known = np.sort(values[~np.isnan(values)])
    number = len(known)
    if not number:
        return Estimate(np.nan, np.nan, np.nan, 0)
    rank = int(binom.ppf(0.025, number, 0.5))
    low, high = (known[rank - 1], known[number - rank]) if rank else (-np.inf, np.inf)
    return Estimate(float(np.median(known)), float(low), float(high), number)


def typical(values: Float[np.ndarray, " prompt"]) -> dict[str, float]:
    """Columns of a table: ``median``, ``median_low``, ``median_high``; and ``above``, ``above_low``, ``above_high``,
    the share of the prompts with a value above 0. NaN entries are left out.
    """
    above = outcomes(np.where(np.isnan(values), np.nan, values > 0), 0, 1)
    return {
        f"{name}{end}": float(number)
        for name, found in (("median", median(values)), ("above", above))
        for end, number in (("", found.value), ("_low", found.low), ("_high", found.high))
    }
