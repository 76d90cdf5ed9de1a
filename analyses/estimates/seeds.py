"""Training runs that differ in their seed only: one estimate over seeds and prompts, and one rule for a verdict.

Models trained with one recipe differ by chance, often by far more than an interval over prompts suggests. Here the
seeds are a sample, too: each model is one seed. With g the scale of the measure (scales.py: logit for shares, log for
ratios), m_s the mean of seed s over prompts, k seeds and θ the mean of g(m_s), the interval is

    g⁻¹(θ ± t₍k₋₁, 0.975₎ √(s² / k + v)),

s² the variance of g(m_s) over the seeds, and v that of θ over resamples of the prompts, which all seeds answered.
Prompts that share a template, document or author are resampled by it.

The rule: a recipe is judged only if this interval excludes the threshold; otherwise the verdict is "cannot tell". If
the mean over all possible seeds equals the threshold, the interval excludes it in at most 5 % of all cases, however
much seeds vary compared with prompts (docs/concepts/error-rates.md has the simulation). Asking only that all seeds lie
on one side has no such error rate: three seeds do so by chance in 25 % of all cases, and three intervals in up to 20 %.

    sinklens analyse necessity runs/seed-1 runs/seed-2 runs/seed-3 --seeds

Caveat: three seeds are few, so the interval is wide (t = 4.3). It still assumes that seeds vary symmetrically on the
scale g.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.analyses.estimates.scales import DIFFERENCE, LINEAR, SHARE, Scale
from sinklens.analyses.estimates.tables import RANGES, known_mean
from sinklens.utils.estimates import Estimate, resampling_weights


def over_seeds(
    by_seed: Sequence[float],
    shared: float = 0.0,
    scale: Scale = LINEAR,
    resolution: float = 0.0,
    threshold: float = 0.0,
) -> Estimate:
    """The module's estimate and interval, from the means of the seeds; NaN if a seed has no value.

    Args:
        shared: v, the variance on the scale that all seeds share because they answered the same prompts.
        resolution: as in `Scale.to`.
        threshold: the mean of all seeds that ``p`` tests, which the interval inverts; NaN without a spread.
    """
    from scipy.stats import t

    number, on_scale = len(by_seed), scale.to(by_seed, resolution)
    centre = float(on_scale.mean())
    value = float(scale.back(centre)) if np.isfinite(centre) else np.nan
    if number < 2 or np.isnan(value):
        return Estimate(value, np.nan, np.nan, number, np.nan)
    error = float(np.sqrt(on_scale.var(ddof=1) / number + shared))
    half = float(t.ppf(0.975, number - 1)) * error
    away = abs(centre - float(scale.to(threshold)))
    p = float(2 * t.sf(away / error, number - 1)) if np.isfinite(away) and error > 0 else np.nan
    return Estimate(value, float(scale.back(centre - half)), float(scale.back(centre + half)), number, p)


def hierarchical(
    values: Sequence[Float[np.ndarray, " prompt"]], seed: int = 0, scale: Scale = LINEAR, group: Sequence[str] = ()
) -> Estimate:
    """Mean over seeds and prompts with the module's interval, of seeds that answered the same prompts.

    Args:
        values: one array for each seed, in the same order of prompts; NaN prompts are left out.
        scale: that of the measure.
        group: what each prompt shares with others, at least two groups; v is then of resamples of groups.
    """
    arrays = np.stack([np.asarray(part, dtype=np.float64) for part in values])
    resolution = 1 / arrays.shape[1]
    # v of the module: resamples of k groups vary (k − 1) / k times as much as further groups do, which is made up for.
    units = np.unique(list(group), return_inverse=True)[1] if len(group) else np.arange(arrays.shape[1])
    number = int(units.max()) + 1
    drawn = resampling_weights(number, seed)[:, units]
    known = ~np.isnan(arrays)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (drawn @ np.where(known, arrays, 0).T) / (drawn @ known.T)
    centres = scale.to(means, resolution).mean(axis=1)
    centres = centres[np.isfinite(centres)]
    factor = number / (number - 1) if len(group) else 1.0
    shared = float(centres.var()) * factor if len(centres) else np.nan
    return over_seeds([known_mean(part) for part in arrays], shared, scale, resolution)


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
        and ``by_seed``, their estimates in order of the models.
    """
    rows: list[dict[str, Any]] = []
    groups = _groups(next(iter(measured.values()))) if measured else []
    for name in variables:
        scale = scale_of(name, scales or {}, difference)
        given = [data[name].transpose("prompt", ...) for data in measured.values()]
        parts = xr.align(*given, join="outer", exclude={"prompt"})
        axes = parts[0].dims[1:]
        for place in np.ndindex(parts[0].shape[1:]):
            at = dict(zip(axes, place, strict=True))
            values = [part.isel(at).to_numpy() for part in parts]
            found = hierarchical(values, seed=seed, scale=scale, group=groups)
            labels = {
                str(axis): parts[0][axis].to_numpy()[index] if axis in parts[0].coords else index
                for axis, index in at.items()
            }
            by_seed = [known_mean(one) for one in values]
            rows.append({
                "measure": name, **labels, "estimate": found.value, "low": found.low, "high": found.high,
                "seeds": len(parts), "scale": scale.name, "p": found.p if difference else np.nan,
                "by_seed": " ".join(f"{value:.3g}" for value in by_seed),
            })  # fmt: skip
    return DataFrame(rows)


def _groups(data: xr.Dataset) -> list[str]:
    """The group of each prompt; empty without several groups."""
    found = data["prompt_group"].to_numpy().tolist() if "prompt_group" in data.coords else []
    return found if len(set(found)) > 1 else []
