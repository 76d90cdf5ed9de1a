"""Two conditions of a heavy-tailed quantity, such as a KL divergence, compared prompt by prompt.

A difference of two means depends on the few prompts that dominate them (medians.py). Ratios do not: the geometric mean
of first / second over prompts, with a t interval on the log scale, says by which factor a typical prompt differs, and
the share of prompts in which the first is larger says how often.

Pitfall: a prompt where one of the two is exactly 0 has no log-ratio and is left out of the geometric mean; the share
counts it.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from sinklens.analyses.intervals import Interval, interval_rows, outcomes
from sinklens.evaluation.statistics import mcnemar


def log_ratio(first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]) -> tuple[Interval, float]:
    """Geometric mean over prompts of first / second, with its t interval on the log scale, and the p value of 1.

    Prompts where either is not above 0 or missing are left out.
    """
    from scipy.stats import t

    usable = (first > 0) & (second > 0)
    logs = np.log(first[usable] / second[usable])
    number, nothing = len(logs), np.array(np.nan)
    if not number:
        return Interval(nothing, nothing, nothing, np.array(0)), np.nan
    mean = logs.mean()
    if number < 2:
        return Interval(np.exp(mean), nothing, nothing, np.array(number)), np.nan
    error = logs.std(ddof=1) / np.sqrt(number)
    half = t.ppf(0.975, number - 1) * error
    p = float(2 * t.sf(abs(mean) / error, number - 1)) if error else float(mean == 0)
    return Interval(np.exp(mean), np.exp(mean - half), np.exp(mean + half), np.array(number)), p


def ratio_rows(
    model: str, claim: str, first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]
) -> list[dict[str, Any]]:
    """Two rows on a claim: ``ratio``, see `log_ratio`, and ``larger``, the share of prompts in which the first is
    larger, among those that differ, with the p value of the sign test.
    """
    found, p = log_ratio(first, second)
    signs = np.sign(first - second)
    signs = signs[~np.isnan(signs) & (signs != 0)]
    share = outcomes((signs > 0).astype(float), 0, 1)
    sign_p = mcnemar(int((signs < 0).sum()), int((signs > 0).sum())) if len(signs) > 1 else np.nan
    rows = []
    for measure, interval, p_value in (("ratio", found, p), ("larger", share, sign_p)):
        single = Interval(*(np.asarray(value).reshape(1) for value in interval))
        rows += [{**row, "p": p_value} for row in interval_rows(model, measure, single, {"claim": [claim]})]
    return rows
