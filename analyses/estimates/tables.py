"""Tables of estimates over prompts: means with 95 % limits, p values, verdicts, and corrections for several claims.

Limits are over prompts, because prompts were sampled, not steps or heads (sinklens/utils/estimates.py): score limits
for outcomes, which take few values, else a bootstrap. Prompts of one group, such as a template, resemble each other; so
with several groups, limits and tests are over groups (strata.py).

Several claims of one study are tested as one family, with Holm's correction (`judged`). Beside each stands the smallest
effect that the prompts could have shown after that correction (power.py), so that "cannot tell" says whether the number
of prompts is the reason.

Limitation: an interval over prompts from few templates says little about other text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Shaped
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.analyses.estimates.power import LEVEL, OF_INTEREST, equivalent_p, smallest_shown, smallest_t
from sinklens.analyses.estimates.scales import DIFFERENCE, LINEAR, SHARE
from sinklens.analyses.estimates.strata import Groups, groups_of, mean_over
from sinklens.utils.arguments import checked
from sinklens.utils.estimates import Estimate, bootstrap, counted, holm, mcnemar, outcomes, score_p

FLIPS = 20_000
BATCH = 1000  # sign flips at a time
NOTHING = "no prompt has a value: no answer is known, none is right with nothing changed, or nothing was to compare"

# The smallest and largest value of every measure that is an outcome of one prompt, in steps of 1.
RANGES: dict[str, tuple[int, int]] = {**dict.fromkeys(("right", "base", "changed", "kept"), (0, 1)), "cost": (-1, 1)}


def interval_rows(
    model: str, measure: str, found: Estimate, axes: Mapping[str, Sequence[Any] | np.ndarray]
) -> list[dict[str, Any]]:
    """One table row per entry: model, measure, the entry's labels, estimate, low, high, prompts.

    Args:
        axes: name of each axis of `found` -> its labels; a single number can have axes with one label.
    """
    shape, rows = [len(labels) for labels in axes.values()], []
    arrays = {
        name: np.asarray(value).reshape(shape)
        for name, value in (("estimate", found.value), ("low", found.low), ("high", found.high), ("prompts", found.n))
    }
    for place in np.ndindex(*shape):
        labels = {name: values[at] for (name, values), at in zip(axes.items(), place, strict=True)}
        numbers = {name: float(value[place]) for name, value in arrays.items()}
        rows.append({"model": model, "measure": measure, **labels, **numbers, "prompts": int(arrays["prompts"][place])})
    return rows


@checked
def interval_table(
    measured: Mapping[str, xr.Dataset],
    variables: Sequence[str],
    seed: int = 0,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    null: float | Mapping[str, float] | None = None,
) -> "DataFrame":
    """Means over prompts: one row per model, variable and entry along the variable's axes other than ``prompt``.

    Intervals and p values are over the groups of prompts (the coordinate ``prompt_group``), where there are several and
    they differ. The column ``groups`` has their number; 0 for a row over prompts.

    Args:
        ranges: smallest and largest value of the variables that are outcomes, in addition to `RANGES`. A variable with
            other values, such as a share of heads, has a bootstrap interval.
        null: adds a column ``p``, two-sided, for the hypothesis that the mean is `null` (one number, or one for each
            variable; NaN for none); see `p_value`. Also ``null``, ``spread`` and ``against``, from which `corrected`
            works out what the prompts could have shown.
    """
    known, rows = {**RANGES, **(ranges or {})}, []
    for model, data in measured.items():
        group = groups_of(data)
        for name in variables:
            values = data[name].transpose("prompt", ...)
            array, labels = values.to_numpy(), _labels(values)
            found = interval_rows(model, name, mean_interval(array, known.get(name), seed), labels)
            columns = array.reshape(len(array), -1).T
            mean = np.nan if null is None else null[name] if isinstance(null, Mapping) else null
            if null is not None:
                tested = (_tested(column, known.get(name), mean, seed) for column in columns)
                found = [{**row, **numbers} for row, numbers in zip(found, tested, strict=True)]
            if group is not None:
                found = [
                    {**row, **_over_groups(column, group, known.get(name), mean, seed)}
                    for row, column in zip(found, columns, strict=True)
                ]
            rows += found
    return DataFrame(rows)


def _over_groups(
    values: Float[np.ndarray, " prompt"],
    group: Groups,
    possible: tuple[int, int] | None,
    null: float,
    seed: int,
) -> dict[str, Any]:
    """What differs in a row of `interval_table` over groups: limits, and p value and spread for a hypothesis."""
    from scipy.stats import t

    # a test is on the linear scale, which has a p value even if resamples reach a limit of the measure
    bounded = {(0, 1): SHARE, (-1, 1): DIFFERENCE} if np.isnan(null) else {}
    found, _, groups = mean_over(values, seed, group, bounded.get(_span(values, possible) or (0, 0), LINEAR), null)
    if not groups or not found.low < found.high:
        return {"groups": 0}
    spread = (found.high - found.low) / 2 / t.ppf(0.975, groups - 1) * groups**0.5
    of_test = {"p": found.p, "spread": spread} if not np.isnan(null) else {}
    return {"low": found.low, "high": found.high, "groups": groups, **of_test}


@checked
def difference_table(measured: Mapping[str, xr.Dataset], variables: Sequence[str], seed: int = 0) -> "DataFrame":
    """Difference of each further model from the first, prompt by prompt: rows as in `interval_table`, `corrected`.

    Prompts are paired, so the interval is narrower than the two models' intervals suggest. Empty for one model.
    """
    (first, start), *others = measured.items()
    ranges = {name: (low - high, high - low) for name, (low, high) in RANGES.items()}
    less = {f"{model} − {first}": data[[*variables]] - start[[*variables]] for model, data in others}
    if not less:
        return DataFrame(columns=["model", "measure", "estimate", "low", "high", "prompts"])
    return corrected(interval_table(less, variables, seed, ranges, null=0.0))


def known_mean(values: Float[np.ndarray, "..."]) -> float:
    """Mean of the values that are not NaN; NaN without one."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else np.nan


def mean_interval(
    values: Shaped[np.ndarray, "prompt *rest"], possible: tuple[int, int] | None = None, seed: int = 0
) -> Estimate:
    """The mean over prompts with its 95 % interval.

    That of `outcomes` if all values are integers in the range `possible`, else that of `bootstrap`.
    """
    span = _span(values, possible)
    return bootstrap(values, seed) if span is None else outcomes(values, *span)


def p_value(
    values: Float[np.ndarray, " prompt"], possible: tuple[int, int] | None = None, null: float = 0.0, seed: int = 0
) -> float:
    """Two-sided p value of the hypothesis that the mean over prompts is `null`.

    NaN with fewer than two values, or if `null` is NaN.

    Outcomes of −1, 0 and 1 (differences of paired verdicts) against 0: McNemar's exact test, the sign test of the
    prompts that differ. Other outcomes: the score test that their interval inverts. All other values: the share of
    `FLIPS` random changes of the signs of x − null whose mean is at least as far from 0; it assumes that x is
    distributed symmetrically about `null`.

    Args:
        possible: range of the values if they are outcomes, as in `mean_interval`.
    """
    known = values[~np.isnan(values)]
    if len(known) < 2 or np.isnan(null):
        return float("nan")
    span = _span(values, possible)
    if span is None:
        return _flipped(known - null, seed)
    if span == (-1, 1) and null == 0:
        return mcnemar(int((known < 0).sum()), int((known > 0).sum()))
    counts, support = counted(known, *span)
    return float(score_p(counts, support.tolist(), null))


def judged(
    table: "DataFrame", above: str = "holds", below: str = "no", of_interest: float = OF_INTEREST
) -> "DataFrame":
    """A table of claims that has a column ``p``: `corrected`, with ``verdict`` (see `verdict`) and ``why``.

    A difference of paired verdicts over prompts is "equivalent" if it is smaller than `of_interest`: its interval lies
    within, and two one-sided tests reject a larger one, corrected by Holm's method over all such rows of the model. For
    one that is "cannot tell", ``why`` says whether there are too few prompts, or groups of them, to show a difference
    of interest.
    """
    missing = {name: np.nan for name in ("against", "spread") if name not in table}
    table = table.assign(**missing)
    equivalent = _equivalent(table, of_interest)
    paired = table["against"].notna()
    table = corrected(table)
    found, reasons = [], []
    for row, same, of_outcomes in zip(table.itertuples(), equivalent, paired, strict=True):
        text = verdict(row.estimate, row.low, row.high, 0.0, above, below, row.p_holm)
        found.append("equivalent" if text == "cannot tell" and same else text)
        asked = found[-1] == "cannot tell" and of_outcomes
        reason = _why(row.shown, of_interest, getattr(row, "groups", 0) > 0) if asked else ""
        reasons.append(NOTHING if text == "not measured" else reason)
    return table.assign(verdict=found, why=reasons)


def corrected(table: "DataFrame") -> "DataFrame":
    """The table with ``p_holm``, ``p`` corrected by Holm's method over all rows of the model that have one, and
    ``shown``, the smallest effect that the row's prompts could have shown after this correction.
    """
    table, shown = table.assign(p_holm=np.nan), []
    for _, family in table.groupby("model", sort=False):
        tested = family["p"].dropna()
        table.loc[tested.index, "p_holm"] = holm(tested.tolist())
    tests = table.groupby("model", sort=False)["p"].transform("count")
    for (_, row), number in zip(table.iterrows(), tests, strict=True):
        given = {name: float(row.get(name, np.nan)) for name in ("against", "spread")}
        known, groups = not np.isnan(row["p"]) and "prompts" in row, int(row.get("groups", 0))
        shown.append(
            np.nan if not known
            else smallest_t(groups, given["spread"], LEVEL / number) if groups
            else smallest_shown(int(row["prompts"]), LEVEL / number, **given, null=float(row.get("null", 0.0)))
        )  # fmt: skip
    return table.drop(columns=["null", "against", "spread"], errors="ignore").assign(shown=shown)


def _equivalent(table: "DataFrame", of_interest: float) -> list[bool]:
    """Whether each row, a difference of paired verdicts, is smaller than `of_interest`."""
    known = table["against"].notna() & (table.get("groups", 0) == 0)
    ps = table["estimate"] * np.nan
    for at, row in table[known].iterrows():
        lost, gained = sorted(round(row["prompts"] * (row["against"] + more)) for more in (0.0, abs(row["estimate"])))
        ps[at] = float(equivalent_p(lost, gained, int(row["prompts"]), of_interest))
    for _, family in table[known].groupby("model", sort=False):
        ps[family.index] = holm(ps[family.index].tolist())
    inside = (table["low"] > -of_interest) & (table["high"] < of_interest)
    return (known & inside & (ps <= LEVEL)).tolist()


def _why(shown: float, of_interest: float, of_groups: bool) -> str:
    """Whether the number of prompts, or of their groups, is the reason that a difference cannot be told from 0."""
    unit = "groups of prompts" if of_groups else "prompts"
    size = "no difference" if np.isinf(shown) else f"differences from {shown:.2f}"
    few = f"too few {unit}: they show {size}, and {of_interest:g} is of interest"
    return few if shown > of_interest else f"not the number of {unit}: they show {size}"


def _tested(
    values: Float[np.ndarray, " prompt"], possible: tuple[int, int] | None, null: float, seed: int
) -> dict[str, float]:
    """``p`` of one column, the hypothesis, and what its power follows from: ``spread`` (the standard deviation) and, of
    differences of paired verdicts, ``against`` (the share of prompts that changed the rarer way).
    """
    known = values[~np.isnan(values)]
    spread = float(known.std(ddof=1)) if len(known) > 1 else np.nan
    paired = _span(values, possible) == (-1, 1) and not np.isnan(null)
    against = float(min((known > 0).mean(), (known < 0).mean())) if paired else np.nan
    return {"p": p_value(values, possible, null, seed), "null": null, "spread": spread, "against": against}


def verdict(estimate: float, low: float, high: float, threshold: float, above: str, below: str, p: float = 0.0) -> str:
    """`above` or `below` if the entire interval lies on that side of `threshold`, else "cannot tell".

    "not measured" without an estimate; "cannot tell" without an interval.

    Args:
        p: corrected p value; above 0.05 the verdict is "cannot tell".
    """
    if np.isnan(estimate):
        return "not measured"
    if p > LEVEL:
        return "cannot tell"
    if low > threshold:
        return above
    return below if high <= threshold else "cannot tell"


def _span(values: np.ndarray, possible: tuple[int, int] | None) -> tuple[int, int] | None:
    """The range of outcomes, `possible` if all known values are integers in it; None of other values."""
    known = values[~np.isnan(values)]
    if possible is None or not known.size:
        return None
    return possible if np.isin(known, np.arange(possible[0], possible[1] + 1)).all() else None


def _flipped(values: np.ndarray, seed: int) -> float:
    """The share of random sign changes with a sum at least as far from 0, with the observed signs as one of them."""
    rng, seen = np.random.default_rng(seed), abs(values.sum())
    as_far = 1
    for _ in range(FLIPS // BATCH):
        signs = rng.integers(0, 2, size=(BATCH, len(values))) * 2 - 1
        as_far += int((abs(signs @ values) >= seen * (1 - 1e-12)).sum())
    return as_far / (FLIPS + 1)


def _labels(values: xr.DataArray) -> dict[str, np.ndarray]:
    return {
        str(axis): values[axis].to_numpy() if axis in values.coords else np.arange(values.sizes[axis])
        for axis in values.dims
        if axis != "prompt"
    }
