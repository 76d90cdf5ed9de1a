"""Comparisons of heavy-tailed positive quantities, such as KL divergences, beyond their means.

A few prompts hold most of a mean of such values, so its interval at n = 20 is far too short. Two numbers stand beside
it for each comparison of x and y, paired by prompt:

- ``ratio``: geometric mean of x / y, with the t interval of the logarithms;
- ``larger``: share of prompts with x > y among those where they differ, with the sign test.

A prompt with x = 0 or y = 0 has no ratio and counts only in the other.

Limitation: a ratio says nothing about the size of a quantity. Twice almost nothing is almost nothing: read the mean
with it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from pandas import DataFrame

from sinklens.analyses.estimates.tables import corrected, interval_rows
from sinklens.utils.estimates import Estimate, mcnemar, outcomes, student

Values = Float[np.ndarray, " prompt"]


def median(values: Values) -> Estimate:
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


def geometric(logs: Values) -> Estimate:
    """exp of the mean of `logs`, with its t interval and the t test of a mean of 0."""
    number = len(logs)
    mean = float(logs.mean()) if number else np.nan
    error = float(logs.std(ddof=1)) / np.sqrt(number) if number > 1 else np.nan
    found = student(mean, error, number - 1, number)
    value, low, high = (float(np.exp(end)) for end in (found.value, found.low, found.high))
    return Estimate(value, low, high, number, found.p)


def ratio_rows(model: str, claim: str, first: Values, second: Values) -> list[dict[str, Any]]:
    """Two rows on a claim: ``ratio``, the geometric mean of first / second, and ``larger``, the share of prompts in
    which the first is larger, among those that differ, with the p value of the sign test.
    """
    both = (first > 0) & (second > 0)
    signs = np.sign(first - second)
    signs = signs[~np.isnan(signs) & (signs != 0)]
    sign_p = mcnemar(int((signs < 0).sum()), int((signs > 0).sum())) if len(signs) > 1 else np.nan
    found = geometric(np.log(first[both] / second[both]))
    larger = outcomes((signs > 0).astype(float), 0, 1)
    return [
        {**row, "p": p}
        for measure, one, p in (("ratio", found, found.p), ("larger", larger, sign_p))
        for row in interval_rows(model, measure, one, {"claim": [claim]})
    ]


def ratio_table(pairs: Mapping[str, Mapping[str, tuple[Values, Values]]]) -> "DataFrame":
    """`ratio_rows` of model -> claim -> the compared quantities, one family of tests per model."""
    rows = [
        row
        for model, claims in pairs.items()
        for claim, (first, second) in claims.items()
        for row in ratio_rows(model, claim, first, second)
    ]
    return corrected(DataFrame(rows))
