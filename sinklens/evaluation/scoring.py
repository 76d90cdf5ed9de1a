"""Verdicts on generated programs: each is run in isolation (sandbox.py), after generation and only on request.

`score` reads the programs of a ledger's code tasks, runs those that have no verdict yet, and appends one record each to
``verdicts-N.jsonl`` beside the generations: whether the tests held, what happened, and which isolation was in force.
`verdicts` gives the verdicts of a run's records, whichever way they were reached.

One way this misleads: a time limit is a verdict too. A program that is right and slow fails, and on a busy machine more
of them are slow; the record keeps the seconds.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sinklens.errors import LedgerError
from sinklens.evaluation.ledger import LedgerRun, Record, Writer
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.evaluation.sandbox import Limits, run_program
from sinklens.tasks import CodeSample, CodeTask

Report = Callable[[LedgerRun, int, int], None]


def score(
    ledger: str | Path,
    *,
    paths: Mapping[str, str | Path] | None = None,
    limits: Limits | None = None,
    require: str = "namespaces",
    progress: Report | None = None,
) -> int:
    """Run the generated programs of a ledger that have no verdict yet. **This executes what a model wrote.**

    Args:
        ledger: folder of the records.
        paths: local files of published tasks, by the task's name.
        limits: what a program may use.
        require: the weakest isolation to accept; see `run_program`.
        progress: called with a run, its programs done and its programs in all.

    Returns:
        How many programs were run.

    Raises:
        LedgerError: there is no ledger, or its samples are not those of the task.
        SinklensError: the isolation cannot be had.
    """
    ran = 0
    for run in LedgerRun.all(Path(ledger)):
        task = task_of(run, paths or {})
        if isinstance(task, CodeTask):
            ran += _score_run(run, task, limits, require, progress)
    return ran


def task_of(run: LedgerRun, paths: Mapping[str, str | Path]) -> Any:
    """The task that a run's records answer.

    Raises:
        SettingError: this version does not know it.
    """
    asked = run.what["protocol"]
    protocol = EvalProtocol(asked["name"], asked["task"], shots=asked["shots"], extractor=asked["extractor"])
    return protocol.make_task(paths.get(asked["task"]))


def _score_run(run: LedgerRun, task: CodeTask, limits: Limits | None, require: str, progress: Report | None) -> int:
    with Writer(run, kind="verdicts") as writer:
        records, done = run.records(), verdicts(run)
        left = [record for record in records if record["sample"] not in done]
        samples = {sample.id: sample for sample in task.samples()} if left else {}
        for number, record in enumerate(left, len(records) - len(left) + 1):
            writer.add(_judge(record, samples, task, limits, require))
            if progress is not None:
                progress(run, number, len(records))
    return len(left)


def _judge(
    record: Record, samples: Mapping[str, Any], task: CodeTask, limits: Limits | None, require: str
) -> dict[str, Any]:
    sample = samples.get(record["sample"])
    if not isinstance(sample, CodeSample):
        raise LedgerError(f"sample {record['sample']} is none of the task {task.name}; give the data it was made from.")
    if hashlib.sha256((sample.prompt + sample.opening).encode()).hexdigest() != record["prompt_sha256"]:
        raise LedgerError(f"sample {sample.id} had another prompt when it was answered; give the data of that time.")
    program = f"{sample.stub}{task.extract(record['text'])}"
    outcome = run_program(
        program, sample.test, sample.entry_point, helpers=sample.stub, limits=limits or Limits(), require=require
    )
    return {
        "sample": sample.id,
        "verdict": outcome.passed,
        "status": outcome.status,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
        "isolation": str(outcome.isolation),
        "program_sha256": hashlib.sha256(program.encode()).hexdigest(),
        "text_sha256": _text_hash(record),
    }


def verdicts(run: LedgerRun) -> dict[str, bool]:
    """The verdict of every record of a run that has one, by sample.

    A program that was not run yet has none; nor has one that was generated anew since.
    """
    records = run.records()
    found = {str(record["sample"]): record["verdict"] for record in records}
    if None in found.values():
        later = {(str(one["sample"]), one["text_sha256"]): one["verdict"] for one in run.every("verdicts")}
        for record in records:
            if record["verdict"] is None:
                found[str(record["sample"])] = later.get((str(record["sample"]), _text_hash(record)))
    return {sample: bool(verdict) for sample, verdict in found.items() if verdict is not None}


def _text_hash(record: Record) -> str:
    return hashlib.sha256(record["text"].encode()).hexdigest()
