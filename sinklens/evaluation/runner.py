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
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack, runtime_checkable

from sinklens.errors import ControlWarning, LedgerError, SettingError, nearest, warn_caller
from sinklens.evaluation.conditions import Condition, under_caches, unpaired
from sinklens.evaluation.ledger import LedgerRecord, LedgerRun, Writer, data_difference, holds_runs
from sinklens.evaluation.protocols import EvalProtocol, find_protocol
from sinklens.evaluation.units import Batch, batches, carry_out, check_caches, identity
from sinklens.model import load
from sinklens.sampling import Policy
from sinklens.tasks import Sample, Task
from sinklens.tasks.prompts import prompt_hash, reference_hash
from sinklens.utils.folders import check_folder
from sinklens.utils.integers import as_integer, check_seed_of

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


@runtime_checkable
class Engine(Protocol):
    """Interface of what holds the model and runs batches."""

    def identities(self, job: Job, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """The identity of each condition's run in the ledger; see `units.identity`."""

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
        """See `Engine`."""
        check_caches(self.load(job), conditions, job.protocol)
        shared = identity(self.load(job), conditions[0], job.task, job.protocol, job.seed)
        return [shared | {"condition": condition.described()} for condition in conditions]

    def carry_out(self, job: Job, work: Sequence[Batch]) -> Iterator[tuple[Batch, list[LedgerRecord]]]:
        """See `Engine`."""
        for batch in work:
            yield batch, carry_out(self.load(job), job.task, job.protocol, batch, job.seed)


class Options(TypedDict, total=False):
    """The keyword arguments of `evaluate` and `estimate` that say what to evaluate; see `Evaluation`."""

    task: Task | None
    limit: int | None
    batch: int
    seed: int
    shard: tuple[int, int]
    load: dict[str, Any] | None
    cache: str | Policy | Sequence[str | Policy]


@dataclass(frozen=True)
class Evaluation:
    """A request: what `evaluate` runs and `estimate` costs.

    Attributes:
        model: the model, as `sinklens.load` takes it.
        protocol: the evaluation protocol, or the name of a protocol or task.
        conditions: interventions to compare.
        ledger: folder of the records.
        task: the protocol's task, read from local files; by default `EvalProtocol.make_task`.
        limit: evaluate only the first `limit` samples.
        batch: samples per run of the model; 1 for conditions with interventions if ``threshold=`` is set or there are
            several canvases, since rows that wait for others would see more steps than alone.
        seed: for sampling; the same for every condition.
        shard: (index, number of shards): evaluate every n-th sample; one process may evaluate a shard at a time.
        load: keyword arguments of `sinklens.load`.
        cache: cache policies or their names; every condition is evaluated exactly and under each of them, see
            `under_caches`.
    """

    model: Any
    protocol: EvalProtocol | str
    conditions: Sequence[Condition]
    ledger: str | Path
    task: Task | None = None
    limit: int | None = None
    batch: int = 25
    seed: int = 0
    shard: tuple[int, int] = (0, 1)
    load: dict[str, Any] | None = None
    cache: str | Policy | Sequence[str | Policy] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "conditions", under_caches(self.conditions, self.cache))
        check_seed_of(self)

    def job(self) -> Job:
        """What an engine needs.

        Raises:
            SettingError: the task is not the protocol's, or one of them has the wrong type.
        """
        protocol = find_protocol(self.protocol) if isinstance(self.protocol, str) else self.protocol
        if not isinstance(protocol, EvalProtocol) or not isinstance(self.task, Task | None):
            raise SettingError(
                f"an evaluation takes a protocol, or the name of a protocol or task, and task= takes a Task, such as "
                f"find_task('gsm8k', path='data'); got {protocol!r:.60} and {self.task!r:.60}."
            )
        task = self.task or protocol.make_task()
        if task.name != protocol.task:
            raise SettingError(f"the protocol {protocol.name} is for the task {protocol.task}; got {task.name}.")
        return Job(self.model, self.load or {}, task, protocol, self.seed)

    def check(self) -> None:
        """Reject a shard, a batch or conditions that cannot be evaluated.

        Raises:
            SettingError: one of them.
        """
        if not isinstance(self.shard, tuple | list) or len(self.shard) != 2 or None in map(as_integer, self.shard):
            raise SettingError(f"shard must be two integers, (0, 4) for the first of four; got {self.shard!r}.")
        number, parts = self.shard
        if parts < 1:
            raise SettingError(f"the number of shards must be at least 1; got {parts}.")
        if not 0 <= number < parts:
            raise SettingError(f"{parts} shards are numbered 0 to {parts - 1}; got {number}.")
        batch = as_integer(self.batch)
        if batch is None or batch < 1:
            raise SettingError(f"batch must be at least 1 sample; got {self.batch!r}.")
        names = [condition.name for condition in self.conditions]
        if not names or len(set(names)) < len(names):
            raise SettingError(f"an evaluation needs at least one condition, each with a different name; got {names}.")

    def samples(self, task: Task) -> list[Sample]:
        """The samples of this shard.

        Raises:
            SettingError: the shard is empty, or two samples share an id.
        """
        number, parts = self.shard
        samples = list(task.samples(self.limit))[number::parts]
        repeated = next((name for name, count in Counter(sample.id for sample in samples).items() if count > 1), None)
        if repeated is not None:
            raise SettingError(
                f"the task {task.name} has several samples with the id {repeated!r}; ids must be unique."
            )
        if not samples:
            raise SettingError(
                f"the task {task.name} has too few samples for shard {number} of {parts}; use fewer shards or raise "
                f"limit."
            )
        return samples


def evaluate(
    model: Any,
    protocol: EvalProtocol | str,
    conditions: Sequence[Condition],
    ledger: str | Path,
    *,
    engine: Engine | None = None,
    progress: Callable[[Condition, int, int], None] | None = None,
    **options: Unpack[Options],
) -> list[LedgerRun]:
    """Evaluate a model on a task under each condition.

    Args:
        model: the model, as `sinklens.load` takes it.
        protocol: the evaluation protocol, or the name of a protocol or task.
        conditions: interventions to compare, e.g. ``masking([0, 1, 5, 10], controls=["random"])``.
        ledger: folder of the records; samples that have a record there are skipped.
        engine: runs the batches; None for this process.
        progress: called with a condition, its number of finished samples and its total.
        **options: ``task``, ``limit``, ``batch``, ``seed``, ``shard``, ``load`` and ``cache``; see `Evaluation`.

    Returns:
        The ledger's run of each condition.

    Raises:
        SinklensError: `ledger` cannot be written, or holds results of another kind.
        LedgerError: another process is writing the same shard, the disk is full, or the ledger was started with other
            data; finished samples are kept.
        SettingError: there is no sample or no condition, the shard does not exist, the model cannot run under a cache
            policy, or an option is unknown.

    Warns:
        ControlWarning: a condition is a control of one that is neither among these nor in the ledger.
    """
    engine = engine or InProcess()
    check_folder(ledger, "an evaluation")
    plan = _plan(_request(model, protocol, conditions, ledger, options), engine)
    if note := unpaired(plan.controls(), plan.names()):
        warn_caller(note, ControlWarning)
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(run.begin(), plan.request.shard[0])) for run in plan.runs]
        work = plan.missing()  # after locking: no other process is writing these shards
        done = plan.finished()
        report = progress or (lambda condition, done, total: None)
        for condition, number in zip(plan.request.conditions, done, strict=True):
            report(condition, number, len(plan.samples))
        for finished, records in engine.carry_out(plan.job, work) if work else ():
            place = plan.place(finished.condition)
            writers[place].add(*records)
            done[place] += len(records)
            report(plan.request.conditions[place], done[place], len(plan.samples))
    return plan.runs


def _request(
    model: Any, protocol: EvalProtocol | str, conditions: Sequence[Condition], ledger: str | Path, options: Options
) -> Evaluation:
    """The request; an option that does not exist is an error."""
    for name in options:
        if name not in Options.__annotations__:
            known = list(Options.__annotations__)
            raise SettingError(f"{name} is not an option; the options are {', '.join(known)}.{nearest(name, known)}")
    return Evaluation(model, protocol, conditions, ledger, **options)


@dataclass(frozen=True)
class Estimate:
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
    **options: Unpack[Options],
) -> Estimate:
    """Estimate the cost of `evaluate` with the same arguments by running two batches of medium length; writes nothing.

    The batches run under the first and the last condition that have units left, each after a one-row warm-up run.
    """
    engine = InProcess()
    plan = _plan(_request(model, protocol, conditions, ledger, options), engine)
    work = plan.missing()
    if not work:
        return Estimate(0, 0, 0, 0.0, 0)
    loaded, job = engine.load(plan.job), plan.job
    seconds: list[float] = []
    measured: list[LedgerRecord] = []
    left = [part for part in (_batches_of(work, condition) for condition in plan.request.conditions) if part]
    for part in (left[0], left[-1]) if len(left) > 1 else left:
        sample = part[len(part) // 2]
        carry_out(loaded, job.task, job.protocol, Batch(sample.condition, sample.samples[:1]), job.seed)
        started = time.perf_counter()
        records = carry_out(loaded, job.task, job.protocol, sample, job.seed)
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
    """An evaluation before it starts."""

    request: Evaluation
    job: Job
    samples: list[Sample]
    runs: list[LedgerRun]

    def controls(self) -> dict[str, str]:
        """The conditions, each with the name of the one that it is a control of, or ""."""
        return {condition.name: condition.control_of for condition in self.request.conditions}

    def names(self) -> set[str]:
        """The names of these conditions, and of those in the ledger."""
        folder = Path(self.request.ledger)
        earlier = LedgerRun.all(folder) if holds_runs(folder) else []
        return {*self.controls(), *(run.what["condition"]["name"] for run in earlier)}

    def place(self, condition: Condition) -> int:
        return list(self.controls()).index(condition.name)

    def finished(self) -> list[int]:
        """The number of samples with a record on disk, for each condition."""
        samples = {sample.id for sample in self.samples}
        return [len(samples & run.done()) for run in self.runs]

    def missing(self) -> list[Batch]:
        """Units without a record, condition by condition."""
        found: list[Batch] = []
        for condition, run in zip(self.request.conditions, self.runs, strict=True):
            done = {str(record["sample"]): record for record in run.records()}
            for sample in self.samples:
                if sample.id in done:
                    _check_same(sample, done[sample.id], run)
            left = [sample for sample in self.samples if sample.id not in done]
            found += batches(condition, left, 1 if condition.hooks and _waits(run.what) else self.request.batch)
        return found


def _waits(what: Mapping[str, Any]) -> bool:
    """Whether rows of a run may wait for others of their batch, in steps that interventions would see."""
    settings = what["settings"]
    if "canvas_length" in settings:  # until every row has finished its canvas; after the last one nothing follows
        return bool(settings["gen_length"] > settings["canvas_length"])
    return any(settings.get(name) is not None for name in ("threshold", "factor"))


def _plan(request: Evaluation, engine: Engine) -> _Plan:
    request.check()
    job = request.job()
    samples = request.samples(job.task)
    runs = [LedgerRun.of(Path(request.ledger), what) for what in engine.identities(job, request.conditions)]
    return _Plan(request, job, samples, runs)


def _check_same(sample: Sample, record: LedgerRecord, run: LedgerRun) -> None:
    """Refuse data in which a sample differs from the recorded one."""
    here = {"prompt_sha256": prompt_hash(sample), "reference_sha256": reference_hash(sample)}
    if difference := data_difference(record, here):
        raise LedgerError(
            f"{run.folder} has a record of {sample.id} with another {difference}, so it was started with other data. "
            f"Use that data, or another folder (--out)."
        )


def _batches_of(work: Sequence[Batch], condition: Condition) -> list[Batch]:
    return [batch for batch in work if batch.condition == condition]
