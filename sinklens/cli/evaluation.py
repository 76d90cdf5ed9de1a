"""The commands ``sinklens evaluate`` and ``score``, and what ``table`` does with their ledger (`write_table`).

They only read flags, call evaluating.py, scoring.py and tables.py, and print, tables by printing.py. Generated programs
are run by ``score`` alone, and only with ``--run-generated-code``.

One way this fails: ``evaluate`` with other settings makes new runs beside the old ones. ``table`` names what differs.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import add_settings, natural, settings_given
from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import Condition
    from sinklens.evaluation.protocols import EvalProtocol
    from sinklens.tasks import Task


def add_evaluation(commands: Any) -> None:
    """Add ``evaluate`` and ``score``."""
    _add_evaluate(commands)
    _add_score(commands)


def _add_evaluate(commands: Any) -> None:
    text = "accuracy of models on a task, unmasked and with their sinks masked; what is finished is not done again"
    command = commands.add_parser("evaluate", help=text, description=text)
    command.add_argument("models", metavar="MODEL", nargs="+", help="shipped names, hub names or folders")
    command.add_argument("--task", help="e.g. tiny-gsm, tiny-code, gsm8k, humaneval (the one of --protocol)")
    command.add_argument(
        "--protocol", help="all settings under one name, e.g. llada-gsm8k (the task with the checkpoint's own settings)"
    )
    command.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="in place of a task: JSON Lines, in each an object with 'prompt' and 'expected', texts or lists of token "
        "ids; an answer is right if it is exactly what is expected (none)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, required=True, help="folder of the records, made or gone on with")
    command.add_argument("--data", type=Path, help="local file or folder of a published task (the hub)")
    masks = command.add_argument_group("what is done to the models")
    masks.add_argument(
        "--mask-sinks", type=int, nargs="+", default=[], metavar="K",
        help="mask the K strongest keys of each head by the scores of the step before (so none at step 0); 0, no "
        "masking, is always among them (0 alone)",
    )  # fmt: skip
    masks.add_argument(
        "--controls", nargs="+", default=[], choices=("random", "weakest"),
        help="for each K also that many other keys (no controls)",
    )  # fmt: skip
    masks.add_argument(
        "--of-unmasked", action="store_true",
        help="for each K also the sinks that the unmasked run had a step before; twice the time (no)",
    )  # fmt: skip
    masks.add_argument(
        "--scope", default="head", choices=("head", "layer", "model"), help="one set of keys per ... (%(default)s)"
    )
    masks.add_argument(
        "--queries", default="newest", choices=("newest", "all"),
        help="in autoregressive models: hide keys from the newest token, or all, with --no-use-cache (%(default)s)",
    )  # fmt: skip
    work = command.add_argument_group("how the work is done")
    work.add_argument("--limit", type=int, metavar="N", help="the first N samples (all)")
    work.add_argument(
        "--batch", type=int, default=25, metavar="N", help="samples that run, and are recorded, together (%(default)s)"
    )
    work.add_argument("--seed", type=natural, default=0, help="of sampling and of random keys (%(default)s)")
    work.add_argument(
        "--shard", default="0/1", metavar="I/N", help="every N-th sample, from I on, in a file of its own (%(default)s)"
    )
    work.add_argument(
        "--engine", default="here", choices=("here", "ray"), help="this process, or a Ray cluster (%(default)s)"
    )
    work.add_argument("--workers", type=int, help="[ray] workers (one per GPU, or per core where there is none)")
    work.add_argument(
        "--gpus-per-worker", type=float, metavar="N", help="[ray] GPUs of each worker (1, or 0 where there is none)"
    )
    work.add_argument("--cpus-per-worker", type=float, default=1, metavar="N", help="[ray] cores of each (%(default)s)")
    work.add_argument("--address", help="[ray] of a running cluster, e.g. auto (start one here)")
    work.add_argument("--dry-run", action="store_true", help="measure a few samples and estimate the rest (no)")
    work.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (%(default)s)")
    work.add_argument("--device", help="e.g. cpu or cuda:1 (a GPU if there is one, else cpu)")
    add_settings(command)
    command.set_defaults(command=run_evaluate)


def _add_score(commands: Any) -> None:
    text = "run the programs that models wrote, each in isolation, to tell whether they are right"
    command = commands.add_parser("score", help=text, description=text)
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder that `sinklens evaluate` wrote")
    command.add_argument(
        "--run-generated-code", action="store_true", help="allow programs written by a model to be executed here (no)"
    )
    command.add_argument("--data", type=Path, help="local file or folder of the published task (the hub)")
    command.add_argument(
        "--isolation", default="namespaces", choices=("namespaces", "process"),
        help="the weakest to accept; the strongest that the system has is used (%(default)s)",
    )  # fmt: skip
    command.add_argument("--seconds", type=float, default=10.0, help="time limit of a program (%(default)s)")
    command.add_argument("--memory", type=int, default=512, metavar="MIB", help="memory limit (%(default)s)")
    command.set_defaults(command=run_score)


def run_evaluate(options: argparse.Namespace) -> None:
    """`sinklens evaluate`."""
    from sinklens.evaluation.conditions import masking
    from sinklens.evaluation.counting import Counts
    from sinklens.evaluation.runner import estimate, evaluate

    _refuse_without_effect(options)
    asked = _protocol(options)
    conditions = masking(
        options.mask_sinks, options.controls, scope=options.scope, queries=options.queries,
        of_unmasked=options.of_unmasked, seed=options.seed,
    )  # fmt: skip
    task = asked.make_task(options.prompts or options.data)
    _check_limit(task, options.limit)
    shared: dict[str, Any] = {
        "task": task, "limit": options.limit, "batch": options.batch,
        "seed": options.seed, "shard": _shard(options.shard),
        "load": {"dtype": options.dtype, "device": options.device},
    }  # fmt: skip
    for name in options.models:
        if options.dry_run:
            told = estimate(name, asked, conditions, options.out, **shared)
            print(_told(name, told))
            continue
        with Counts("samples") as counts:

            def report(
                condition: "Condition", done: int, total: int, name: str = name, counts: Counts = counts
            ) -> None:
                counts(f"{name}: {condition.name}", done, total)

            try:
                evaluate(name, asked, conditions, options.out, engine=_engine(options), progress=report, **shared)
            except KeyboardInterrupt:
                counts.stop(options.out, options.call)
    if not options.dry_run:
        _tell_rest(options.out)


def _protocol(options: argparse.Namespace) -> "EvalProtocol":
    from sinklens.evaluation.protocols import PROTOCOLS, find_protocol
    from sinklens.tasks import NAMES

    if options.prompts is not None:
        _refuse_beside_prompts(options)
        options.task = "prompts"
    if options.protocol is None and options.task is None:
        raise SinklensError(
            "name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k), or give a file (--prompts FILE)."
        )
    if options.protocol is None and options.task not in NAMES:
        raise SinklensError(
            f"no task is called {options.task!r}; known: {', '.join(NAMES)}.{nearest(options.task, NAMES)}"
            + (f" {options.task} is a protocol: --protocol {options.task}." if options.task in PROTOCOLS else "")
        )
    asked = find_protocol(options.protocol or options.task)
    if options.task not in (None, asked.task):
        raise SinklensError(f"the protocol {asked.name} is for the task {asked.task}, not {options.task}; drop one.")
    given = settings_given(options)
    _refuse_idle(given, options.models, options.queries)
    return asked.with_settings(given)


def _refuse_beside_prompts(options: argparse.Namespace) -> None:
    for name in ("task", "protocol", "data"):
        if getattr(options, name) not in (None, "prompts"):
            raise SinklensError(f"--prompts takes the place of --{name}; give one of the two.")


def _refuse_without_effect(options: argparse.Namespace) -> None:
    """Refuse an option that nothing else in the call makes use of."""
    twice = [name for name, number in Counter(options.models).items() if number > 1]
    if twice:
        raise SinklensError(f"each model is evaluated once; {', '.join(twice)} is given several times.")
    masks = {"controls": [], "of_unmasked": False, "scope": "head", "queries": "newest"}
    ray = {"workers": None, "gpus_per_worker": None, "cpus_per_worker": 1, "address": None}
    for usual, needs, met in (
        (masks, "--mask-sinks with a K above 0", any(options.mask_sinks)),
        (ray, "--engine ray", options.engine == "ray"),
    ):
        for name, value in usual.items():
            if getattr(options, name) != value and not met:
                raise SinklensError(f"--{name.replace('_', '-')} has no effect without {needs}; add it, or drop this.")


def _check_limit(task: "Task", limit: int | None) -> None:
    number = len(task.samples(limit))
    if limit is not None and number < limit:
        raise SinklensError(f"--limit is {limit}, and the task {task.name} has {number} samples; leave it out for all.")


def _refuse_idle(given: dict[str, Any], models: Sequence[str], queries: str) -> None:
    """A setting that none of the models has would look as if it had had an effect."""
    from dataclasses import fields

    from sinklens.checkpoints import family_of
    from sinklens.checkpoints.files import find_checkpoint, read_config
    from sinklens.sampling.settings import BY_SAMPLER

    if not given and queries != "all":
        return
    samplers = sorted({family_of(read_config(find_checkpoint(name, None)), name).sampler for name in models})
    if queries == "all" and "autoregressive" not in samplers:
        raise SinklensError(
            f"--queries all is for autoregressive models; {', '.join(models)} computes every query at every step."
        )
    known = {entry.name for sampler in samplers for entry in fields(BY_SAMPLER[sampler])}
    for name in given:
        if name not in known:
            raise SinklensError(
                f"--{name.replace('_', '-')} is no setting of the {' or '.join(samplers)} sampler, which is what "
                f"{', '.join(models)} {'use' if len(models) > 1 else 'uses'}; leave it away."
            )


def _shard(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not slash or not number.isdigit() or not parts.isdigit() or int(parts) < 1:
        raise SinklensError(f"--shard is written I/N, e.g. 0/4 for the first of four; got {text}.")
    return int(number), int(parts)


def _engine(options: argparse.Namespace) -> Any:
    if options.engine == "here":
        return None
    from sinklens.evaluation.distributed import OnRay

    return OnRay(
        workers=options.workers, gpus_per_worker=options.gpus_per_worker, cpus_per_worker=options.cpus_per_worker,
        address=options.address,
    )  # fmt: skip


def _told(name: str, told: Any) -> str:
    if not told.units:
        return f"{name}: everything is done already."
    return (
        f"{name}: {told.units:,} samples to do, {told.tokens:,} tokens in {told.passes:,} forward passes of a row; "
        f"about {_duration(told.seconds)} in one process here (by {told.measured} samples that were run)."
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _tell_rest(out: Path) -> None:
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.scoring import verdicts

    unscored = sum(len(run.records()) - len(verdicts(run)) for run in LedgerRun.all(out))
    if unscored > 0:
        print(f"{unscored} programs were generated and not run: sinklens score {out} --run-generated-code")
    else:
        print(f"Done. The table: sinklens table {out}")


def run_score(options: argparse.Namespace) -> None:
    """`sinklens score`."""
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.sandbox import Limits, available_isolation
    from sinklens.evaluation.scoring import score
    from sinklens.tasks import CodeTask, find_task

    if not options.run_generated_code:
        raise SinklensError(
            f"this executes programs that a model wrote. Add --run-generated-code if that is meant. Isolation here: "
            f"{available_isolation()}."
        )
    print(f"Isolation: {available_isolation()}.", file=sys.stderr)
    names = sorted({str(run.what["protocol"]["task"]) for run in LedgerRun.all(options.ledger)})
    published = [name for name in names if isinstance(find_task(name), CodeTask) and hasattr(find_task(name), "path")]
    if options.data is not None and not published:
        raise SinklensError(f"--data is for programs of published tasks; {options.ledger} holds {', '.join(names)}.")
    paths = {} if options.data is None else dict.fromkeys(published, options.data)
    limits = Limits(seconds=options.seconds, memory_mb=options.memory)
    if not any(isinstance(find_task(name), CodeTask) for name in names):
        raise SinklensError(f"{options.ledger} holds no generated programs ({', '.join(names)}); nothing is to be run.")
    ran = score(options.ledger, paths=paths, limits=limits, require=options.isolation, progress=_score_progress)
    print(f"{ran} programs were run. The table: sinklens table {options.ledger}")


def _score_progress(run: Any, done: int, total: int) -> None:
    if done == total or done % 25 == 0:
        print(f"{run.what['model']}, {run.what['condition']['name']}: {done} of {total}", file=sys.stderr)


def write_table(ledger: Path, out: Path, *, mixed_devices: bool) -> None:
    """Print the tables of a ledger, and write table.csv and the picture to `out`."""
    from sinklens.atomic import atomic_write
    from sinklens.cli.printing import show
    from sinklens.evaluation.tables import frame, read_lines
    from sinklens.views import accuracy_curves

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        lines = read_lines(ledger, mixed_devices=mixed_devices)
    with atomic_write(out / "table.csv") as part:
        frame(lines).to_csv(part, index=False)
    written = ["table.csv"]
    if any(line.accuracy.total for line in lines):
        figure = accuracy_curves(frame([line for line in lines if line.accuracy.total]))
        for name in ("accuracy.png", "accuracy.svg"):
            with atomic_write(out / name) as part:
                figure.savefig(part, dpi=160, bbox_inches="tight")
            written.append(name)
    show(lines, [str(note.message) for note in noted])
    print(f"Written: {', '.join(str(out / name) for name in written)}.")
