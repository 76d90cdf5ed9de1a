"""`sinklens test`: planted claims (true, equivalent, underpowered), stored plans, counted tests, resumption."""

import json
import re

import numpy as np
import pytest
import xarray as xr

from sinklens.analyses.estimates import deciding
from sinklens.analyses.estimates.deciding import Decision, decided, in_groups, over_groups, planned_power, verdict
from sinklens.analyses.estimates.plan import Plan, read_plan
from sinklens.analyses.estimates.power import t_power
from sinklens.analyses.planned import PICKS, PlannedTest
from sinklens.analyses.tested import begin, finish, sharing
from sinklens.cli import main
from sinklens.errors import SettingError
from sinklens.evaluation import LedgerRun
from sinklens.tasks import held_out
from sinklens.utils import estimates
from sinklens.utils.estimates import Estimate, outcomes

PLAN = """
claim: masking sinks costs more than masking as much attention elsewhere
model: tiny-llada
contrast: {mask: sinks, against: same_mass}
measure: cost
n: %(n)d
of_interest: 0.1
"""


def planted(lost, control=0.0):
    """A `measure` in which masking the keys of the plan loses a share of the answers, and a control another share."""
    calls = []

    def measure(self, model, prompts, settings):
        (prompt,) = prompts
        calls.append(prompt)
        place = [problem.prompt for problem in held_out()].index(prompt)
        spread = place * 0.618034 % 1.0
        values = np.zeros(len(PICKS))
        values[0] = float(spread < lost)
        values[1:-1] = float(1 - spread < control)
        names = ("cost", "changed", "right", "removed")
        data = xr.Dataset(dict.fromkeys(names, ("pick", values)), {"pick": [*PICKS]})
        return data.assign(base=1.0, keys=9.0).expand_dims("prompt")

    return measure, calls


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a plan with planted measurements; returns what was printed."""

    def run_plan(lost, n, *, out="out", control=0.0, text=PLAN, options=()):
        (tmp_path / f"{out}.yaml").write_text(text % {"n": n})
        measure, calls = planted(lost, control)
        monkeypatch.setattr(PlannedTest, "measure", measure)
        call = ["test", str(tmp_path / f"{out}.yaml"), "--out", str(tmp_path / out), "--tests", str(tmp_path / "tests")]
        code = main([*call, *options])
        printed = capsys.readouterr()
        return code, printed.out + printed.err, calls

    return run_plan


@pytest.mark.parametrize(
    ("lost", "n", "said"),
    [
        (0.1, 20, "cannot tell"),
        pytest.param(0.4, 60, "holds", marks=pytest.mark.extended),
        pytest.param(0.0, 120, "equivalent", marks=pytest.mark.extended),
    ],
)
def test_planted_claims_get_their_verdicts(run, tmp_path, lost, n, said):
    code, printed, calls = run(lost, n)
    assert (code, len(calls)) == (0, n)
    assert re.search(rf"(?s)# {said}: masking sinks costs more.*With nothing masked, {n} of {n} prompts are", printed)
    assert (tmp_path / "out" / "test-report.md").read_text().startswith(f"# {said}: ")
    assert ("there are too few of them." in printed) == (said == "cannot tell")
    assert "Against every control" in printed
    assert printed.index("Power beforehand") < printed.index("is stored in") < printed.index("# ")


def test_a_changed_plan_is_refused_after_the_first_run_and_the_first_one_resumes(run, tmp_path):
    assert run(0.4, 8)[0] == 0
    code, printed, calls = run(0.4, 9)
    assert (code, calls) == (1, [])
    assert (
        "was begun with another plan; changed since: groups, n, prompts. A plan cannot change after its first run."
        in printed
    )
    code, printed, calls = run(0.4, 8)
    assert (code, calls) == (0, [])  # nothing is measured twice
    stored = json.loads((tmp_path / "out" / "plan.json").read_text())
    (counted,) = LedgerRun.all(tmp_path / "tests")
    assert stored["name"] == counted.name


@pytest.mark.extended
def test_every_test_on_a_prompt_is_counted_whatever_its_folder(run):
    printed = [run(lost, n, out=f"out-{n}")[1] for lost, n in ((0.4, 24), (0.0, 8), (0.0, 9))]
    assert [re.search(r"correction for (\d+) tests", text)[1] for text in printed] == ["1", "2", "3"]
    assert "correction for 3 tests" in run(0.4, 24, out="out-24")[1]


def test_a_dry_run_prints_the_power_and_stores_nothing(run, tmp_path):
    code, printed, calls = run(0.4, 100, options=["--dry-run"])
    assert (code, calls) == (0, [])
    assert "Power beforehand, at the level of 0.05: " in printed
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "tests").exists()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("claims: two", r"a plan has no claims; known: .* Nearest: claim"),
        ("contrast: {agains: random}", r"a plan has no contrast.agains; known: mask, kind, against. Nearest: against"),
        (
            "contrast: {against: randm}",
            r"against must be one of same_mass, random, .*; got 'randm'",
        ),
        ("n: 20.5", r"n must be an integer of at least 2; got 20.5"),
        ("n: 501", r"n is 501, and the held-out problems has 500 prompts"),
        ("of_interest: 2", r"of_interest is 2; it is a share of prompts"),
        ("detector: 3", r"detector is 3; write keys such as detector: {\"epsilon\": 3.0}"),
        ("group: author", r"the shipped problems have the group 'template', or 'none'; got 'author'"),
    ],
)
def test_a_plan_with_a_mistake_is_refused(tmp_path, more, message):
    key = more.partition(":")[0]
    lines = [line for line in (PLAN % {"n": 20}).splitlines() if not line.startswith(f"{key}:")]
    (tmp_path / "plan.yaml").write_text("\n".join([*lines, more]))
    with pytest.raises(SettingError, match=message):
        read_plan(tmp_path / "plan.yaml").identity()


def test_a_plan_needs_its_keys_and_can_be_json(tmp_path):
    given = {"claim": "c", "model": "tiny-llada", "contrast": {"kind": "digit"}, "n": 4, "of_interest": 0.1}
    (tmp_path / "plan.json").write_text(json.dumps(given))
    assert read_plan(tmp_path / "plan.json") == Plan("c", "tiny-llada", 4, 0.1, kind="digit")
    (tmp_path / "plan.yaml").write_text("claim: c")
    with pytest.raises(SettingError, match=r"has no model, contrast, n, of_interest; a plan needs claim,"):
        read_plan(tmp_path / "plan.yaml")


def numbers(found):
    return found.value, found.low, found.high


def data(values):
    both = np.stack([values, np.zeros(len(values))], axis=1)
    return xr.Dataset({"cost": (("prompt", "pick"), both)}, {"pick": ["treated", "same_mass"]})


def test_single_prompts_have_the_exact_test_and_the_score_interval():
    values = np.repeat([1.0, 0.0, -1.0], [12, 46, 2])
    found = decided(Plan("c", "m", 60, 0.1, group="none"), data(values))
    interval = outcomes(values, -1, 1)
    assert numbers(found.found) == pytest.approx((1 / 6, float(interval.low), float(interval.high)))
    assert (found.found.p, found.found.n) == (pytest.approx(0.01293945), 60)


def test_groups_are_compared_where_prompts_have_groups(monkeypatch):
    """Planted: one of four groups loses everything. Prompts alone would say that the claim holds."""
    values, groups = np.repeat([1.0, 0.0, 0.0, 0.0], 20), list(np.repeat([*"abcd"], 20))
    assert in_groups(values, groups).tolist() == [1.0, 0.0, 0.0, 0.0]
    plan = Plan("c", "m", 80, 0.1, group="none")
    single = decided(plan, data(values))
    assert verdict(single, single.found.p, single.p_equivalent) == "holds"
    monkeypatch.setattr(Plan, "groups", lambda self: groups)
    grouped = decided(plan, data(values))
    assert (grouped.found.n, verdict(grouped, grouped.found.p, grouped.p_equivalent)) == (4, "cannot tell")
    assert numbers(over_groups(values, groups)) == pytest.approx(numbers(grouped.found))


def test_shipped_problems_are_grouped_by_template_unless_the_plan_says_none():
    templates = Plan("c", "m", 40, 0.1).groups()
    assert (len(templates), len(set(templates))) == (40, 7)
    assert [Plan("c", "m", 40, 0.1, group=by).groups() for by in ("template", "none")] == [templates, []]
    assert decided(Plan("c", "m", 40, 0.1), data(np.repeat([1.0, 0.0], 20))).found.n == 7


@pytest.mark.parametrize(("lost", "said"), [(0.0, "equivalent"), (1.0, "holds")])
def test_few_groups_that_agree_exactly_are_not_certain(monkeypatch, lost, said):
    """Without a spread, a t test of two prompts had p = 1e-12."""
    for groups, each, expected in ((2, 1, "cannot tell"), (7, 14, said)):
        names = [str(group) for group in range(groups) for _ in range(each)]
        monkeypatch.setattr(Plan, "groups", lambda self, names=names: names)
        found = decided(Plan("c", "a", len(names), 0.1), data(np.full(len(names), lost)))
        assert -1 <= found.found.low < found.found.value + 1e-9
        assert found.found.value - 1e-9 < found.found.high <= 1
        assert verdict(found, found.found.p, found.p_equivalent) == expected


def test_differences_of_shares_stay_between_minus_one_and_one(monkeypatch):
    names = ["a", "a", "b", "b"]
    monkeypatch.setattr(Plan, "groups", lambda self: names)
    plan, values = Plan("c", "m", 4, 0.1), np.array([1.0, 0.0, 0.0, 0.0])
    found = decided(plan, data(values))
    assert (found.found.low, found.found.high, found.shown) == (-1.0, 1.0, np.inf)
    assert numbers(over_groups(values, names)) == (0.25, -1.0, 1.0)
    assert planned_power(plan, 1)["shown"] == np.inf


STUDIES, PER_GROUP = 600, 10


def outcomes_of(rng, between):
    """Differences of outcomes of 7 · 10 prompts, whose mean over all groups is 0.

    A prompt that a mask changes is lost with a chance that varies by group.
    """
    shift = np.repeat(rng.normal(0, between, 7), PER_GROUP)
    threshold = rng.random(7 * PER_GROUP)
    return np.where(threshold < 0.25 + shift / 2, 1.0, 0.0) - np.where(threshold > 0.75 + shift / 2, 1.0, 0.0)


def error_rate(plan, between, studies=STUDIES):
    """How often a plan finds a difference where there is none."""
    rng = np.random.default_rng(5)
    return np.mean([decided(plan, data(outcomes_of(rng, between))).found.p <= 0.05 for _ in range(studies)])


WITHIN_ERROR = 0.05 + 2.6 * np.sqrt(0.05 * 0.95 / STUDIES)  # one-sided 99.5 % of a rate of 5 %


@pytest.fixture
def seven_groups(monkeypatch):
    """Plans of prompts in seven groups; quick, since neither the power nor 2,000 resamples change an error rate."""
    groups = list(np.repeat([*"abcdefg"], PER_GROUP))
    monkeypatch.setattr(Plan, "groups", lambda self: [] if self.group == "none" else groups)
    monkeypatch.setattr(deciding, "smallest_t", lambda *given: 1.0)
    monkeypatch.setattr(deciding, "smallest_paired", lambda *given: 1.0)
    monkeypatch.setattr(estimates, "RESAMPLES", 200)


@pytest.mark.extended
@pytest.mark.usefixtures("seven_groups")
@pytest.mark.parametrize("between", [0.0, 0.1, 0.3])
def test_a_plan_with_groups_errs_in_at_most_five_percent_however_much_groups_vary(between):
    assert error_rate(Plan("c", "m", 70, 0.1), between) <= WITHIN_ERROR
    if between == 0.3:  # prompts as units find what is chance of the groups
        assert error_rate(Plan("c", "m", 70, 0.1, group="none"), between) > 0.15


@pytest.mark.parametrize(("shift", "expected"), [(0.0, 0.05), (0.8, None)])
def test_the_power_of_a_t_test_is_that_of_simulated_tests(shift, expected):
    values = np.random.default_rng(0).normal(shift, 1.0, (4000, 7))
    simulated = (abs(values.mean(1) / values.std(1, ddof=1) * np.sqrt(7)) > 2.446912).mean()
    assert t_power(shift, 7, 1.0) == pytest.approx(simulated, abs=0.025)
    assert expected is None or t_power(shift, 7, 1.0) == pytest.approx(expected, abs=1e-6)


def test_planned_power_falls_with_the_number_of_tests():
    plan = Plan("c", "m", 100, 0.1, group="none", expect={"against": 0.0, "between": 0.1})
    one, many = planned_power(plan, 1), planned_power(plan, 20)
    assert one["holds"] > many["holds"]
    assert one["equivalent"] >= many["equivalent"]
    assert many["shown"] > one["shown"]


def test_planned_power_of_groups():
    """Each group's variance is that between groups plus that of its prompts."""
    plan = Plan("c", "m", 70, 0.2, expect={"against": 0.05, "between": 0.1})
    within = 0.2 + 2 * 0.05
    assert planned_power(plan, 1)["holds"] == pytest.approx(t_power(0.2, 7, np.sqrt(0.01 + within / 10)))


def test_holms_correction_counts_unfinished_tests(tmp_path):
    plans = [{"claim": name, "prompts": ["x"]} for name in "abc"]
    runs = [begin(tmp_path, plan, tmp_path / plan["claim"]) for plan in plans]
    assert finish(runs[0], 0.01, float("nan")) == (3, pytest.approx(0.03), 1.0)
    assert finish(runs[1], 0.02, 0.5).p == pytest.approx(0.04)
    assert (len(sharing(tmp_path, {"prompts": ["x", "y"]})), sharing(tmp_path, {"prompts": ["y"]})) == (3, [])


def test_a_missing_result_is_no_verdict():
    nothing = Decision(Estimate(*[float("nan")] * 3, 0, float("nan")), float("nan"), float("inf"))
    assert verdict(nothing, 0.0, 0.0) == "cannot tell"


@pytest.mark.extended
def test_a_real_plan_masks_its_keys_and_every_control(tiny_llada, monkeypatch, tmp_path):
    plan = Plan("c", "tiny-llada", 2, 0.1, kind="digit")
    prompts = [problem.prompt for problem in held_out(2)]
    found = PlannedTest(plan=plan, settings={"gen_length": 6, "steps": 6}).run(tiny_llada, prompts, tmp_path)
    masks = found.measured["tiny-llada"]
    assert masks["pick"].values.tolist() == list(PICKS)
    assert (masks[["cost", "changed"]].sel(pick="nothing").to_array() == 0).all()
    assert (masks["removed"].sel(pick=["treated", "same_mass"]) > 0).all()
    assert (masks["keys"] > 0).all()
    assert decided(plan, masks).found.n == len(set(plan.groups()) or prompts)
