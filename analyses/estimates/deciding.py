"""What the measurements of a plan decide: the estimate, its tests, and what so many units could have shown.

The units are groups of prompts, if the prompts have groups; else prompts:

- prompts, of outcomes: Tango's limits, McNemar's exact test, and two one-sided score tests for equivalence;
- groups: the t limits and t tests of their means.

Units that agree exactly have no spread; their spread is taken as if one prompt had been answered differently.

Limitation: t tests of few groups assume that their means are normally distributed. docs/concepts/error-rates.md has
the simulated error rates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.estimates.plan import Plan
from sinklens.analyses.estimates.power import (
    LEVEL,
    TINY,
    equivalence_power,
    equivalent_p,
    paired_power,
    smallest_paired,
    smallest_t,
    t_power,
)
from sinklens.utils.estimates import Estimate, mcnemar, outcomes, student

Values = Float[np.ndarray, " prompt"]


@dataclass(frozen=True)
class Decision:
    """The result of a plan, before it is corrected for other tests.

    Attributes:
        found: difference of the measure over prompts or groups, with the p value of no difference.
        p_equivalent: p value of a difference as large as the smallest of interest.
        shown: the smallest difference that so many units show with a probability of 80 %.
    """

    found: Estimate
    p_equivalent: float
    shown: float


def decided(plan: Plan, data: xr.Dataset) -> Decision:
    """The result of a plan from the measurements of its model."""
    values, groups = difference(plan, data), plan.groups()
    return _possible(_of_groups(values, groups, plan.of_interest)) if groups else _of_outcomes(values, plan.of_interest)


def verdict(made: Decision, p: float, p_equivalent: float) -> str:
    """ "holds", "the opposite holds", "equivalent" or "cannot tell", from corrected p values."""
    if math.isnan(made.found.value) or math.isnan(made.found.low):
        return "cannot tell"
    if p <= LEVEL:
        return "holds" if made.found.value > 0 else "the opposite holds"
    return "equivalent" if p_equivalent <= LEVEL else "cannot tell"


def over_groups(values: Values, groups: Sequence[str]) -> Estimate:
    """Mean and t limits over groups of a difference of shares."""
    return _possible(_of_groups(values, groups, 0.0)).found


def difference(plan: Plan, data: xr.Dataset) -> Values:
    """Keys of the plan minus control, by prompt."""
    treated, control = (data[plan.measure].sel(pick=pick).to_numpy() for pick in ("treated", plan.against))
    return np.asarray(treated - control, dtype=np.float64)


def in_groups(values: Values, groups: Sequence[str]) -> Float[np.ndarray, " group"]:
    """The mean of every group; NaN prompts are left out, and groups without others."""
    names = np.array(groups)
    parts = [values[(names == name) & ~np.isnan(values)] for name in dict.fromkeys(groups)]
    return np.array([part.mean() for part in parts if len(part)])


def _of_groups(values: Values, groups: Sequence[str], of_interest: float) -> Decision:
    """`_of_means` of the groups; if all agree exactly, the less certain of two neighbors.

    Groups that agree have no spread, so a t test would be certain, even of two prompts. Their spread is then taken from
    the two results that are nearest: one prompt of the smallest group is higher or lower by 1.
    """
    made = _of_means(in_groups(values, groups), of_interest)
    if _spread(made) or math.isnan(made.found.low):
        return made
    known = np.flatnonzero(~np.isnan(values)).tolist()
    at = min(known, key=lambda prompt: groups.count(groups[prompt]))
    changed = [values + step * (np.arange(len(values)) == at) for step in (-1.0, 1.0)]
    near = [_of_means(in_groups(part, groups), of_interest) for part in changed]
    unknown = replace(made.found, low=-math.inf, high=math.inf, p=1.0)
    ends = [end if _spread(end) else Decision(unknown, 1.0, math.inf) for end in near]
    low, high = min(end.found.low for end in ends), max(end.found.high for end in ends)
    return Decision(
        replace(made.found, low=low, high=high, p=max(end.found.p for end in (made, *ends))),
        max(end.p_equivalent for end in (made, *ends)),
        max(end.shown for end in ends),
    )


def _spread(made: Decision) -> bool:
    return bool(made.found.high > made.found.low + 1e-9)


def _possible(made: Decision) -> Decision:
    """A difference of shares whose limits and smallest difference shown are between −1 and 1 (`shown`: or none)."""
    low, high = (float(np.clip(end, -1, 1)) for end in (made.found.low, made.found.high))
    shown = made.shown if made.shown <= 1 else math.inf
    return replace(made, found=replace(made.found, low=low, high=high), shown=shown)


def _of_outcomes(values: Values, of_interest: float) -> Decision:
    known = values[~np.isnan(values)]
    number = len(known)
    if not number:
        return _unknown(math.nan, 0)
    lost, gained, found = int((known > 0).sum()), int((known < 0).sum()), outcomes(known, -1, 1)
    shown = smallest_paired(number, LEVEL, min(lost, gained) / number)
    value, low, high = (float(end) for end in (found.value, found.low, found.high))
    equal = float(equivalent_p(lost, gained, number, of_interest))
    return Decision(Estimate(value, low, high, number, mcnemar(gained, lost)), equal, shown)


def _of_means(values: Float[np.ndarray, " unit"], of_interest: float) -> Decision:
    """Mean, t limits, t test and two one-sided t tests of the units' values."""
    from scipy.stats import t

    number = len(values)
    if number < 2:
        return _unknown(float(values.mean()) if number else math.nan, number)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(number)
    outside = max(float(t.sf(edge / max(error, TINY), number - 1)) for edge in (of_interest - mean, of_interest + mean))
    shown = smallest_t(number, error * math.sqrt(number))
    return Decision(student(mean, error, number - 1, number), outside, shown)


def _unknown(value: float, number: int) -> Decision:
    return Decision(Estimate(value, math.nan, math.nan, number, math.nan), math.nan, math.inf)


def planned_power(plan: Plan, tests: int) -> dict[str, float]:
    """Power of a plan before it is run, at the level that `tests` tests on its prompts leave it.

    ``holds``: probability to find a true difference of the smallest size of interest; ``equivalent``: to find no true
    difference equivalent (NaN for groups); ``shown``: the smallest difference found with 80 %.
    """
    level, groups = LEVEL / max(1, tests), len(set(plan.groups()))
    against = plan.expect["against"]
    if not groups:
        against = min(against, (1 - plan.of_interest) / 2)
        return {
            "holds": paired_power(plan.of_interest, plan.n, level, against),
            "equivalent": equivalence_power(plan.n, plan.of_interest, 2 * against, level),
            "shown": smallest_paired(plan.n, level, against),
        }
    within = plan.of_interest + 2 * against
    spread = math.sqrt(plan.expect["between"] ** 2 + within * groups / plan.n)
    shown = smallest_t(groups, spread, level)
    return {
        "holds": t_power(plan.of_interest, groups, spread, level),
        "equivalent": math.nan,
        "shown": shown if shown <= 1 else math.inf,
    }
