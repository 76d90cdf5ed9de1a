"""Does the claim of a plan hold?

    sinklens test plan.yaml

A plan (plan.py) names keys to mask and a control. For every prompt, the keys and *all* controls are masked, steadily,
by the unchanged run's scores (answers.py). The verdict is about the control that the plan names; the others are listed
beside it and are not tested. The units of the test are groups of prompts, if the prompts have groups; else prompts; or
training runs, if the plan names several:

- prompts, of outcomes: Tango's interval, McNemar's exact test, and two one-sided score tests for equivalence;
- groups, and prompts for "kl": the t interval and t tests of their means, for "kl" of logarithms of ratios;
- training runs: the interval and the test of seeds.py, as everywhere. The runs answered the same prompts, and what they
  share of their chance, or of that of the groups, is part of it.

*holds*: the difference is above 0. *equivalent*: it is smaller than the smallest difference of interest, in either
direction. *the opposite holds*: it is below 0. *cannot tell*: none of these, and the report says what so many units
could have shown. Each verdict has an error rate of 5 % over all tests on these prompts (tested.py).

Units that agree exactly have no spread; their spread is taken as if one prompt had been answered differently.

Limitation: t tests of few groups or runs assume that their means are normally distributed, runs' on the scale of the
measure. docs/concepts/error-rates.md has the simulated error rates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.answers import each_prompt, effects, free_effects, unchanged
from sinklens.analyses.intervals import interval_table, outcomes
from sinklens.analyses.mass import SAME_MASS, attended, removed, with_same_mass
from sinklens.analyses.plan import Plan
from sinklens.analyses.power import LEVEL, equivalence_power, equivalent_p, paired_power, smallest_paired
from sinklens.analyses.scales import DIFFERENCE, LINEAR, Scale
from sinklens.analyses.seeds import hierarchical
from sinklens.analyses.study import Study
from sinklens.evaluation.statistics import mcnemar
from sinklens.interventions import MaskSinks
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import EpsilonOverMean, SinkTrack
from sinklens.sinks.kinds import Kind, kinds
from sinklens.sinks.strongest import NOT, Marked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

PICKS = {
    "treated": "the keys of the plan",
    SAME_MASS: "random keys that are no sinks, with as much attention",
    "random": "as many random weaker keys",
    "same_kind": "as many random weaker keys of the same kinds of token",
    "nearest": "the nearest weaker keys",
    "nothing": "nothing masked",
}
MEASURES = {
    "cost": "right answers lost by masking, share of prompts",
    "changed": "answers that change by masking, share of prompts",
    "kl": "KL divergence from the unchanged run (nats per undecided position, under replay)",
}


class Found(NamedTuple):
    """The result of a plan, before it is corrected for other tests.

    Attributes:
        estimate, low, high: difference of the measure, or ratio for "kl", with its 95 % interval.
        p, p_equivalent: p values of no difference, and of one as large as the smallest of interest.
        units: number of prompts, groups or training runs.
        shown: the smallest difference (or ratio) that so many units show with a probability of 80 %.
    """

    estimate: float
    low: float
    high: float
    p: float
    p_equivalent: float
    units: int
    shown: float


@dataclass
class Claim(Study):
    """See the module.

    Attributes:
        plan: what is tested.
    """

    name: ClassVar[str] = "test"
    together: ClassVar[bool] = False
    scored: ClassVar[str] = "some"
    plan: Plan = field(default_factory=lambda: Plan("", "", 2, 0.1))

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` and ``removed`` [prompt, pick]; ``kl`` only where the plan asks for it, else NaN."""

        def one(prompt: SinglePrompt) -> xr.Dataset:
            track = unchanged(self, model, prompt, settings)
            marked, mass = self._marked(model, prompt, settings, track)
            listed = self.interventions(marked)
            arguments = (self, model, prompt, settings, {"unchanged": [], **listed})
            found = effects(*arguments) if self.plan.measure == "kl" else free_effects(*arguments)
            right = found["right"].to_numpy()
            gone = {"treated": marked["treated"], SAME_MASS: marked[f"treated {SAME_MASS}"]}
            values = {
                "right": right[1:],
                "cost": right[0] - right[1:],
                "changed": found["changed"].to_numpy()[1:],
                "kl": found["kl"].to_numpy()[1:] if "kl" in found else np.full(len(listed), np.nan),
                "removed": np.array(
                    [float(removed(gone[name], mass)[0]) if name in gone else np.nan for name in listed]
                ),
            }
            data = xr.Dataset({name: ("pick", value) for name, value in values.items()}, {"pick": list(listed)})
            return data.assign(base=right[0], keys=float(marked["treated"].isel(step=slice(0, -1)).sum()))

        return each_prompt(prompts, one)

    def _marked(
        self, model: "Model", prompt: SinglePrompt, settings: Settings, track: SinkTrack
    ) -> tuple[SinkTrack, xr.DataArray]:
        """The track with the keys of the plan and those with as much attention, and the attention that counts."""
        sinks = EpsilonOverMean(self.plan.epsilon).detect(track)
        keys = sinks if self.plan.mask == "sinks" else track.scores().notnull() & ~sinks
        if self.plan.kind != "any":
            named = kinds(track) == int(Kind[self.plan.kind.removeprefix(NOT).upper()])
            keys = keys & (~named if self.plan.kind.startswith(NOT) else named)
        mass = attended(self, model, prompt, settings, track)
        return with_same_mass(track, {"treated": keys}, sinks, mass, self.seed), mass

    def interventions(self, marked: SinkTrack) -> dict[str, Any]:
        """One per entry of `PICKS`."""
        shared: dict[str, Any] = {"top_k": None, "source": marked, "seed": self.seed}
        keys: dict[str, Any] = shared | {"detector": Marked("treated")}
        return {
            "treated": MaskSinks(**keys),
            SAME_MASS: MaskSinks(**shared, detector=Marked(f"treated {SAME_MASS}")),
            "random": MaskSinks(**keys, pick="random", persistent=True),
            "same_kind": MaskSinks(**keys, pick="same_kind", persistent=True),
            "nearest": MaskSinks(**keys, pick="nearest"),
            "nothing": [],
        }

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``masks``: the measures by keys; ``differences``: the keys of the plan minus every control, with intervals
        over groups if the plan has groups; and then ``groups``, the same by group.
        """
        measures = ["cost", "changed"] + ["kl"] * (self.plan.measure == "kl")
        tables = {"masks": interval_table(measured, [*measures, "removed"], self.seed).dropna(subset="estimate")}
        ranges = {"cost": (-1, 1), "changed": (-1, 1)}
        less = {name: data[measures].sel(pick="treated", drop=True) - data[measures] for name, data in measured.items()}
        controls = {name: data.drop_sel(pick="treated").rename(pick="control") for name, data in less.items()}
        groups = self.plan.groups()
        tables["differences"] = interval_table(controls, measures, self.seed, ranges)
        if groups:
            over = [over_groups(controls[row.model][row.measure].sel(control=row.control), groups)
                    for row in tables["differences"].itertuples()]  # fmt: skip
            tables["differences"][["estimate", "low", "high"]] = over
        if groups and self.plan.against in next(iter(controls.values()))["control"]:
            parts = [
                interval_table({name: data.sel(control=self.plan.against).isel(prompt=np.array(groups) == group)},
                               [self.plan.measure], self.seed, ranges).assign(group=group)
                for name, data in controls.items() for group in dict.fromkeys(groups)
            ]  # fmt: skip
            from pandas import concat

            tables["groups"] = concat(parts, ignore_index=True)
        return tables

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """None."""
        return {}


def decided(plan: Plan, measured: Mapping[str, xr.Dataset]) -> Found:
    """The result of a plan from the measurements of its models."""
    values, groups, kl = [difference(plan, data) for data in measured.values()], plan.groups(), plan.measure == "kl"
    of_interest = math.log(plan.of_interest) if kl else plan.of_interest
    if len(values) > 1:
        scale = LINEAR if kl else DIFFERENCE
        found = _not_certain(values, groups, lambda given: _of_runs(given, groups, of_interest, scale))
    elif groups:
        found = _of_groups(values[0], groups, of_interest)
    elif kl:
        found = _of_means(values[0][~np.isnan(values[0])], of_interest)
    else:
        return _of_outcomes(values[0], of_interest)
    if not kl:
        return _possible(found)
    estimate, low, high = (math.exp(value) for value in found[:3])
    return found._replace(estimate=estimate, low=low, high=high, shown=math.exp(min(found.shown, 700.0)))


def over_groups(values: xr.DataArray, groups: Sequence[str]) -> tuple[float, float, float]:
    """Mean and t interval over groups of a difference [prompt]."""
    found = _possible(_of_groups(values.to_numpy(), groups, 0.0))
    return found.estimate, found.low, found.high


def difference(plan: Plan, data: xr.Dataset) -> Float[np.ndarray, " prompt"]:
    """Keys of the plan minus control, by prompt; for "kl" the logarithm of their ratio, NaN where either is 0."""
    treated, control = (data[plan.measure].sel(pick=pick).to_numpy() for pick in ("treated", plan.against))
    if plan.measure != "kl":
        return np.asarray(treated - control, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(treated) - np.log(control)
    return np.where(np.isfinite(logs), logs, np.nan)


def in_groups(values: Float[np.ndarray, " prompt"], groups: Sequence[str]) -> Float[np.ndarray, " group"]:
    """The mean of every group; NaN prompts are left out, and groups without others."""
    names = np.array(groups)
    parts = [values[(names == name) & ~np.isnan(values)] for name in dict.fromkeys(groups)]
    return np.array([part.mean() for part in parts if len(part)])


def _of_groups(values: Float[np.ndarray, " prompt"], groups: Sequence[str], of_interest: float) -> Found:
    return _not_certain([values], groups, lambda given: _of_means(in_groups(given[0], groups), of_interest))


def _not_certain(
    values: list[Float[np.ndarray, " prompt"]],
    groups: Sequence[str],
    of: Callable[[list[Float[np.ndarray, " prompt"]]], Found],
) -> Found:
    """`of` the values; if all units agree exactly, the less certain of two neighbors.

    Units that agree have no spread, so a t test would be certain, even of two prompts. Their spread is then taken from
    the two results that are nearest: one prompt of the smallest group is higher or lower by 1.
    """
    found, (first, *rest) = of(values), values
    if found.high > found.low + 1e-9 or math.isnan(found.low):
        return found
    sizes = {group: groups.count(group) for group in groups}
    known = np.flatnonzero(~np.isnan(first))
    at = min(known.tolist(), key=lambda prompt: sizes[groups[prompt]] if groups else 0)
    near = [of([first + step * (np.arange(len(first)) == at), *rest]) for step in (-1.0, 1.0)]
    ends = [end if end.high > end.low + 1e-9 else end._replace(low=-math.inf, high=math.inf, p=1.0, p_equivalent=1.0,
                                                                 shown=math.inf) for end in near]  # fmt: skip
    return found._replace(
        low=min(end.low for end in ends),
        high=max(end.high for end in ends),
        p=max(end.p for end in (found, *ends)),
        p_equivalent=max(end.p_equivalent for end in (found, *ends)),
        shown=max(end.shown for end in ends),
    )


def _possible(found: Found) -> Found:
    """A difference of shares whose interval and smallest difference shown are between −1 and 1 (`shown`: or none)."""
    low, high = (float(np.clip(end, -1, 1)) for end in (found.low, found.high))
    return found._replace(low=low, high=high, shown=found.shown if found.shown <= 1 else math.inf)


def _of_outcomes(values: Float[np.ndarray, " prompt"], of_interest: float) -> Found:
    known = values[~np.isnan(values)]
    if not len(known):
        return Found(math.nan, math.nan, math.nan, math.nan, math.nan, 0, math.inf)
    lost, gained, number = int((known > 0).sum()), int((known < 0).sum()), len(known)
    interval = outcomes(known, -1, 1)
    shown = smallest_paired(number, LEVEL, min(lost, gained) / number)
    equal = float(equivalent_p(lost, gained, number, of_interest))
    estimate, low, high = (float(part) for part in interval[:3])
    return Found(estimate, low, high, mcnemar(gained, lost), equal, number, shown)


def _of_means(values: Float[np.ndarray, " unit"], of_interest: float) -> Found:
    """Mean, t interval, t test and two one-sided t tests of the units' values."""
    from scipy.stats import t

    number = len(values)
    if number < 2:
        mean = float(values.mean()) if number else math.nan
        return Found(mean, math.nan, math.nan, math.nan, math.nan, number, math.inf)
    mean, size, free = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(number), number - 1
    half = float(t.isf(0.025, free)) * size
    scale = max(size, 1e-12)
    p = float(2 * t.sf(abs(mean) / scale, free)) if mean else 1.0
    equal = max(float(t.sf((of_interest - mean) / scale, free)), float(t.sf((of_interest + mean) / scale, free)))
    return Found(mean, mean - half, mean + half, p, equal, number, smallest_t(number, size * math.sqrt(number)))


def _of_runs(
    values: Sequence[Float[np.ndarray, " prompt"]], groups: Sequence[str], of_interest: float, scale: Scale
) -> Found:
    """The estimate of seeds.py over training runs, its test, and two one-sided tests with the same standard error."""
    from scipy.stats import t

    seeds, number = hierarchical(values, scale=scale, group=groups), len(values)
    if math.isnan(seeds.error):
        return Found(seeds.estimate, math.nan, math.nan, math.nan, math.nan, number, math.inf)
    error, centre = max(seeds.error, 1e-12), float(scale.to(seeds.estimate))
    p = float(2 * t.sf(abs(centre) / error, number - 1))
    edges = (float(scale.to(of_interest)) - centre, centre - float(scale.to(-of_interest)))
    equal = max(float(t.sf(edge / error, number - 1)) for edge in edges)
    shown = smallest_t(number, error * math.sqrt(number))
    shown = shown if math.isinf(shown) else float(scale.back(shown))
    return Found(seeds.estimate, seeds.low, seeds.high, p, equal, number, shown)


def t_power(effect: float, number: int, spread: float, level: float = LEVEL) -> float:
    """Probability that a two-sided t test of `number` values with standard deviation `spread` finds a mean."""
    from scipy.stats import nct, t

    if number < 2:
        return 0.0
    shift, limit = abs(effect) * math.sqrt(number) / max(spread, 1e-12), t.isf(level / 2, number - 1)
    if shift > 30:
        return 1.0
    return float(nct.sf(limit, number - 1, shift) + nct.cdf(-limit, number - 1, shift))


def smallest_t(number: int, spread: float, level: float = LEVEL) -> float:
    """The smallest mean that a two-sided t test finds with a probability of 80 %."""
    low, high = 0.0, 100.0 * max(spread, 1e-12)
    if t_power(high, number, spread, level) < 0.8:
        return math.inf
    while high - low > 1e-4 * max(spread, 1e-12):
        middle = (low + high) / 2
        low, high = (low, middle) if t_power(middle, number, spread, level) >= 0.8 else (middle, high)
    return high


def planned_power(plan: Plan, tests: int) -> dict[str, float]:
    """Power of a plan before it is run, at the level that `tests` tests on its prompts leave it.

    ``holds``: probability to find a true difference of the smallest size of interest; ``equivalent``: to find no true
    difference equivalent (NaN for groups, runs and ratios); ``shown``: the smallest difference found with 80 %.
    """
    level, groups = LEVEL / max(1, tests), plan.groups()
    units = 1 + len(plan.seeds) if plan.seeds else len(set(groups)) if groups else plan.n
    against = plan.expect["against"]
    if plan.measure != "kl" and not plan.seeds and not groups:
        against = min(against, (1 - plan.of_interest) / 2)
        return {
            "holds": paired_power(plan.of_interest, plan.n, level, against),
            "equivalent": equivalence_power(plan.n, plan.of_interest, 2 * against, level),
            "shown": smallest_paired(plan.n, level, against),
        }
    within = plan.expect["spread"] if plan.measure == "kl" else math.sqrt(plan.of_interest + 2 * against)
    between = plan.expect["between"]
    if plan.seeds:  # all runs answer the same prompts, so their chance is not averaged over runs
        shared = within**2 / plan.n + (between**2 / len(set(groups)) if groups else 0.0)
        spread = math.sqrt(between**2 + units * shared)
    else:
        spread = math.sqrt(between**2 + within**2 * units / plan.n) if groups else within
    effect = math.log(plan.of_interest) if plan.measure == "kl" else plan.of_interest
    shown = smallest_t(units, spread, level)
    return {
        "holds": t_power(effect, units, spread, level),
        "equivalent": math.nan,
        "shown": math.exp(min(shown, 700.0)) if plan.measure == "kl" else shown if shown <= 1 else math.inf,
    }


def verdict(plan: Plan, found: Found, p: float, p_equivalent: float) -> str:
    """ "holds", "the opposite holds", "equivalent" or "cannot tell", from corrected p values."""
    if math.isnan(found.estimate) or math.isnan(found.low):
        return "cannot tell"
    if p <= LEVEL:
        return "holds" if found.estimate > (1.0 if plan.measure == "kl" else 0.0) else "the opposite holds"
    return "equivalent" if p_equivalent <= LEVEL else "cannot tell"
