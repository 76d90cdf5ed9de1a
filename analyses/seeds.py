"""Training runs that differ in their seed only: one estimate over seeds and prompts, and one rule for a verdict.

Models trained with one recipe differ by chance, often by far more than an interval over prompts suggests. Here the
seeds are a sample, too: each model is one seed. With g the scale of the measure (scales.py: logit for shares, log for
ratios), m_s the mean of seed s over prompts, k seeds and θ the mean of g(m_s), the interval is

    g⁻¹(θ ± t₍k₋₁, 0.975₎ √(s² / k + v)),

s² the variance of g(m_s) over the seeds, and v that of θ over resamples of the prompts, if all seeds answered the same
(0 if each seed has its own: s² then contains their chance). Prompts that share a template, document or author are
resampled by it.

The rule: a verdict other than "cannot tell" requires that this interval excludes the threshold. If the mean of all
possible seeds is the threshold, that happens in at most 5 % of all cases, however much seeds vary beside prompts
(docs/concepts/error-rates.md has the simulation). That all seeds are on one side has no such error rate: of three
seeds, it happens in 25 % by chance, and with an interval for each seed in up to 20 %.

    sinklens analyse necessity runs/seed-1 runs/seed-2 runs/seed-3 --seeds

Caveat: three seeds are few, so the interval is wide (t = 4.3). It still assumes that seeds vary symmetrically on the
scale g.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.intervals import RANGES, corrected, resampling_weights, verdict
from sinklens.analyses.results import Findings
from sinklens.analyses.scales import DIFFERENCE, LINEAR, SHARE, Scale
from sinklens.analyses.study import Study
from sinklens.errors import SettingError
from sinklens.utils.atomic import atomic_write

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

ENTRIES = 100  # maps of layers and heads or of steps are not summarized


class Seeds(NamedTuple):
    """A mean over training seeds and prompts, with its interval and the mean of each seed.

    Attributes:
        estimate: g⁻¹ of the mean of g over the seeds; NaN if a seed has no value.
        low, high: 95 % interval over seeds and prompts; NaN with fewer than two seeds.
        by_seed: each seed's mean over prompts.
        error: standard error on the scale.
        scale: g.
    """

    estimate: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    error: float = np.nan
    scale: Scale = LINEAR

    def agree(self, threshold: float = 0.0) -> bool:
        """Whether every seed's estimate is on the same side of `threshold`; False if one is equal to it or NaN.

        A description, not a verdict: three seeds agree in 25 % of all cases by chance.
        """
        signs = {float(np.sign(value - threshold)) for value in self.by_seed}
        return signs in ({1.0}, {-1.0})

    def verdict(self, above: str, below: str, threshold: float = 0.0) -> str:
        """`above` or `below` if the interval excludes `threshold`, else "cannot tell"; wrong in at most 5 % of all
        cases in which the mean of all seeds is `threshold`.
        """
        if self.low > threshold:
            return above
        return below if self.high < threshold else "cannot tell"

    def p_value(self, threshold: float = 0.0) -> float:
        """Two-sided p value of the hypothesis that the mean of all seeds is `threshold`, which the interval inverts."""
        from scipy.stats import t

        away = abs(float(self.scale.to(self.estimate)) - float(self.scale.to(threshold)))
        if not np.isfinite(away) or not self.error > 0:
            return float("nan")
        return float(2 * t.sf(away / self.error, len(self.by_seed) - 1))


def over_seeds(by_seed: Sequence[float], shared: float = 0.0, scale: Scale = LINEAR, resolution: float = 0.0) -> Seeds:
    """The module's estimate and interval, from the means of the seeds.

    Args:
        shared: v, the variance on the scale that all seeds share because they answered the same prompts.
        resolution: as in `Scale.to`.
    """
    from scipy.stats import t

    means, number = tuple(float(value) for value in by_seed), len(by_seed)
    on_scale = scale.to(means, resolution)
    centre = float(on_scale.mean())
    estimate = float(scale.back(centre))
    if number < 2 or not np.isfinite(centre):
        return Seeds(estimate if np.isfinite(centre) else np.nan, np.nan, np.nan, means, np.nan, scale)
    error = float(np.sqrt(on_scale.var(ddof=1) / number + shared))
    half = float(t.ppf(0.975, number - 1)) * error
    return Seeds(estimate, float(scale.back(centre - half)), float(scale.back(centre + half)), means, error, scale)


def hierarchical(
    values: Sequence[Float[np.ndarray, " _"]],
    paired: bool = True,
    seed: int = 0,
    scale: Scale = LINEAR,
    group: Sequence[str] = (),
) -> Seeds:
    """Mean over seeds and prompts with the module's interval.

    Args:
        values: one array for each seed; NaN prompts are left out.
        paired: whether all seeds answered the same prompts, in the same order. False: each seed has its own prompts,
            and their numbers may differ.
        scale: that of the measure.
        group: what each prompt of paired seeds shares with others; v is then of resamples of groups.

    Raises:
        SettingError: there is no seed, paired seeds have different numbers of prompts, or there is one group only.
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
    by_seed = [float(np.mean(part[~np.isnan(part)])) if (~np.isnan(part)).any() else np.nan for part in arrays]
    resolution = 1 / max(len(part) for part in arrays)
    shared = _shared_variance(np.stack(arrays), scale, resolution, seed, group) if paired else 0.0
    return over_seeds(by_seed, shared, scale, resolution)


def _shared_variance(
    values: Float[np.ndarray, "seed prompt"], scale: Scale, resolution: float, seed: int, group: Sequence[str] = ()
) -> float:
    """v of the module: of the mean over seeds on the scale, over resamples of the prompts, or of their groups.

    Resamples of k groups vary (k − 1) / k times as much as further groups do, which is made up for.
    """
    units = np.unique(list(group), return_inverse=True)[1] if len(group) else np.arange(values.shape[1])
    number = int(units.max()) + 1
    if len(group) and number < 2:
        raise SettingError(f"all prompts are of one group ({group[0]}), whose chance cannot be estimated; omit group.")
    drawn = resampling_weights(number, np.random.default_rng(seed))[:, units]
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (drawn @ np.where(known, values, 0).T) / (drawn @ known.T)
    centres = scale.to(means, resolution).mean(axis=1)
    centres = centres[np.isfinite(centres)]
    factor = number / (number - 1) if len(group) else 1.0
    return float(centres.var()) * factor if len(centres) else np.nan


def scale_of(name: str, declared: Mapping[str, Scale], difference: bool = False) -> Scale:
    """The scale of a measure: as declared by its study, `SHARE` for outcomes and names that end in "share",
    `DIFFERENCE` for differences of these, else `LINEAR`.
    """
    known = {(0, 1): SHARE, (-1, 1): DIFFERENCE}.get(RANGES.get(name, (0, 0)))
    found = declared.get(name) or known or (SHARE if name.endswith("share") else LINEAR)
    if not difference:
        return found
    return DIFFERENCE if found in (SHARE, DIFFERENCE) else LINEAR


def seeds_table(
    measured: Mapping[str, xr.Dataset],
    variables: Sequence[str],
    seed: int = 0,
    scales: Mapping[str, Scale] | None = None,
    difference: bool = False,
) -> "DataFrame":
    """`hierarchical` of every variable and entry, all models being seeds that answered the same prompts.

    Entries are those of any model, by label; an entry that a model lacks is NaN. If there are several groups of
    prompts (``prompt_group``), what the seeds share is resampled by group.

    Args:
        scales: what the study declares (`scale_of`).
        difference: whether the variables are differences, whose hypothesis is 0: adds their p values.

    Returns:
        One row per variable and entry along its axes other than ``prompt``: ``measure``, the entry's labels,
        ``estimate``, ``low``, ``high``, ``seeds`` (their number), ``scale``, ``p`` (NaN for a measurement),
        ``agree`` ("yes" if all are on the same side of 0, else "no"; empty if all are 0 or one is NaN) and ``by_seed``,
        their estimates in order of the models.

    Raises:
        SettingError: as in `hierarchical`.
    """
    from pandas import DataFrame

    rows: list[dict[str, Any]] = []
    groups = _groups(next(iter(measured.values()))) if measured else []
    for name in variables:
        scale = scale_of(name, scales or {}, difference)
        given = [data[name].transpose("prompt", ...) for data in measured.values()]
        parts = xr.align(*given, join="outer", exclude={"prompt"})
        axes = parts[0].dims[1:]
        for place in np.ndindex(parts[0].shape[1:]):
            at = dict(zip(axes, place, strict=True))
            found = hierarchical([part.isel(at).to_numpy() for part in parts], seed=seed, scale=scale, group=groups)
            labels = {
                str(axis): parts[0][axis].to_numpy()[index] if axis in parts[0].coords else index
                for axis, index in at.items()
            }
            numbers = {"estimate": found.estimate, "low": found.low, "high": found.high, "seeds": len(parts)}
            listed = " ".join(f"{value:.3g}" for value in found.by_seed)
            empty = np.isnan(found.by_seed).any() or not any(found.by_seed)
            agree = "" if empty else "yes" if found.agree() else "no"
            tested = {"scale": scale.name, "p": found.p_value() if difference else np.nan}
            rows.append({"measure": name, **labels, **numbers, **tested, "agree": agree, "by_seed": listed})
    return DataFrame(rows)


def _groups(data: xr.Dataset) -> list[str]:
    """The group of each prompt; empty without several groups."""
    found = data["prompt_group"].to_numpy().tolist() if "prompt_group" in data.coords else []
    return found if len(set(found)) > 1 else []


def write_seeds(study: Study, findings: Findings, out: Path, seed: int = 0) -> tuple["DataFrame", Path]:
    """Write ``STUDY-seeds.csv``: `seeds_table` of a study's contrasts and of every measurement with at most `ENTRIES`
    entries; the column ``compared`` is "difference" for the former and "measurement" for the latter. Differences have
    p values, corrected by Holm's method over all of them, and a verdict.
    """
    from pandas import concat

    parts = {
        "difference": {name: _of_prompts(study.contrasts(data), data) for name, data in findings.measured.items()},
        "measurement": findings.measured,
    }
    tables = [
        seeds_table(measured, _summarized(measured), seed, study.scales, compared == "difference").assign(
            compared=compared
        )
        for compared, measured in parts.items()
    ]
    table = concat(tables, ignore_index=True).astype({"seeds": int})
    if not table.empty:
        table = corrected(table.assign(model="")).drop(columns="model")
        table["verdict"] = [
            verdict(row.estimate, row.low, row.high, 0.0, "above 0", "below 0", row.p_holm) if row.p == row.p else ""
            for row in table.itertuples()
        ]
    file = out / f"{study.name}-seeds.csv"
    with atomic_write(file) as part:
        table.to_csv(part, index=False)
    return table, file


def _of_prompts(contrasts: xr.Dataset, data: xr.Dataset) -> xr.Dataset:
    """The contrasts with the groups of the prompts, which a contrast built from bare arrays lacks."""
    if "prompt_group" not in data.coords or "prompt" not in contrasts.dims:
        return contrasts
    return contrasts.assign_coords(prompt_group=data["prompt_group"])


def _summarized(measured: Mapping[str, xr.Dataset]) -> list[str]:
    """The variables with the axis ``prompt`` and few other entries in every model."""
    first = next(iter(measured.values()))
    return [
        str(name)
        for name, values in first.data_vars.items()
        if "prompt" in values.dims and all(data[name][{"prompt": 0}].size <= ENTRIES for data in measured.values())
    ]
