"""Estimates with intervals over prompts, and the tables that hold them.

Intervals are 95 % percentile bootstrap intervals over prompts, because prompts were sampled, not steps or heads. There
are two kinds of estimate: the *mean* over prompts of a per-prompt value (`bootstrap`), and a *pooled* estimate, a
function of sums over prompts, such as all sinks on newlines divided by all sinks (`pooled`).

Limitation: prompts from one template resemble each other, so an interval over them says little about other text.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Shaped

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

RESAMPLES = 2000


class Interval(NamedTuple):
    """An estimate with its 95 % interval, [*rest] each.

    Attributes:
        estimate: NaN where no prompt has a value.
        low, high: NaN where fewer than two prompts have a value: one prompt has no interval.
        prompts: number of prompts with a value.
    """

    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray
    prompts: np.ndarray


def bootstrap(values: Shaped[np.ndarray, "prompt *rest"], seed: int = 0) -> Interval:
    """Mean over prompts with its 95 % percentile bootstrap interval; NaN prompts are left out, entry by entry."""
    values = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(values)
    found = pooled(np.divide, [np.where(known, values, 0.0), known.astype(np.float64)], seed)
    count = known.sum(axis=0)
    low, high = (np.where(count > 1, bound, np.nan) for bound in (found.low, found.high))
    return Interval(found.estimate, low, high, count)


def pooled(
    statistic: Callable[..., np.ndarray], parts: Sequence[Shaped[np.ndarray, "prompt *rest"]], seed: int = 0
) -> Interval:
    """A statistic of sums over prompts with its 95 % percentile bootstrap interval.

    Args:
        statistic: takes one sum per part, [..., *rest], and returns [..., *out].
        parts: what each prompt contributes to each sum, without NaN.
    """
    sizes = [np.asarray(part, dtype=np.float64) for part in parts]
    number = len(sizes[0])
    drawn = np.random.default_rng(seed).multinomial(number, [1 / number] * number, size=RESAMPLES).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an entry without a value in any resample is NaN, as intended
        estimate = np.asarray(statistic(*(size.sum(axis=0) for size in sizes)))
        if number < 2:
            return Interval(estimate, estimate * np.nan, estimate * np.nan, np.full(estimate.shape, number))
        resampled = statistic(*(np.tensordot(drawn, size, axes=1) for size in sizes))
        low, high = np.nanpercentile(resampled, [2.5, 97.5], axis=0)
    return Interval(estimate, low, high, np.full(estimate.shape, number))


def interval_rows(
    model: str, measure: str, found: Interval, axes: Mapping[str, Sequence[Any] | np.ndarray]
) -> list[dict[str, Any]]:
    """One table row per entry: model, measure, the entry's labels, estimate, low, high, prompts.

    Args:
        axes: name of each axis of `found` -> its labels.
    """
    rows = []
    for place in np.ndindex(found.estimate.shape):
        labels = {name: values[at] for (name, values), at in zip(axes.items(), place, strict=True)}
        numbers = {
            name: float(np.asarray(value)[place]) for name, value in found._asdict().items() if name != "prompts"
        }
        rows.append({"model": model, "measure": measure, **labels, **numbers, "prompts": int(found.prompts[place])})
    return rows


def interval_table(measured: Mapping[str, xr.Dataset], variables: Sequence[str], seed: int = 0) -> "DataFrame":
    """Means over prompts: one row per model, variable and entry along the variable's axes other than ``prompt``."""
    from pandas import DataFrame

    rows = []
    for model, data in measured.items():
        for name in variables:
            values = data[name].transpose("prompt", ...)
            rows += interval_rows(model, name, bootstrap(values.to_numpy(), seed), _labels(values))
    return DataFrame(rows)


def difference_table(measured: Mapping[str, xr.Dataset], variables: Sequence[str], seed: int = 0) -> "DataFrame":
    """Difference of each further model from the first, prompt by prompt: rows as in `interval_table`.

    Prompts are paired, so the interval is narrower than the two models' intervals suggest. Empty for one model.
    """
    from pandas import DataFrame

    (first, start), *others = measured.items()
    rows = []
    for model, data in others:
        for name in variables:
            values = data[name].transpose("prompt", ...) - start[name].transpose("prompt", ...)
            rows += interval_rows(f"{model} − {first}", name, bootstrap(values.to_numpy(), seed), _labels(values))
    return DataFrame(rows, columns=None if rows else ["model", "measure", "estimate", "low", "high", "prompts"])


def verdict(estimate: float, low: float, high: float, threshold: float, above: str, below: str) -> str:
    """`above` or `below` if the entire interval lies on that side of `threshold`, else "undecided".

    "not measured" without an estimate; "undecided" without an interval.
    """
    if np.isnan(estimate):
        return "not measured"
    if low > threshold:
        return above
    return below if high <= threshold else "undecided"


def _labels(values: xr.DataArray) -> dict[str, np.ndarray]:
    return {
        str(axis): values[axis].to_numpy() if axis in values.coords else np.arange(values.sizes[axis])
        for axis in values.dims
        if axis != "prompt"
    }
