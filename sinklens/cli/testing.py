"""The command ``sinklens test``: a plan in, one report out.

Nothing is measured before the plan is stored, in the results folder and in the user's ledger of tests. An interrupted
test resumes, and a finished one prints its report again, corrected for the tests that there are by then.
"""

import argparse
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import add_loading, loading
from sinklens.errors import ControlWarning, SettingError, warn_caller

if TYPE_CHECKING:
    from sinklens.analyses.estimates.deciding import Decision
    from sinklens.analyses.estimates.plan import Plan
    from sinklens.analyses.tested import Corrected

REPORT = "test-report.md"


def add_test(command: argparse.ArgumentParser) -> None:
    """Add the options of ``test``."""
    command.add_argument("plan", metavar="PLAN", type=Path, help="the plan: a .yaml, .toml or .json file")
    command.add_argument("--out", type=Path, help="folder for the results and the stored plan (default: test-PLAN)")
    command.add_argument(
        "--tests", type=Path, metavar="FOLDER",
        help="ledger of all tests, which counts those on the same prompts (default: $SINKLENS_TESTS, or sinklens/tests "
        "in the user's folder for data)",
    )  # fmt: skip
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="check the plan, print its power, and stop: nothing is stored (default: no)",
    )
    add_loading(command, "dtype", "device")
    command.set_defaults(command=run_test)


def run_test(options: argparse.Namespace) -> None:
    """`sinklens test`."""
    from sinklens.analyses import tested
    from sinklens.analyses.estimates.deciding import decided
    from sinklens.analyses.estimates.plan import read_plan
    from sinklens.analyses.planned import PlannedTest
    from sinklens.evaluation.counting import Counts
    from sinklens.model import load
    from sinklens.utils.atomic import atomic_write
    from sinklens.utils.folders import check_folder

    plan = read_plan(options.plan)
    identity, ledger = plan.identity(), options.tests or tested.home()
    out = options.out or Path(f"test-{options.plan.stem}")
    prompts, answers = plan.texts(), plan.answers()
    _check_answers(plan, prompts, answers)
    others = tested.sharing(ledger, identity)
    tests = len(others) + all(run.what != identity for run in others)
    print("\n".join(power_lines(plan, tests)))
    if options.dry_run:
        return
    check_folder(out, "a study")
    run = tested.begin(ledger, identity, out)
    print(f"Plan {run.name} is stored in {out / tested.FILE} and counted in {ledger}.")
    study = PlannedTest(plan=plan, seed=plan.seed, settings=plan.settings, answers=answers)
    models = [load(name, **loading(options, name)) for name in (plan.model, *plan.seeds)]
    with counted_control_warnings(), Counts("prompts") as counts:
        try:
            findings = study.run(models, prompts, out, progress=counts)
        except KeyboardInterrupt:
            counts.stop(out, options.call)
    made = decided(plan, findings.measured)
    corrected = tested.finish(run, made.found.p, made.p_equivalent)
    lines = report_lines(plan, made, corrected, findings.tables["differences"])
    with atomic_write(out / REPORT) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(["", *lines, "", f"Written to {out / REPORT}; all tables: `sinklens table {out}`."]))


@contextmanager
def counted_control_warnings() -> Iterator[None]:
    """Issue each `ControlWarning` of a block once, at its end, with the number of times it was issued."""
    found: Counter[str] = Counter()
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, ControlWarning):
            found[str(message)] += 1
        else:
            shown(message, category, *place, **more)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ControlWarning)
            warnings.showwarning = show
            yield
    finally:
        for text, count in found.items():
            warn_caller(f"{text} ({count} time{'s' * (count > 1)})", ControlWarning)


def _check_answers(plan: "Plan", prompts: list[Any], answers: dict[str, str]) -> None:
    """Refuse a plan that counts right answers where none is known."""
    from sinklens.analyses.answers import known

    unknown = sum(not known(prompt, answers) for prompt in prompts)
    if plan.measure == "cost" and unknown:
        raise SettingError(
            f"measure: cost counts right answers, and {unknown} of {plan.n} prompts in {plan.prompts} have none. Give "
            f"each line a text under 'expected' or 'answer', or test measure: changed or kl."
        )


def power_lines(plan: "Plan", tests: int) -> list[str]:
    """What the plan can show, before anything is measured."""
    from sinklens.analyses.estimates.deciding import planned_power

    power = planned_power(plan, tests)
    what = "ratio" if plan.measure == "kl" else "difference"
    lines = [
        f"Claim: {plan.claim}",
        f"Tests on these prompts, this one included: {tests}.",
        f"Power beforehand, at the level of {0.05 / tests:.4g}: {power['holds']:.2f} for a true {what} of "
        f"{plan.of_interest:g}; {_shown(power['shown'], what)} with 0.80.",
    ]
    if not math.isnan(power["equivalent"]):
        lines.append(f"Without any true difference, it is found equivalent with {power['equivalent']:.2f}.")
    assumed = [f"{name} {value:g}" for name, value in plan.expect.items()]
    return [*lines, f"Assumed (expect): {', '.join(assumed)}."]


def report_lines(plan: "Plan", made: "Decision", corrected: "Corrected", differences: Any) -> list[str]:
    """The report."""
    from sinklens.analyses.estimates.deciding import verdict
    from sinklens.analyses.estimates.plan import TEMPLATE
    from sinklens.analyses.planned import MEASURES, PICKS

    found = made.found
    said = verdict(plan, made, corrected.p, corrected.p_equivalent)
    grouped = bool(plan.groups())
    units = "training runs" if plan.seeds else f"groups ({plan.group or TEMPLATE})" if grouped else "prompts"
    what = "ratio" if plan.measure == "kl" else "difference"
    lines = [
        f"# {said}: {plan.claim}",
        "",
        f"{what.capitalize()}: {found.value:.3f} [{found.low:.3f}, {found.high:.3f}] from {found.n} {units}; "
        f"{MEASURES[plan.measure]}; {PICKS['treated']} against {PICKS[plan.against]}.",
        f"p {found.p:.2g}, after correction for {corrected.tests} tests on these prompts {corrected.p:.2g}; "
        f"equivalence within {plan.of_interest:g}: {made.p_equivalent:.2g}, corrected {corrected.p_equivalent:.2g}.",
    ]
    if said == "cannot tell":
        few = made.shown > plan.of_interest
        why = "there are too few of them" if few else "their number is not the reason"
        lines.append(f"So many {units} {_show(made.shown, what)} with a probability of 0.80, before correction; {why}.")
    if not grouped and not plan.prompts:
        lines.append("The shipped problems have seven templates; this holds for these templates only.")
    if not plan.seeds:
        lines.append(f"It is about {plan.model}, one training run.")
    lines += ["", "Against every control (not tested, 95 % intervals):", ""]
    rows = differences[differences["measure"] == plan.measure]
    for row in rows.itertuples():
        lines.append(f"- {row.model}, {PICKS[row.control]}: {row.estimate:.3f} [{row.low:.3f}, {row.high:.3f}]")
    return lines


def _shown(value: float, what: str) -> str:
    return f"no {what} is found" if math.isinf(value) else f"{what}s from {value:.2f} are found"


def _show(value: float, what: str) -> str:
    return f"show no {what}" if math.isinf(value) else f"show {what}s from {value:.2f}"
