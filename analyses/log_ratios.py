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
from sinklens.analyses.ratios import geometric
from sinklens.evaluation.statistics import mcnemar


def log_ratio(first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]) -> tuple[Interval, float]:
    """Geometric mean over prompts of first / second, with its t interval on the log scale, and the p value of 1.

    Prompts where either is not above 0 or missing are left out.
    """
    usable = (first > 0) & (second > 0)
    found = geometric(np.log(first[usable] / second[usable]))
    numbers = (np.array(value) for value in (found.estimate, found.low, found.high, found.prompts))
    return Interval(*numbers), found.p


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
