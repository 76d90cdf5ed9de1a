"""The commands ``sinklens evaluate``, ``score`` and ``table``: from models and a task to the table of the study.

They only read flags, call evaluating.py, scoring.py and tables.py, and print, tables by printing.py. Generated programs
are run by ``score`` alone, and only with ``--run-generated-code``.

One way this fails: ``evaluate`` with other settings makes new runs beside the old ones. ``table`` names what differs.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import add_settings, settings_given
from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import Condition
    from sinklens.evaluation.protocols import Protocol


def add_evaluation(commands: Any) -> None:
    """Add the three commands."""
    _add_evaluate(commands)
    _add_score(commands)
    _add_table(commands)


def _add_evaluate(commands: Any) -> None:
    text = "accuracy of models on a task, unmasked and with their sinks masked; what is finished is not done again"
    command = commands.add_parser("evaluate", help=text, description=text)
    command.add_argument("models", metavar="MODEL", nargs="+", help="shipped names, hub names or folders")
    command.add_argument("--task", help="e.g. tiny-gsm, tiny-code, gsm8k, humaneval (that of the protocol)")
    command.add_argument("--protocol", help="all settings under one name, e.g. llada-gsm8k (the task's plain one)")
    command.add_argument("--out", type=Path, required=True, help="folder of the records, made or gone on with")
    command.add_argument("--data", type=Path, help="local file or folder of a published task; else it is downloaded")
    masks = command.add_argument_group("what is done to the models")
    masks.add_argument(
        "--mask-sinks", type=int, nargs="+", default=[], metavar="K",
        help="mask the K strongest keys of each head by the scores of the step before (so none at step 0); 0, no "
        "masking, is always among them",
    )  # fmt: skip
    masks.add_argument(
        "--controls", nargs="+", default=[], choices=("random", "weakest"),
        help="for each K also that many other keys (random)",
    )  # fmt: skip
    masks.add_argument(
        "--of-unmasked", action="store_true",
        help="for each K also the sinks that the unmasked run had a step before; twice the time",
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
    work.add_argument("--seed", type=int, default=0, help="of sampling and of random keys (%(default)s)")
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
    work.add_argument("--address", help="[ray] of a running cluster, e.g. auto")
    work.add_argument("--dry-run", action="store_true", help="measure a few samples and tell what it would take")
    work.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (%(default)s)")
    work.add_argument("--device", help="e.g. cpu or cuda:1; by default a GPU if there is one")
    add_settings(command)
    command.set_defaults(command=run_evaluate)


def _add_score(commands: Any) -> None:
    text = "run the programs that models wrote, each in isolation, to tell whether they are right"
    command = commands.add_parser("score", help=text, description=text)
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder that `sinklens evaluate` wrote")
    command.add_argument(
        "--run-generated-code", action="store_true", help="say that programs written by a model may be executed here"
    )
    command.add_argument("--data", type=Path, help="local file or folder of the published task")
    command.add_argument(
        "--isolation", default="namespaces", choices=("namespaces", "process"),
        help="the weakest to accept; the strongest that the system has is used (%(default)s)",
    )  # fmt: skip
    command.add_argument("--seconds", type=float, default=10.0, help="time limit of a program (%(default)s)")
    command.add_argument("--memory", type=int, default=512, metavar="MIB", help="memory limit (%(default)s)")
    command.set_defaults(command=run_score)


def _add_table(commands: Any) -> None:
    text = "tables and a picture of what `sinklens evaluate` measured, with intervals and paired differences"
    command = commands.add_parser("table", help=text, description=text)
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder that `sinklens evaluate` wrote")
    command.add_argument("--out", type=Path, help="folder for table.csv, accuracy.png and accuracy.svg (RESULTS)")
    command.add_argument(
        "--mixed-devices", action="store_true", help="pair runs of different device types, whose last bits differ"
    )
    command.set_defaults(command=run_table)


def run_evaluate(options: argparse.Namespace) -> None:
    """`sinklens evaluate`."""
    from sinklens.evaluation.conditions import masking
    from sinklens.evaluation.runner import estimate, evaluate

    asked = _protocol(options)
    conditions = masking(
        options.mask_sinks, options.controls, scope=options.scope, queries=options.queries,
        of_unmasked=options.of_unmasked, seed=options.seed,
    )  # fmt: skip
    shared: dict[str, Any] = {
        "task": asked.make_task(options.data), "limit": options.limit, "batch": options.batch, "seed": options.seed,
        "shard": _shard(options.shard), "load": {"dtype": options.dtype, "device": options.device},
    }  # fmt: skip
    for name in options.models:
        if options.dry_run:
            told = estimate(name, asked, conditions, options.out, **shared)
            print(_told(name, told))
            continue
        try:
            with _Bar(name) as bar:
                evaluate(name, asked, conditions, options.out, engine=_engine(options), progress=bar, **shared)
        except KeyboardInterrupt:
            kept = f"what was finished is kept in {options.out}, and the same command goes on from there"
            print(f"sinklens: interrupted; {kept}.", file=sys.stderr)
            raise SystemExit(130) from None
    if not options.dry_run:
        _tell_rest(options.out)


def _protocol(options: argparse.Namespace) -> "Protocol":
    from sinklens.evaluation.protocols import PROTOCOLS, find
    from sinklens.tasks import NAMES

    if options.protocol is None and options.task is None:
        raise SinklensError("name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k).")
    if options.protocol is None and options.task not in NAMES:
        raise SinklensError(
            f"no task is called {options.task!r}; known: {', '.join(NAMES)}.{nearest(options.task, NAMES)}"
            + (f" {options.task} is a protocol: --protocol {options.task}." if options.task in PROTOCOLS else "")
        )
    asked = find(options.protocol or options.task)
    if options.task not in (None, asked.task):
        raise SinklensError(f"the protocol {asked.name} is for the task {asked.task}, not {options.task}; drop one.")
    given = settings_given(options)
    _refuse_idle(given, options.models)
    return asked.with_settings(given)


def _refuse_idle(given: dict[str, Any], models: Sequence[str]) -> None:
    """A setting that none of the models has would look as if it had had an effect."""
    from dataclasses import fields

    from sinklens.checkpoints import family_of
    from sinklens.checkpoints.files import find_checkpoint, read_config
    from sinklens.sampling.settings import BY_SAMPLER

    if not given:
        return
    samplers = sorted({family_of(read_config(find_checkpoint(name, None)), name).sampler for name in models})
    known = {entry.name for sampler in samplers for entry in fields(BY_SAMPLER[sampler])}
    for name in given:
        if name not in known:
            raise SinklensError(
                f"--{name.replace('_', '-')} is no setting of the {' or '.join(samplers)} sampler, which is what "
                f"{', '.join(models)} {'use' if len(models) > 1 else 'uses'}; leave it away."
            )


def _shard(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not slash or not number.isdigit() or not parts.isdigit():
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


class _Bar:
    """A progress bar per condition on the error output, or a line per batch where that is no terminal."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._name, self._tasks = name, dict[str, Any]()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=Console(file=sys.stderr))
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> "_Bar":
        if self._shown:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._bars.stop()

    def __call__(self, condition: "Condition", done: int, total: int) -> None:
        if not self._shown:
            print(f"{self._name}: {condition.name}: {done} of {total} samples done", file=sys.stderr, flush=True)
            return
        from rich.markup import escape

        if condition.name not in self._tasks:
            told = escape(f"{self._name}: {condition.name}")
            self._tasks[condition.name] = self._bars.add_task(told, total=total)
        self._bars.update(self._tasks[condition.name], completed=done)


def _tell_rest(out: Path) -> None:
    from sinklens.evaluation.ledger import Run
    from sinklens.evaluation.scoring import verdicts

    unscored = sum(len(run.records()) - len(verdicts(run)) for run in Run.all(out))
    if unscored > 0:
        print(f"{unscored} programs were generated and not run: sinklens score {out} --run-generated-code")
    else:
        print(f"Done. The table: sinklens table {out}")


def run_score(options: argparse.Namespace) -> None:
    """`sinklens score`."""
    from sinklens.evaluation.ledger import Run
    from sinklens.evaluation.sandbox import Limits, available_isolation
    from sinklens.evaluation.scoring import score
    from sinklens.tasks import find

    if not options.run_generated_code:
        raise SinklensError(
            f"this executes programs that a model wrote. Add --run-generated-code if that is meant. Isolation here: "
            f"{available_isolation()}."
        )
    print(f"Isolation: {available_isolation()}.", file=sys.stderr)
    names = {str(run.what["protocol"]["task"]) for run in Run.all(options.ledger)}
    published = [name for name in names if hasattr(find(name), "path")]  # generated tasks have no files
    paths = {} if options.data is None else dict.fromkeys(published, options.data)
    limits = Limits(seconds=options.seconds, memory_mb=options.memory)
    ran = score(options.ledger, paths=paths, limits=limits, require=options.isolation, progress=_score_progress)
    print(f"{ran} programs were run. The table: sinklens table {options.ledger}")


def _score_progress(run: Any, done: int, total: int) -> None:
    if done == total or done % 25 == 0:
        print(f"{run.what['model']}, {run.what['condition']['name']}: {done} of {total}", file=sys.stderr)


def run_table(options: argparse.Namespace) -> None:
    """`sinklens table`."""
    from sinklens.atomic import whole
    from sinklens.cli.printing import show
    from sinklens.evaluation.tables import frame, read_lines
    from sinklens.views import accuracy_curves

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        lines = read_lines(options.ledger, mixed_devices=options.mixed_devices)
    out = options.out or options.ledger
    with whole(out / "table.csv") as part:
        frame(lines).to_csv(part, index=False)
    figure = accuracy_curves(frame(lines))
    for suffix in ("png", "svg"):
        with whole(out / f"accuracy.{suffix}") as part:
            figure.savefig(part, dpi=160, bbox_inches="tight")
    show(lines, [str(note.message) for note in noted])
    print(f"Written: {', '.join(str(out / name) for name in ('table.csv', 'accuracy.png', 'accuracy.svg'))}.")
