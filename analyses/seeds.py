"""Training runs that differ in their seed only: one estimate over seeds and prompts.

Models trained with one recipe differ by chance, often by far more than an interval over prompts suggests. Here the
seeds are a sample, too: each model is one seed, and the interval is over seeds and prompts (`hierarchical`). A verdict
other than "cannot tell" requires that the interval excludes the threshold and that every seed's estimate is on the same
side of it.

    sinklens analyse necessity runs/seed-1 runs/seed-2 runs/seed-3 --seeds

Caveat: three seeds are few. The interval is widened accordingly, but it still assumes that further seeds would vary
like these.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.intervals import RESAMPLES, resampling_weights
from sinklens.analyses.results import Findings
from sinklens.analyses.study import Study
from sinklens.errors import SettingError
from sinklens.evaluation.statistics import Z
from sinklens.utils.atomic import atomic_write

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

ENTRIES = 100  # maps of layers and heads or of steps are not summarized


class Seeds(NamedTuple):
    """A mean over training seeds and prompts, with its interval and the mean of each seed.

    Attributes:
        estimate: mean over seeds of each seed's mean over prompts; NaN if a seed has no value.
        low, high: 95 % interval over seeds and prompts; NaN with fewer than two seeds.
        by_seed: each seed's mean over prompts.
    """

    estimate: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    def agree(self, threshold: float = 0.0) -> bool:
        """Whether every seed's estimate is on the same side of `threshold`; False if one is equal to it or NaN."""
        signs = {float(np.sign(value - threshold)) for value in self.by_seed}
        return signs in ({1.0}, {-1.0})

    def verdict(self, above: str, below: str, threshold: float = 0.0) -> str:
        """`above` or `below` if the interval excludes `threshold` and all seeds agree, else "cannot tell"."""
        if not self.agree(threshold) or not (self.low > threshold or self.high < threshold):
            return "cannot tell"
        return above if self.low > threshold else below


def hierarchical(values: Sequence[Float[np.ndarray, " _"]], paired: bool = True, seed: int = 0) -> Seeds:
    """Mean over seeds and prompts with its 95 % hierarchical bootstrap interval.

    A resample draws seeds and prompts, both with replacement. With m_s the mean of seed s and θ their mean, k seeds,
    s' the drawn seeds, and m'_s the mean of seed s over the drawn prompts, its value is

        θ* = θ + c (mean m_{s'} − θ) + (mean m'_s − θ),    c = √(k / (k − 1)) t₍k₋₁, 0.975₎ / 1.96

    and the limits are the 2.5 and 97.5 percentiles of θ*. Without c the interval of three seeds would be little wider
    than from the smallest to the largest of them, which encloses the mean of all seeds in 75 % of all cases; c is the
    widening that a t interval of k values needs (Hesterberg, The American Statistician 69, 2015).

    Args:
        values: one array for each seed; NaN prompts are left out.
        paired: whether all seeds answered the same prompts, in the same order: a resample then draws the same prompts
            for all seeds. False: each seed has its own prompts, and their numbers may differ.

    Raises:
        SettingError: there is no seed, or paired seeds have different numbers of prompts.
    """
    arrays = [np.asarray(part, dtype=np.float64) for part in values]
    if not arrays:
        raise SettingError("an estimate over seeds needs at least one seed; got none.")
    sizes = sorted({len(part) for part in arrays})
    if paired and len(sizes) > 1:
        raise SettingError(
            f"paired seeds must have answered the same prompts; got {' and '.join(map(str, sizes))} prompts. Give the "
            f"same prompts, or paired=False for prompts that differ between seeds."
        )
    by_seed = tuple(float(np.mean(part[~np.isnan(part)])) if (~np.isnan(part)).any() else np.nan for part in arrays)
    estimate, number = float(np.mean(by_seed)), len(arrays)
    if number < 2 or np.isnan(estimate):
        return Seeds(estimate, np.nan, np.nan, by_seed)
    resampled = _resampled(np.array(by_seed), arrays, paired, np.random.default_rng(seed))
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Seeds(estimate, float(low), float(high), by_seed)


def seeds_table(measured: Mapping[str, xr.Dataset], variables: Sequence[str], seed: int = 0) -> "DataFrame":
    """`hierarchical` of every variable and entry, all models being seeds that answered the same prompts.

    Entries are those of any model, by label; an entry that a model lacks is NaN.

    Returns:
        One row per variable and entry along its axes other than ``prompt``: ``measure``, the entry's labels,
        ``estimate``, ``low``, ``high``, ``seeds`` (their number), ``agree`` ("yes" if all are on the same side of 0,
        else "no"; empty if all are 0 or one is NaN) and ``by_seed``, their estimates in order of the models.

    Raises:
        SettingError: as in `hierarchical`.
    """
    from pandas import DataFrame

    rows: list[dict[str, Any]] = []
    for name in variables:
        given = [data[name].transpose("prompt", ...) for data in measured.values()]
        parts = xr.align(*given, join="outer", exclude={"prompt"})
        axes = parts[0].dims[1:]
        for place in np.ndindex(parts[0].shape[1:]):
            at = dict(zip(axes, place, strict=True))
            found = hierarchical([part.isel(at).to_numpy() for part in parts], seed=seed)
            labels = {
                str(axis): parts[0][axis].to_numpy()[index] if axis in parts[0].coords else index
                for axis, index in at.items()
            }
            numbers = {"estimate": found.estimate, "low": found.low, "high": found.high, "seeds": len(parts)}
            listed = " ".join(f"{value:.3g}" for value in found.by_seed)
            empty = np.isnan(found.by_seed).any() or not any(found.by_seed)
            agree = "" if empty else "yes" if found.agree() else "no"
            rows.append({"measure": name, **labels, **numbers, "agree": agree, "by_seed": listed})
    return DataFrame(rows)


def write_seeds(study: Study, findings: Findings, out: Path, seed: int = 0) -> tuple["DataFrame", Path]:
    """Write ``STUDY-seeds.csv``: `seeds_table` of a study's contrasts and of every measurement with at most `ENTRIES`
    entries; the column ``compared`` is "difference" for the former and "measurement" for the latter.
    """
    from pandas import concat

    parts = {
        "difference": {name: study.contrasts(data) for name, data in findings.measured.items()},
        "measurement": findings.measured,
    }
    tables = [
        seeds_table(measured, _summarized(measured), seed).assign(compared=compared)
        for compared, measured in parts.items()
    ]
    table, file = concat(tables, ignore_index=True).astype({"seeds": int}), out / f"{study.name}-seeds.csv"
    with atomic_write(file) as part:
        table.to_csv(part, index=False)
    return table, file


def _summarized(measured: Mapping[str, xr.Dataset]) -> list[str]:
    """The variables with the axis ``prompt`` and few other entries in every model."""
    first = next(iter(measured.values()))
    return [
        str(name)
        for name, values in first.data_vars.items()
        if "prompt" in values.dims and all(data[name][{"prompt": 0}].size <= ENTRIES for data in measured.values())
    ]


def _resampled(
    means: Float[np.ndarray, " seed"],
    arrays: Sequence[Float[np.ndarray, " _"]],
    paired: bool,
    rng: np.random.Generator,
) -> Float[np.ndarray, " resample"]:
    """θ* of every resample; see `hierarchical`."""
    from scipy.stats import t

    number, shared = len(means), resampling_weights(len(arrays[0]), rng) if paired else None
    widening = np.sqrt(number / (number - 1)) * t.ppf(0.975, number - 1) / Z
    drawn = means[rng.integers(number, size=(RESAMPLES, number))].mean(axis=1)
    over_prompts = np.zeros(RESAMPLES)
    for values in arrays:
        weights, known = resampling_weights(len(values), rng) if shared is None else shared, ~np.isnan(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            over_prompts += weights[:, known] @ values[known] / weights[:, known].sum(axis=1) / number
    return over_prompts + widening * (drawn - means.mean())
