"""The command ``sinklens test``: it carries out a plan and reports one verdict.

Nothing is measured before the plan is stored, in the results folder and in the user's ledger of tests. An interrupted
test resumes, and a finished one prints its report again, corrected for all tests that the ledger holds by then.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import Call, Device, fitted
from sinklens.errors import require
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import in_markdown, say

if TYPE_CHECKING:
    from sinklens.analyses.estimates.deciding import Decision
    from sinklens.analyses.estimates.plan import Plan
    from sinklens.analyses.tested import Corrected

REPORT = "test-report.md"


def run_plan(
    plan: Path,
    /,
    *,
    call: Call,
    out: Path | None = None,
    tests: Path | None = None,
    dry_run: bool = False,
    loading: Device | None = None,
) -> None:
    """Test one claim with a plan that is stored beforehand.

    Args:
        plan: the plan: a .yaml or .json file
        out: folder for the results and the stored plan (default: test-PLAN)
        tests: ledger of all tests, which counts those on the same prompts (default: $SINKLENS_TESTS, or sinklens/tests
            in the user's folder for data)
        dry_run: check the plan and print its power; nothing is stored
    """
    from sinklens.analyses import tested
    from sinklens.analyses.answers import known
    from sinklens.analyses.estimates.deciding import decided
    from sinklens.analyses.estimates.plan import read_plan
    from sinklens.analyses.planned import PlannedTest
    from sinklens.evaluation.counting import counting
    from sinklens.model import load
    from sinklens.utils.folders import check_folder

    asked, folder = read_plan(plan), out or Path(f"test-{plan.stem}")
    identity, ledger = asked.identity(), tests or tested.home()
    prompts, answers = asked.texts(), asked.answers()
    unknown = sum(not known(prompt, answers) for prompt in prompts)
    require(
        asked.measure != "cost" or not unknown,
        f"measure: cost counts right answers, and {unknown} of {asked.n} prompts in {asked.prompts} have none. "
        f"Give each line a text under 'expected' or 'answer', or test measure: changed.",
    )
    others = tested.sharing(ledger, identity)
    say(*power_lines(asked, len(others) + all(run.what != identity for run in others)))
    if dry_run:
        return
    check_folder(folder, "a study")
    run = tested.begin(ledger, identity, folder)
    say(f"Plan {run.name} is stored in {folder / tested.FILE} and counted in {ledger}.")
    study = PlannedTest(plan=asked, seed=asked.seed, settings=asked.settings, answers=answers)
    model = load(asked.model, **fitted(asked.model, loading))
    with counting("prompts", folder, call) as count:
        findings = study.run(model, prompts, folder, progress=count)
    (measured,) = findings.measured.values()
    made = decided(asked, measured)
    corrected = tested.finish(run, made.found.p, made.p_equivalent)
    lines = report_lines(asked, made, corrected, findings.tables["differences"], float(measured["base"].sum()))
    write_file(folder / REPORT, "\n".join(lines) + "\n")
    say("", *lines, "", f"Written to {folder / REPORT}; all tables: `sinklens table {folder}`.")


def power_lines(plan: "Plan", tests: int) -> list[str]:
    """What the plan can show, before anything is measured."""
    from sinklens.analyses.estimates.deciding import planned_power

    power = planned_power(plan, tests)
    shown = "no difference is found" if math.isinf(power["shown"]) else f"those from {power['shown']:.2f} are found"
    lines = [
        f"Claim: {plan.claim}",
        f"Tests on these prompts, this one included: {tests}.",
        f"Power beforehand, at the level of {0.05 / tests:.4g}: {power['holds']:.2f} for a true difference of "
        f"{plan.of_interest:g}; {shown} with 0.80.",
    ]
    equivalent = f"Without any true difference, it is found equivalent with {power['equivalent']:.2f}."
    lines += [equivalent] * (not math.isnan(power["equivalent"]))
    return [*lines, f"Assumed (expect): {', '.join(f'{name} {value:g}' for name, value in plan.expect.items())}."]


def report_lines(plan: "Plan", made: "Decision", corrected: "Corrected", differences: Any, right: float) -> list[str]:
    """The report; `right`: how many prompts are answered right with nothing masked."""
    from sinklens.analyses.estimates.deciding import verdict
    from sinklens.analyses.estimates.plan import TEMPLATE
    from sinklens.analyses.planned import MEASURES, PICKS

    found = made.found
    said = verdict(made, corrected.p, corrected.p_equivalent)
    grouped = bool(plan.groups())
    units = f"groups ({in_markdown(plan.group or TEMPLATE)})" if grouped else "prompts"
    lines = [
        f"# {said}: {in_markdown(plan.claim)}",
        "",
        f"Difference: {found.value:.3f} [{found.low:.3f}, {found.high:.3f}] from {found.n} {units}; "
        f"{MEASURES[plan.measure]}; {PICKS['treated']} against {PICKS[plan.against]}.",
        f"p {found.p:.2g}, after correction for {corrected.tests} tests on these prompts {corrected.p:.2g}; "
        f"equivalence within {plan.of_interest:g}: {made.p_equivalent:.2g}, corrected {corrected.p_equivalent:.2g}.",
        *[f"With nothing masked, {right:.0f} of {plan.n} prompts are answered right."] * (plan.measure == "cost"),
    ]
    if said == "cannot tell":
        shown = "no difference" if math.isinf(made.shown) else f"differences from {made.shown:.2f}"
        why = "there are too few of them" if made.shown > plan.of_interest else "their number is not the reason"
        lines.append(f"So many {units} show {shown} with a probability of 0.80, before correction; {why}.")
    only = "The shipped problems have seven templates; this holds for these templates only."
    lines += [only] * (not grouped and not plan.prompts) + [f"It is about {in_markdown(plan.model)}, one training run."]
    against = [
        f"- {in_markdown(row.model)}, {PICKS[row.control]}: {row.estimate:.3f} [{row.low:.3f}, {row.high:.3f}]"
        for row in differences[differences["measure"] == plan.measure].itertuples()
    ]
    return [*lines, "", "Against every control (not tested, 95 % intervals):", "", *against]
