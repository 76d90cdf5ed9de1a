"""`evaluate`: run the samples that a ledger lacks, skipping finished ones.

The missing units of all conditions become batches (units.py), which run in this process or, with `OnRay`
(distributed.py), on many GPUs and machines. This process alone writes the records as they arrive. A kill loses at most
the batches in flight; rerun to resume.

Without Ray, work can be divided into *shards*: process i of n takes every n-th sample, and all write into one ledger.

Pitfall: two processes must not share a shard. The second one stops at once with an error.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sinklens.errors import ControlWarning, LedgerError, SettingError, require, warn_caller
from sinklens.evaluation.checked import evaluations, records_of
from sinklens.evaluation.conditions import Condition, under_caches, unpaired
from sinklens.evaluation.ledger import LedgerRun, Writer, data_difference, holds_runs
from sinklens.evaluation.protocols import EvalProtocol, find_protocol
from sinklens.evaluation.units import Batch, Job, batches
from sinklens.sampling import Policy
from sinklens.tasks.base import Sample, Task
from sinklens.tasks.prompts import prompt_hash, reference_hash
from sinklens.utils.arguments import Count, Seed, Words, checked
from sinklens.utils.folders import check_folder
from sinklens.utils.progress import Progress, reporting

if TYPE_CHECKING:
    from sinklens.evaluation.distributed import OnRay


@checked
def evaluate(
    model: Any,
    protocol: EvalProtocol | str,
    conditions: Condition | Sequence[Condition],
    ledger: str | Path,
    *,
    task: Task | None = None,
    limit: int | None = None,
    batch_size: Count = 25,
    seed: Seed = 0,
    shard: Annotated[tuple[int, int], Words("two integers, (0, 4) for the first of four")] = (0, 1),
    load: dict[str, Any] | None = None,
    cache: str | Policy | Sequence[str | Policy] = (),
    allow_longer: bool = False,
    engine: "OnRay | None" = None,
    progress: Progress = None,
) -> list[LedgerRun]:
    """Evaluate a model on a task under each condition.

    Args:
        model: the model, as `sinklens.load` takes it.
        protocol: the evaluation protocol, or the name of a protocol or task.
        conditions: interventions to compare, e.g. ``masking([0, 1, 5, 10], controls=["random"])``.
        ledger: folder of the records; samples that have a record there are skipped.
        task: the protocol's task, read from local files; by default `EvalProtocol.make_task`.
        limit: evaluate only the first `limit` samples.
        batch_size: samples per run of the model; 1 for conditions with interventions if ``threshold=`` is set or there
            are several canvases, since rows that wait for others would see more steps than alone.
        seed: for sampling; the same for every condition.
        shard: (index, number of shards): evaluate every n-th sample; one process may evaluate a shard at a time.
        load: keyword arguments of `sinklens.load`.
        cache: cache policies or their names; every condition is evaluated exactly and under each of them, see
            `under_caches`.
        allow_longer: run prompts that exceed the model's context, as in `sinklens.generate`; for rehearsing a protocol.
        engine: many workers that run the batches; None for this process.
        progress: as in `sinklens.generate`; a function is called with a condition, its number of finished samples and
            its total.

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
    check_folder(ledger, "an evaluation")
    every = under_caches(conditions, cache)
    controls = {one.name: one.control_of for one in every}
    if not every or len(controls) < len(every):
        names = [one.name for one in every]
        raise SettingError(f"an evaluation needs at least one condition, each with a different name; got {names}.")
    chosen = find_protocol(protocol) if isinstance(protocol, str) else protocol
    task = task or chosen.make_task()
    require(task.name == chosen.task, f"the protocol {chosen.name} is for the task {chosen.task}; got {task.name}.")
    samples = _samples(task, limit, *shard)
    job = Job(model, load or {}, task, chosen, seed, allow_longer)
    with ExitStack() as stack:
        report = stack.enter_context(reporting(progress, "samples", lambda condition: condition.name))
        workers = None if engine is None else stack.enter_context(engine)
        described = job.identities(every) if workers is None else workers.identities(job, every)
        runs = [LedgerRun.of(ledger, what) for what in described]
        earlier = evaluations(ledger) if holds_runs(Path(ledger)) else []
        if note := unpaired(controls, {*controls, *(run.what["condition"]["name"] for run in earlier)}):
            warn_caller(note, ControlWarning)
        writers = [stack.enter_context(Writer(run.begin(), shard[0])) for run in runs]
        work, done = list[Batch](), dict[str, int]()
        for condition, run in zip(every, runs, strict=True):  # after locking: no other process writes these shards
            left = _missing(run, samples)
            work += batches(condition, left, 1 if condition.hooks and _waits(run.what) else batch_size)
            done[condition.name] = len(samples) - len(left)
            report(condition, done[condition.name], len(samples))
        finished = ((one, job.carry_out(one)) for one in work) if workers is None else workers.carry_out(job, work)
        for batch_done, records in finished:
            name = batch_done.condition.name
            writers[list(controls).index(name)].add(*records)
            done[name] += len(records)
            report(batch_done.condition, done[name], len(samples))
    return runs


def _samples(task: Task, limit: int | None, number: int, parts: int) -> list[Sample]:
    """The samples of a shard."""
    require(0 <= number < parts, f"shard must be two integers, (0, 4) for the first of four; got {(number, parts)}.")
    samples = list(task.samples(limit))[number::parts]
    repeated = next((name for name, count in Counter(sample.id for sample in samples).items() if count > 1), None)
    require(repeated is None, f"the task {task.name} has several samples with the id {repeated!r}; ids must be unique.")
    require(
        samples,
        f"the task {task.name} has too few samples for shard {number} of {parts}; use fewer shards or raise limit.",
    )
    return samples


def _missing(run: LedgerRun, samples: Sequence[Sample]) -> list[Sample]:
    """The samples without a record.

    Raises:
        LedgerError: a sample differs from the recorded one.
    """
    done = {str(record["sample"]): record for record in records_of(run)}
    left = [sample for sample in samples if sample.id not in done]
    for sample in (one for one in samples if one.id in done):
        here = {"prompt_sha256": prompt_hash(sample), "reference_sha256": reference_hash(sample)}
        if difference := data_difference(done[sample.id], here):
            raise LedgerError(
                f"{run.folder} has a record of {sample.id} with another {difference}, so it was started with other "
                f"data. Use that data, or another folder (--out)."
            )
    return left


def _waits(what: Mapping[str, Any]) -> bool:
    """Whether rows of a run may wait for others of their batch, in steps that interventions would see."""
    settings = what["settings"]
    if "canvas_length" in settings:  # until every row has finished its canvas; after the last one nothing follows
        return bool(settings["gen_length"] > settings["canvas_length"])
    return any(settings.get(name) is not None for name in ("threshold", "factor"))
