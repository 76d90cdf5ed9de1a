"""`evaluate`: do what a ledger lacks, and nothing twice.

The missing units of all conditions become batches, an *engine* carries them out, and the records are written by this
process alone as they come. Engines: `InProcess`, or on many GPUs and machines `OnRay` (distributed.py). A kill loses at
most the batches in flight; the next start does what is missing.

Without an engine for many machines, work can be divided by *shards*: process i of n takes every n-th sample and writes
a file of its own.

One way this fails: two processes that were given the same shard. The second is told so at once and stops.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sinklens.errors import LedgerError, SettingError
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.ledger import LedgerRun, Record, Writer
from sinklens.evaluation.protocols import EvalProtocol, find_protocol
from sinklens.evaluation.units import Batch, batches, carry_out, identity, prompt_hash, reference_hash
from sinklens.model import load
from sinklens.tasks import Sample, Task

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True)
class Job:
    """All that an engine has to know; it can be sent to another process if `source` is a name or a folder.

    Attributes:
        source: what `sinklens.load` takes.
        load: keywords of `sinklens.load`.
        task, protocol, seed: as in `evaluate`.
    """

    source: Any
    load: dict[str, Any]
    task: Task
    protocol: EvalProtocol
    seed: int


@runtime_checkable
class Engine(Protocol):
    """Who holds the model and runs it."""

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """What the ledger tells the runs of these conditions apart by; see `units.identity`."""

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterable[tuple[Batch, list[Record]]]:
        """Each batch with its records, in any order."""


class InProcess:
    """Carries out batches one after the other in this process.

    Attributes:
        model: what runs; loaded when it is first needed.
    """

    def __init__(self) -> None:
        self.model: Model | None = None

    def load(self, job: Job) -> "Model":
        """The job's model."""
        if self.model is None:
            self.model = load(job.source, **job.load)
        return self.model

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """See `Engine`."""
        shared = identity(self.load(job), conditions[0], job.task, job.protocol, job.seed)
        return [shared | {"condition": condition.described()} for condition in conditions]

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterator[tuple[Batch, list[Record]]]:
        """See `Engine`."""
        for batch in work:
            yield batch, carry_out(self.load(job), job.task, job.protocol, batch, job.seed)


Report = Callable[[Condition, int, int], None]


def evaluate(
    model: Any,
    protocol: EvalProtocol | str,
    conditions: Sequence[Condition],
    ledger: str | Path,
    *,
    task: Task | None = None,
    limit: int | None = None,
    batch: int = 25,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    engine: Engine | None = None,
    load: dict[str, Any] | None = None,
    progress: Report | None = None,
) -> list[LedgerRun]:
    """Evaluate a model on a task under each condition.

    Args:
        model: what `sinklens.load` takes.
        protocol: how the task is put; or its name, or a task's.
        conditions: what is done to the model, e.g. ``masking([0, 1, 5, 10], controls=["random"])``.
        ledger: folder of the records; what it holds already is not done again.
        task: the protocol's task, read from local files; by default `EvalProtocol.make_task`.
        limit: the first so many samples.
        batch: samples per run of the model; with ``threshold=`` interventions get one, since rows that wait for others
            would see more steps than alone.
        seed: of sampling; the same for every condition.
        shard: (number, of how many): every n-th sample, into a file of its own.
        engine: who carries the batches out; None for this process.
        load: keywords of `sinklens.load`.
        progress: called with a condition, its samples done and its samples in all.

    Returns:
        The ledger's run of each condition.

    Raises:
        LedgerError: another process writes the same shard, the disk is full, or the ledger was begun with other data;
            what was finished is kept.
        SettingError: no sample, no condition, or a shard that does not exist.
    """
    engine = engine or InProcess()
    plan = _plan(model, protocol, conditions, Path(ledger), task, limit, batch, seed, shard, load, engine)
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(run.begin(), shard[0])) for run in plan.runs]
        work = plan.missing()  # after the locks: nobody else is at it any more
        done = [len(plan.samples) - sum(len(b.samples) for b in work if b.condition is c) for c in conditions]
        for place, condition in enumerate(conditions):
            if progress is not None:
                progress(condition, done[place], len(plan.samples))
        for finished, records in engine.carry_out(plan.job, work) if work else ():
            place = plan.place(finished.condition)
            for record in records:
                writers[place].add(record)
            done[place] += len(records)
            if progress is not None:
                progress(conditions[place], done[place], len(plan.samples))
    return plan.runs


@dataclass(frozen=True)
class Estimate:
    """What an evaluation will take, from a few units that were measured.

    Attributes:
        units: samples times conditions that the ledger lacks.
        tokens: positions that they will generate.
        passes: forward passes, of one row each.
        seconds: for all units, one batch after the other in this process; loading the model not counted.
        measured: units that were run to know.
    """

    units: int
    tokens: int
    passes: int
    seconds: float
    measured: int


def estimate(
    model: Any,
    protocol: EvalProtocol | str,
    conditions: Sequence[Condition],
    ledger: str | Path,
    *,
    task: Task | None = None,
    limit: int | None = None,
    batch: int = 25,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    load: dict[str, Any] | None = None,
) -> Estimate:
    """What `evaluate` would take with the same arguments; two batches of middling length are run, nothing is written.

    They run under the first and the last condition that have units left, each after a shorter one to warm up.
    """
    engine = InProcess()
    plan = _plan(model, protocol, conditions, Path(ledger), task, limit, batch, seed, shard, load, engine)
    work = plan.missing()
    if not work:
        return Estimate(0, 0, 0, 0.0, 0)
    held, job = engine.load(plan.job), plan.job
    seconds: list[float] = []
    measured: list[Record] = []
    left = [part for part in (_of(work, condition) for condition in conditions) if part]
    for part in (left[0], left[-1]) if len(left) > 1 else left:
        sample = part[len(part) // 2]
        carry_out(held, job.task, job.protocol, Batch(sample.condition, sample.samples[:1]), seed)
        started = time.perf_counter()
        records = carry_out(held, job.task, job.protocol, sample, seed)
        seconds.append((time.perf_counter() - started) / len(records))
        measured += records
    units = sum(len(one.samples) for one in work)
    each = units / len(measured)
    return Estimate(
        units=units,
        tokens=round(each * sum(len(record["tokens"]) for record in measured)),
        passes=round(each * sum(record["steps"] for record in measured)),
        seconds=units * sum(seconds) / len(seconds),
        measured=len(measured),
    )


@dataclass(frozen=True)
class _Plan:
    """An evaluation before it begins."""

    job: Job
    conditions: Sequence[Condition]
    samples: list[Sample]
    runs: list[LedgerRun]
    batch: int

    def place(self, condition: Condition) -> int:
        return next(place for place, own in enumerate(self.conditions) if own == condition)

    def missing(self) -> list[Batch]:
        """Units without a record, condition by condition."""
        found: list[Batch] = []
        for condition, run in zip(self.conditions, self.runs, strict=True):
            done = {str(record["sample"]): record for record in run.records()}
            for sample in self.samples:
                if sample.id in done:
                    _check_same(sample, done[sample.id], run)
            left = [sample for sample in self.samples if sample.id not in done]
            waits = run.what["settings"].get("threshold") is not None  # and interventions count the steps of waiting
            found += batches(condition, left, 1 if waits and condition.hooks else self.batch)
        return found


def _plan(
    model: Any,
    protocol: EvalProtocol | str,
    conditions: Sequence[Condition],
    ledger: Path,
    task: Task | None,
    limit: int | None,
    batch: int,
    seed: int,
    shard: tuple[int, int],
    load: dict[str, Any] | None,
    engine: Engine,
) -> _Plan:
    protocol = find_protocol(protocol) if isinstance(protocol, str) else protocol
    task = task or protocol.make_task()
    if task.name != protocol.task:
        raise SettingError(f"the protocol {protocol.name} is for the task {protocol.task}; got {task.name}.")
    number, parts = shard
    if parts < 1:
        raise SettingError(f"work is divided into at least 1 shard; got {parts}.")
    if not 0 <= number < parts:
        raise SettingError(f"shards of {parts} are numbered 0 to {parts - 1}; got {number}.")
    if batch < 1:
        raise SettingError(f"a batch holds at least 1 sample; got {batch}.")
    names = [condition.name for condition in conditions]
    if not names or len(set(names)) < len(names):
        raise SettingError(f"an evaluation needs conditions of different names; got {names}.")
    samples = list(task.samples(limit))[number::parts]
    twice = next((name for name, count in Counter(sample.id for sample in samples).items() if count > 1), None)
    if twice is not None:
        raise SettingError(f"the task {task.name} has several samples called {twice!r}; each needs a name of its own.")
    if not samples:
        raise SettingError(f"there is no sample for shard {number} of {parts}; the task {task.name} has too few.")
    job = Job(model, load or {}, task, protocol, seed)
    runs = [LedgerRun.of(ledger, what) for what in engine.identities(job, conditions)]
    return _Plan(job, conditions, samples, runs, batch)


def _check_same(sample: Sample, record: Record, run: LedgerRun) -> None:
    """Refuse data in which a sample is not the one that was answered; older records do not say what was expected."""
    asks = record["prompt_sha256"] == prompt_hash(sample)
    if not asks or record.get("reference_sha256", reference_hash(sample)) != reference_hash(sample):
        what = "another expected answer" if asks else "another prompt"
        raise LedgerError(
            f"{run.folder} has an answer to {sample.id}, but to {what}: it was begun with other data. Give those, or "
            f"another folder (--out) for these."
        )


def _of(work: Sequence[Batch], condition: Condition) -> list[Batch]:
    return [batch for batch in work if batch.condition == condition]
