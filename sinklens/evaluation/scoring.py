"""Verdicts on generated programs: each runs in isolation (sandbox/), after generation and only on request.

`score` reads the programs of a ledger's code tasks, runs those without a verdict, and adds one record for each to the
ledger, beside the generations: whether the tests passed, what happened, and which isolation was used.
`verdicts` returns the verdicts of a run's records, whether decided from the text or by running a program.

Caveat: a timeout counts as a failure. A correct but slow program fails, and more programs are slow on a busy machine;
the record stores the seconds.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinklens.errors import LedgerError, require
from sinklens.evaluation.checked import evaluations, records_of
from sinklens.evaluation.ledger import LedgerRecord, LedgerRun, Writer
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.evaluation.sandbox import Limits, run_program
from sinklens.tasks.base import CodeSample, CodeTask
from sinklens.tasks.prompts import prompt_hash
from sinklens.tasks.registry import reads_files
from sinklens.utils.arguments import checked
from sinklens.utils.progress import Progress, reporting


@checked
def score(
    ledger: str | Path,
    *,
    data: str | Path | None = None,
    limits: Limits | None = None,
    progress: Progress = None,
) -> int:
    """Run the generated programs of a ledger that have no verdict yet. **This executes model-written code.**

    Args:
        ledger: folder of the records.
        data: local file or folder of the published task.
        limits: resource limits of each program.
        progress: as in `sinklens.generate`; a function is called with a run, its number of finished programs and its
            total.

    Returns:
        The number of programs that were run.

    Raises:
        LedgerError: there is no ledger, or its samples are not those of the task.
        SinklensError: isolation is not available.
    """
    ran = 0
    for run in evaluations(ledger):
        given = {name: run.what["protocol"][name] for name in ("name", "task", "shots", "extractor")}
        task: Any = EvalProtocol(**given).make_task(data if reads_files(given["task"]) else None)
        if not isinstance(task, CodeTask):
            continue
        shown = reporting(progress, "programs", lambda run: f"{run.what['model']}, {run.what['condition']['name']}")
        with Writer(run, kind="verdicts") as writer, shown as report:
            records, done = records_of(run), verdicts(run)
            left = [record for record in records if record["sample"] not in done]
            samples = {sample.id: sample for sample in task.samples()} if left else {}
            for number, record in enumerate(left, len(records) - len(left) + 1):
                writer.add(_judge(record, samples, task, limits))
                report(run, number, len(records))
        ran += len(left)
    return ran


def _judge(record: LedgerRecord, samples: Mapping[str, Any], task: CodeTask, limits: Limits | None) -> dict[str, Any]:
    sample = samples.get(record["sample"])
    if not isinstance(sample, CodeSample):
        raise LedgerError(
            f"sample {record['sample']} is not in the task {task.name}; give the data that it was evaluated on."
        )
    require(
        prompt_hash(sample) == record["prompt_sha256"],
        f"sample {sample.id} had another prompt when it was evaluated; give the data that it was evaluated on.",
        LedgerError,
    )
    program = f"{sample.stub}{task.extract(record['text'])}"
    outcome = run_program(
        program, sample.test, sample.entry_point, helpers=sample.stub, limits=limits,
        reference=f"{sample.stub}{sample.reference}",
    )  # fmt: skip
    return {
        "sample": sample.id,
        "verdict": outcome.passed,
        "status": outcome.status,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
        "isolation": str(outcome.isolation),
        "program_sha256": _sha256(program),
        "text_sha256": _sha256(record["text"]),
    }


def verdicts(run: LedgerRun) -> dict[str, bool]:
    """The verdicts of a run's records, by sample, for those that have one.

    A program that was not run yet has no verdict, and neither has one that was regenerated since it ran.
    """
    records = records_of(run)
    found = {str(record["sample"]): record["verdict"] for record in records}
    if None in found.values():
        later = {(str(one["sample"]), one["text_sha256"]): one["verdict"] for one in records_of(run, "verdicts")}
        for record in records:
            if record["verdict"] is None:
                found[str(record["sample"])] = later.get((str(record["sample"]), _sha256(record["text"])))
    return {sample: bool(verdict) for sample, verdict in found.items() if verdict is not None}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
