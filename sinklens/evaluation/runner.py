"""`evaluate`: run the samples that a ledger lacks, skipping finished ones.

The missing units of all conditions become batches, an *engine* runs them, and this process alone writes the records as
they arrive. The engines are `InProcess` and, for many GPUs and machines, `OnRay` (distributed.py). A kill loses at most
the batches in flight; rerun to resume.

Without an engine for several machines, work can be divided into *shards*: process i of n takes every n-th sample, and
all write into one ledger.

Pitfall: two processes must not share a shard. The second one stops at once with an error.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sinklens.errors import ControlWarning, LedgerError, SettingError, warn_caller
from sinklens.evaluation.conditions import Condition, under_caches, unpaired
from sinklens.evaluation.ledger import LedgerRecord, LedgerRun, Writer, data_difference, holds_runs
from sinklens.evaluation.protocols import EvalProtocol, find_protocol
from sinklens.evaluation.units import Batch, batches, carry_out, identities
from sinklens.model import load
from sinklens.sampling import Policy
from sinklens.tasks.base import Sample, Task
from sinklens.tasks.prompts import prompt_hash, reference_hash
from sinklens.utils.arguments import Seed, read_as
from sinklens.utils.folders import check_folder
from sinklens.utils.integers import as_integer

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True)
class Job:
    """Everything an engine needs; it can be sent to another process if `source` is a name or a folder.

    Attributes:
        source: the model, as `sinklens.load` takes it.
        load: keyword arguments of `sinklens.load`.
        task, protocol, seed: as in `evaluate`.
    """

    source: Any
    load: dict[str, Any]
    task: Task
    protocol: EvalProtocol
    seed: int


@runtime_checkable  # arguments of this type are checked in tests
class Engine(Protocol):
    """Interface of what holds the model and runs batches."""

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """The identity of each condition's run in the ledger; see `units.identities`."""

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterable[tuple[Batch, list[LedgerRecord]]]:
        """Yield each batch with its records, in any order."""


class InProcess:
    """Runs batches one after the other in this process.

    Attributes:
        model: the model; None until it is first needed and loaded.
    """

    def __init__(self) -> None:
        self.model: Model | None = None

    def load(self, job: Job) -> "Model":
        """The job's model, loaded once."""
        if self.model is None:
            self.model = load(job.source, **job.load)
        return self.model

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        return identities(self.load(job), conditions, job.task, job.protocol, job.seed)

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterator[tuple[Batch, list[LedgerRecord]]]:
        for batch in work:
            yield batch, carry_out(self.load(job), job.task, job.protocol, batch, job.seed)


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
    load: dict[str, Any] | None = None,
    cache: str | Policy | Sequence[str | Policy] = (),
    engine: Engine | None = None,
    progress: Callable[[Condition, int, int], None] | None = None,
) -> list[LedgerRun]:
    """Evaluate a model on a task under each condition.

    Args:
        model: the model, as `sinklens.load` takes it.
        protocol: the evaluation protocol, or the name of a protocol or task.
        conditions: interventions to compare, e.g. ``masking([0, 1, 5, 10], controls=["random"])``.
        ledger: folder of the records; samples that have a record there are skipped.
        task: the protocol's task, read from local files; by default `EvalProtocol.make_task`.
        limit: evaluate only the first `limit` samples.
        batch: samples per run of the model; 1 for conditions with interventions if ``threshold=`` is set or there are
            several canvases, since rows that wait for others would see more steps than alone.
        seed: for sampling; the same for every condition.
        shard: (index, number of shards): evaluate every n-th sample; one process may evaluate a shard at a time.
        load: keyword arguments of `sinklens.load`.
        cache: cache policies or their names; every condition is evaluated exactly and under each of them, see
            `under_caches`.
        engine: runs the batches; None for this process.
        progress: called with a condition, its number of finished samples and its total.

    Returns:
        The ledger's run of each condition.

    Raises:
        SinklensError: `ledger` cannot be written, or holds results of another kind.
        LedgerError: another process is writing the same shard, the disk is full, or the ledger was started with other
            data; finished samples are kept.
        SettingError: there is no sample or no condition, the shard does not exist, the task is not the protocol's, or
            the model cannot run under a cache policy.

    Warns:
        ControlWarning: a condition is a control of one that is neither among these nor in the ledger.
    """
    engine = engine or InProcess()
    check_folder(ledger, "an evaluation")
    plan = _planned(engine, model, protocol, conditions, ledger, task, limit, batch, seed, shard, load, cache)
    earlier = LedgerRun.all(Path(ledger)) if holds_runs(Path(ledger)) else []
    controls = {one.name: one.control_of for one in plan.conditions}
    if note := unpaired(controls, {*controls, *(run.what["condition"]["name"] for run in earlier)}):
        warn_caller(note, ControlWarning)
    report, total = progress or (lambda condition, done, total: None), len(plan.samples)
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(run.begin(), shard[0])) for run in plan.runs]
        work = plan.missing()  # after locking: no other process is writing these shards
        done = [len({sample.id for sample in plan.samples} & run.done()) for run in plan.runs]
        for condition, number in zip(plan.conditions, done, strict=True):
            report(condition, number, total)
        for finished, records in engine.carry_out(plan.job, work) if work else ():
            place = list(controls).index(finished.condition.name)
            writers[place].add(*records)
            done[place] += len(records)
            report(plan.conditions[place], done[place], total)
    return plan.runs


@dataclass(frozen=True)
class Cost:
    """The cost of an evaluation, extrapolated from a few measured units.

    Attributes:
        units: samples times conditions that the ledger lacks.
        tokens: positions to generate.
        passes: forward passes of one row each.
        seconds: time for all units, one batch after the other in this process; excludes loading the model.
        measured: units that were run for the estimate.
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
    cache: str | Policy | Sequence[str | Policy] = (),
) -> Cost:
    """Estimate the cost of `evaluate` with the same arguments by running two batches of medium length; writes nothing.

    The batches run under the first and the last condition that have units left, each after a one-row warm-up run.
    """
    engine = InProcess()
    plan = _planned(engine, model, protocol, conditions, ledger, task, limit, batch, seed, shard, load, cache)
    parts: dict[str, list[Batch]] = {}
    for one in plan.missing():
        parts.setdefault(one.condition.name, []).append(one)
    if not parts:
        return Cost(0, 0, 0, 0.0, 0)
    seconds, measured = list[float](), list[LedgerRecord]()
    for name in dict.fromkeys((next(iter(parts)), list(parts)[-1])):
        middle = parts[name][len(parts[name]) // 2]
        warm_up = Batch(middle.condition, middle.samples[:1])
        for work, keep in ((warm_up, False), (middle, True)):
            started = time.perf_counter()
            ((_, records),) = engine.carry_out(plan.job, [work])
            if keep:
                seconds.append((time.perf_counter() - started) / len(records))
                measured += records
    units = sum(len(one.samples) for part in parts.values() for one in part)
    each = units / len(measured)
    return Cost(
        units=units,
        tokens=round(each * sum(len(record["tokens"]) for record in measured)),
        passes=round(each * sum(record["steps"] for record in measured)),
        seconds=units * sum(seconds) / len(seconds),
        measured=len(measured),
    )


@dataclass(frozen=True)
class _Plan:
    """An evaluation before it starts."""

    job: Job
    conditions: list[Condition]
    samples: list[Sample]
    runs: list[LedgerRun]
    batch: int

    def missing(self) -> list[Batch]:
        """Units without a record, condition by condition.

        Raises:
            LedgerError: a sample differs from the recorded one.
        """
        found: list[Batch] = []
        for condition, run in zip(self.conditions, self.runs, strict=True):
            done, left = {str(record["sample"]): record for record in run.records()}, list[Sample]()
            for sample in self.samples:
                if sample.id not in done:
                    left.append(sample)
                    continue
                here = {"prompt_sha256": prompt_hash(sample), "reference_sha256": reference_hash(sample)}
                if difference := data_difference(done[sample.id], here):
                    raise LedgerError(
                        f"{run.folder} has a record of {sample.id} with another {difference}, so it was started with "
                        f"other data. Use that data, or another folder (--out)."
                    )
            found += batches(condition, left, 1 if condition.hooks and _waits(run.what) else self.batch)
        return found


def _waits(what: Mapping[str, Any]) -> bool:
    """Whether rows of a run may wait for others of their batch, in steps that interventions would see."""
    settings = what["settings"]
    if "canvas_length" in settings:  # until every row has finished its canvas; after the last one nothing follows
        return bool(settings["gen_length"] > settings["canvas_length"])
    return any(settings.get(name) is not None for name in ("threshold", "factor"))


def _planned(
    engine: Engine, model: Any, protocol: Any, conditions: Sequence[Condition], ledger: str | Path, task: Any,
    limit: int | None, batch: int, seed: int, shard: Any, load: dict[str, Any] | None, cache: Any,
) -> _Plan:  # fmt: skip
    """The plan of an evaluation; see `evaluate` for the arguments and the errors."""
    every = under_caches(conditions, cache)
    names = [condition.name for condition in every]
    if not names or len(set(names)) < len(names):
        raise SettingError(f"an evaluation needs at least one condition, each with a different name; got {names}.")
    if as_integer(batch) is None or batch < 1:
        raise SettingError(f"batch must be at least 1 sample; got {batch!r}.")
    if not isinstance(shard, tuple | list) or len(shard) != 2 or None in map(as_integer, shard) or shard[1] < 1:
        raise SettingError(f"shard must be two integers, (0, 4) for the first of four; got {shard!r}.")
    number, parts = shard
    if not 0 <= number < parts:
        raise SettingError(f"{parts} shards are numbered 0 to {parts - 1}; got {number}.")
    chosen = find_protocol(protocol) if isinstance(protocol, str) else protocol
    if not isinstance(chosen, EvalProtocol) or not isinstance(task, Task | None):
        raise SettingError(
            f"an evaluation takes a protocol, or the name of a protocol or task, and task= takes a Task, such as "
            f"find_task('gsm8k', path='data'); got {protocol!r:.60} and {task!r:.60}."
        )
    task = task or chosen.make_task()
    if task.name != chosen.task:
        raise SettingError(f"the protocol {chosen.name} is for the task {chosen.task}; got {task.name}.")
    samples = list(task.samples(limit))[number::parts]
    repeated = next((name for name, count in Counter(sample.id for sample in samples).items() if count > 1), None)
    if repeated is not None:
        raise SettingError(f"the task {task.name} has several samples with the id {repeated!r}; ids must be unique.")
    if not samples:
        raise SettingError(
            f"the task {task.name} has too few samples for shard {number} of {parts}; use fewer shards or raise limit."
        )
    job = Job(model, load or {}, task, chosen, read_as(Seed, "seed", seed))
    runs = [LedgerRun.of(Path(ledger), what) for what in engine.identities(job, every)]
    return _Plan(job, every, samples, runs, batch)
