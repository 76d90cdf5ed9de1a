"""The ledger of tests: every plan that was begun, and its result, in one place for all folders.

Testing ten claims on the same prompts and reporting the one that holds is the same mistake whether they are tested in
one folder or in ten. So every plan is stored before its first run in a ledger of the user (`home`), and a report
corrects for all plans with which it shares a prompt, finished or not, by Holm's method.

Pitfall: later tests on the same prompts change the correction of earlier ones; run an earlier plan again, which
measures nothing, for its present verdict. Studies (`sinklens analyse`) are not counted.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sinklens.errors import SettingError
from sinklens.evaluation.ledger import LedgerRun, Writer, holds_runs
from sinklens.utils.arguments import read_as
from sinklens.utils.atomic import atomic_write
from sinklens.utils.documents import read_json
from sinklens.utils.estimates import holm

VARIABLE = "SINKLENS_TESTS"
FILE = "plan.json"


class Corrected(NamedTuple):
    """A result among all tests on its prompts.

    Attributes:
        tests: number of plans that share a prompt with it, itself included.
        p, p_equivalent: p values after Holm's correction over them; a plan without a result counts with 1.
    """

    tests: int
    p: float
    p_equivalent: float


def home() -> Path:
    """The folder of the ledger: ``$SINKLENS_TESTS``, or ``sinklens/tests`` in the user's folder for data."""
    given = os.environ.get(VARIABLE)
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Path(given) if given else data / "sinklens" / "tests"


def begin(ledger: Path, identity: Mapping[str, Any], out: Path) -> LedgerRun:
    """Store a plan in the ledger and in `out`, before anything is measured.

    Raises:
        SettingError: `out` holds another plan.
        LedgerError: the ledger cannot be written.
    """
    file = out / FILE
    if file.exists():
        before = read_as(dict, f"the plan in {file}", read_json(file).get("plan"))
        changed = [name for name in sorted({*before, *identity}) if before.get(name) != identity.get(name)]
        if changed:
            raise SettingError(
                f"{out} was begun with another plan; changed since: {', '.join(changed)}. A plan cannot change after "
                f"its first run. Restore it, or give another folder (--out): that is another test, and is counted."
            )
    run = LedgerRun.of(ledger, identity).begin()
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as part:
            part.write_text(json.dumps({"name": run.name, "plan": identity}, indent=1, sort_keys=True) + "\n")
    return run


def sharing(ledger: Path, identity: Mapping[str, Any]) -> list[LedgerRun]:
    """All plans in the ledger that share a prompt with a plan."""
    if not holds_runs(ledger):
        return []
    prompts = set(identity["prompts"])
    return [run for run in LedgerRun.all(ledger) if prompts & set(run.what["prompts"])]


def finish(run: LedgerRun, p: float, p_equivalent: float) -> Corrected:
    """Store the result of a plan, and correct it for all tests that share its prompts."""
    with Writer(run, kind="verdicts") as writer:
        known = [1.0 if math.isnan(value) else value for value in (p, p_equivalent)]  # NaN: nothing was measured
        writer.add({"sample": "result", "p": known[0], "p_equivalent": known[1]})
    others = sharing(run.folder, run.what)
    results = [next(iter(one.records("verdicts")), {"p": 1.0, "p_equivalent": 1.0}) for one in others]
    place = [one.name for one in others].index(run.name)
    both = [holm([result[name] for result in results])[place] for name in ("p", "p_equivalent")]
    return Corrected(len(others), *both)
