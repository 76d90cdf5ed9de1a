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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.intervals import corrected, mean_interval, verdict
from sinklens.analyses.medians import median_interval
from sinklens.analyses.power import smallest_mean
from sinklens.evaluation.statistics import Accuracy

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

KINDS = {
    "mean": "mean of the difference (heavy-tailed: its interval is too short)",
    "median": "median of the difference",
    "above": "share of prompts in which the first is larger",
    "ratio": "geometric mean of first ÷ second",
}


class Estimate(NamedTuple):
    """A number with its 95 % interval; NaN where it has none.

    Attributes:
        estimate, low, high: the number and its limits.
        prompts: number of prompts that it is from.
        p: two-sided p value of a ratio of 1; NaN for the numbers that do not decide.
        spread: standard deviation of the logarithms of a ratio.
    """

    estimate: float
    low: float
    high: float
    prompts: int
    p: float = np.nan
    spread: float = np.nan


def compared(
    first: Float[np.ndarray, " prompt"], second: Float[np.ndarray, " prompt"], seed: int = 0
) -> dict[str, Estimate]:
    """The numbers of `KINDS` for two quantities of the same prompts; prompts with a NaN are left out."""
    known = ~np.isnan(first - second)
    x, y = np.asarray(first, dtype=np.float64)[known], np.asarray(second, dtype=np.float64)[known]
    mean = mean_interval(x - y, None, seed)
    of_mean = Estimate(float(mean.estimate), float(mean.low), float(mean.high), len(x))
    found = {"mean": of_mean, "median": median(x - y)}
    differ = int((x != y).sum())
    above = Accuracy(int((x > y).sum()), differ)
    low, high = above.interval
    found["above"] = Estimate(above.share, low, high, differ)
    both = (x > 0) & (y > 0)
    return found | {"ratio": geometric(np.log(x[both] / y[both]))}


def median(values: Float[np.ndarray, " prompt"]) -> Estimate:
    """`medians.median_interval` of values without NaN."""
    return Estimate(*median_interval(values), len(values))


def geometric(logs: Float[np.ndarray, " prompt"]) -> Estimate:
    """exp of the mean of `logs`, with its t interval and the t test of a mean of 0."""
    from scipy.stats import t

    number = len(logs)
    if number < 2:
        return Estimate(float(np.exp(logs.mean())) if number else np.nan, np.nan, np.nan, number)
    mean, spread = float(logs.mean()), float(logs.std(ddof=1))
    half = float(t.isf(0.025, number - 1)) * spread / np.sqrt(number)
    distance = np.inf if spread == 0 else abs(mean) / (spread / np.sqrt(number))
    p = 1.0 if mean == 0 else float(2 * t.sf(distance, number - 1))
    estimate, low, high = (float(np.exp(value)) for value in (mean, mean - half, mean + half))
    return Estimate(estimate, low, high, number, p, spread)


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
            labels = {str(axis): one[axis].to_numpy()[at] for axis, at in zip(axes, place, strict=True)}
            found = compared(one.to_numpy()[:, *place], other.to_numpy()[:, *place], seed)
            rows += [{"model": model, **labels, "number": kind, **value._asdict()} for kind, value in found.items()]
    table = DataFrame(rows)
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
