"""What the measurements of a plan decide: the estimate, its tests, and what so many units could have shown.

The units are groups of prompts, if the prompts have groups; else prompts; or training runs, if the plan names several:

- prompts, of outcomes: Tango's limits, McNemar's exact test, and two one-sided score tests for equivalence;
- groups: the t limits and t tests of their means;
- training runs: the limits and the test of seeds.py, as everywhere. The runs answered the same prompts, and what they
  share of their chance, or of that of the groups, is part of it.

Units that agree exactly have no spread; their spread is taken as if one prompt had been answered differently.

Limitation: t tests of few groups or runs assume that their means are normally distributed, runs' on the scale of the
measure. docs/concepts/error-rates.md has the simulated error rates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
from sinklens.analyses.estimates.scales import DIFFERENCE
from sinklens.analyses.estimates.seeds import hierarchical
from sinklens.utils.estimates import Estimate, mcnemar, outcomes, student

Values = Float[np.ndarray, " prompt"]


@dataclass(frozen=True)
class Decision:
    """The result of a plan, before it is corrected for other tests.

    Attributes:
        found: difference of the measure over prompts, groups or training runs, with the p value of no difference.
        p_equivalent: p value of a difference as large as the smallest of interest.
        shown: the smallest difference that so many units show with a probability of 80 %.
    """

    found: Estimate
    p_equivalent: float
    shown: float


def decided(plan: Plan, measured: Mapping[str, xr.Dataset]) -> Decision:
    """The result of a plan from the measurements of its models."""
    values, groups = [difference(plan, data) for data in measured.values()], plan.groups()
    if len(values) > 1:
        return _possible(_not_certain(values, groups, lambda given: _of_runs(given, groups, plan.of_interest)))
    if groups:
        return _possible(_of_groups(values[0], groups, plan.of_interest))
    return _of_outcomes(values[0], plan.of_interest)


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
    return _not_certain([values], groups, lambda given: _of_means(in_groups(given[0], groups), of_interest))


def _not_certain(values: list[Values], groups: Sequence[str], of: Callable[[list[Values]], Decision]) -> Decision:
    """`of` the values; if all units agree exactly, the less certain of two neighbors.

    Units that agree have no spread, so a t test would be certain, even of two prompts. Their spread is then taken from
    the two results that are nearest: one prompt of the smallest group is higher or lower by 1.
    """
    made, (first, *rest) = of(values), values
    if _spread(made) or math.isnan(made.found.low):
        return made
    sizes = {group: groups.count(group) for group in groups}
    known = np.flatnonzero(~np.isnan(first))
    at = min(known.tolist(), key=lambda prompt: sizes[groups[prompt]] if groups else 0)
    near = [of([first + step * (np.arange(len(first)) == at), *rest]) for step in (-1.0, 1.0)]
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
    number = len(values)
    if number < 2:
        return _unknown(float(values.mean()) if number else math.nan, number)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(number)
    edges = (of_interest - mean, of_interest + mean)
    shown = smallest_t(number, error * math.sqrt(number))
    return Decision(student(mean, error, number - 1, number), _outside(edges, error, number), shown)


def _of_runs(values: Sequence[Values], groups: Sequence[str], of_interest: float) -> Decision:
    """The estimate of seeds.py over training runs, its test, and two one-sided tests with the same standard error."""
    from scipy.stats import t

    scale, number = DIFFERENCE, len(values)
    found = hierarchical(values, scale=scale, group=groups)
    if math.isnan(found.low):
        return _unknown(found.value, number)
    centre = float(scale.to(found.value))
    error = (float(scale.to(found.high)) - centre) / float(t.ppf(0.975, number - 1))
    edges = (float(scale.to(of_interest)) - centre, centre - float(scale.to(-of_interest)))
    shown = smallest_t(number, error * math.sqrt(number))
    p = 1.0 if centre == 0 else 0.0 if math.isnan(found.p) else found.p
    return Decision(
        replace(found, p=p), _outside(edges, error, number), shown if math.isinf(shown) else float(scale.back(shown))
    )


def _outside(edges: Sequence[float], error: float, number: int) -> float:
    """The larger p value of two one-sided t tests, from the distances to the two limits of interest."""
    from scipy.stats import t

    return max(float(t.sf(edge / max(error, TINY), number - 1)) for edge in edges)


def _unknown(value: float, number: int) -> Decision:
    return Decision(Estimate(value, math.nan, math.nan, number, math.nan), math.nan, math.inf)


def planned_power(plan: Plan, tests: int) -> dict[str, float]:
    """Power of a plan before it is run, at the level that `tests` tests on its prompts leave it.

    ``holds``: probability to find a true difference of the smallest size of interest; ``equivalent``: to find no true
    difference equivalent (NaN for groups and runs); ``shown``: the smallest difference found with 80 %.
    """
    level, groups = LEVEL / max(1, tests), plan.groups()
    units = 1 + len(plan.seeds) if plan.seeds else len(set(groups)) if groups else plan.n
    against = plan.expect["against"]
    if not plan.seeds and not groups:
        against = min(against, (1 - plan.of_interest) / 2)
        return {
            "holds": paired_power(plan.of_interest, plan.n, level, against),
            "equivalent": equivalence_power(plan.n, plan.of_interest, 2 * against, level),
            "shown": smallest_paired(plan.n, level, against),
        }
    within = math.sqrt(plan.of_interest + 2 * against)
    between = plan.expect["between"]
    if plan.seeds:  # all runs answer the same prompts, so their chance is not averaged over runs
        shared = within**2 / plan.n + (between**2 / len(set(groups)) if groups else 0.0)
        spread = math.sqrt(between**2 + units * shared)
    else:
        spread = math.sqrt(between**2 + within**2 * units / plan.n)
    shown = smallest_t(units, spread, level)
    return {
        "holds": t_power(plan.of_interest, units, spread, level),
        "equivalent": math.nan,
        "shown": shown if shown <= 1 else math.inf,
    }
