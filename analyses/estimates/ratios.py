"""Comparisons of two heavy-tailed positive quantities, such as KL divergences, beyond their means.

A few prompts hold most of a mean of such values, so its interval at n = 20 is far too short. Four numbers stand side by
side for each comparison of x and y, paired by prompt:

- ``mean``: mean of x − y, with its bootstrap interval, which is too short here;
- ``median``: median of x − y, with the exact interval of order statistics;
- ``above``: share of prompts with x > y among those where they differ, with Wilson's interval;
- ``ratio``: geometric mean of x / y, with the t interval of the logarithms. It decides: it has the p value.

A prompt with x = 0 or y = 0 has no ratio and counts only in the others.

Limitation: a ratio says nothing about the size of a quantity. Twice almost nothing is almost nothing: read the mean
with it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.estimates.medians import median
from sinklens.analyses.estimates.power import smallest_mean
from sinklens.analyses.estimates.tables import corrected, interval_rows, verdict
from sinklens.utils.estimates import Estimate, bootstrap, mcnemar, outcomes, proportion, student

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

KINDS = {
    "mean": "mean of the difference (heavy-tailed: its interval is too short)",
    "median": "median of the difference",
    "above": "share of prompts in which the first is larger",
    "ratio": "geometric mean of first ÷ second",
}


def logs_of(first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]) -> Float[np.ndarray, " usable"]:
    """log first / second of the prompts where both are above 0."""
    both = (first > 0) & (second > 0)
    return np.log(first[both] / second[both])


def compared(
    first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"], seed: int = 0
) -> dict[str, Estimate]:
    """The numbers of `KINDS` for two quantities of the same prompts; prompts with a NaN are left out."""
    known = ~np.isnan(first - second)
    x, y = np.asarray(first, dtype=np.float64)[known], np.asarray(second, dtype=np.float64)[known]
    return {
        "mean": bootstrap(x - y, seed), "median": median(x - y),
        "above": proportion(int((x > y).sum()), int((x != y).sum())), "ratio": geometric(logs_of(x, y)),
    }  # fmt: skip


def geometric(logs: Float[np.ndarray, " prompt"]) -> Estimate:
    """exp of the mean of `logs`, with its t interval and the t test of a mean of 0."""
    number = len(logs)
    mean = float(logs.mean()) if number else np.nan
    error = float(logs.std(ddof=1)) / np.sqrt(number) if number > 1 else np.nan
    found = student(mean, error, number - 1, number)
    value, low, high = (float(np.exp(end)) for end in (found.value, found.low, found.high))
    return Estimate(value, low, high, number, found.p)


def ratio_rows(
    model: str, claim: str, first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"]
) -> list[dict[str, Any]]:
    """Two rows on a claim: ``ratio``, the geometric mean of first / second, and ``larger``, the share of prompts in
    which the first is larger, among those that differ, with the p value of the sign test.
    """
    signs = np.sign(first - second)
    signs = signs[~np.isnan(signs) & (signs != 0)]
    sign_p = mcnemar(int((signs < 0).sum()), int((signs > 0).sum())) if len(signs) > 1 else np.nan
    found = geometric(logs_of(first, second))
    larger = outcomes((signs > 0).astype(float), 0, 1)
    return [
        {**row, "p": p}
        for measure, one, p in (("ratio", found, found.p), ("larger", larger, sign_p))
        for row in interval_rows(model, measure, one, {"claim": [claim]})
    ]


def ratio_table(
    first: Mapping[str, xr.DataArray], second: Mapping[str, xr.DataArray], seed: int = 0, level: float = 0.05
) -> "DataFrame":
    """One row per model, entry and kind of `KINDS`; the ratios of a model are one family of claims.

    ``shown`` is the smallest ratio above 1 that these prompts could have shown (power.py), and ``verdict`` says whether
    the ratio is above 1 ("holds") or below ("no").

    Args:
        first, second: model -> the compared quantities, [prompt, …] with the same axes.
    """
    from pandas import DataFrame

    rows: list[dict[str, Any]] = []
    for model, values in first.items():
        one, other = xr.align(values.transpose("prompt", ...), second[model].transpose(*values.dims), join="exact",
                              exclude={"prompt"})  # fmt: skip
        other = other.transpose(*one.dims)
        axes = one.dims[1:]
        for place in np.ndindex(one.shape[1:]):
            labels = {str(axis): [one[axis].to_numpy()[at]] for axis, at in zip(axes, place, strict=True)}
            pair = one.to_numpy()[:, *place], other.to_numpy()[:, *place]
            logs = logs_of(*pair)
            for number, found in compared(*pair, seed).items():
                (row,) = interval_rows(model, number, found, labels)
                decides = number == "ratio" and len(logs) > 1
                spread = float(logs.std(ddof=1)) if decides else np.nan
                rows.append({**row, "p": found.p if decides else np.nan, "spread": spread})
    table = DataFrame(rows).rename(columns={"measure": "number"})
    tests = table.groupby("model")["p"].transform("count")
    shown = [
        float(np.exp(smallest_mean(row.prompts, row.spread, level / count))) if not np.isnan(row.p) else np.nan
        for row, count in zip(table.itertuples(), tests, strict=True)
    ]
    table = corrected(table).assign(shown=shown)
    table["verdict"] = [
        verdict(row.estimate, row.low, row.high, 1.0, "holds", "no", row.p_holm) if row.number == "ratio" else ""
        for row in table.itertuples()
    ]
    return table.assign(meaning=table["number"].map(KINDS))
