"""The commands ``sinklens evaluate``, ``score``, ``merge`` and ``export``.

They read flags, call `sinklens.evaluation.runner`, ``scoring`` and ``ledger``, and print; tables are
printed by tables.py. Only ``score`` runs generated programs, and only with ``--run-generated-code``.

Pitfall: ``evaluate`` with other settings adds new runs beside the old ones. ``table`` names the settings that differ.
"""

import argparse
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import (
    add_limit,
    add_loading,
    add_out,
    add_run,
    add_settings,
    family_for,
    loading,
    refuse_caches,
    settings_given,
)
from sinklens.cli.planning import add_planning, print_plan
from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import Condition
    from sinklens.evaluation.protocols import EvalProtocol
    from sinklens.tasks import Task


def add_merge(command: argparse.ArgumentParser) -> None:
    """Add the options of ``merge``."""
    command.add_argument("ledgers", metavar="RESULTS", type=Path, nargs="+", help="folders of `sinklens evaluate`")
    command.add_argument("--out", type=Path, required=True, help="folder of the records; created, or added to")
    command.set_defaults(command=run_merge)


def add_export(command: argparse.ArgumentParser) -> None:
    """Add the options of ``export``."""
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder of `sinklens evaluate`")
    command.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file, such as records.jsonl")
    command.set_defaults(command=run_export)


def add_evaluate(command: argparse.ArgumentParser) -> None:
    """Add the options of ``evaluate``."""
    command.add_argument("models", metavar="MODEL", nargs="+", help="shipped names, hub names or folders")
    command.add_argument("--task", help="e.g. tiny-gsm, tiny-code, gsm8k, humaneval (default: that of --protocol)")
    command.add_argument(
        "--protocol",
        help="a named set of settings, e.g. llada-gsm8k (default: the task with the checkpoint's settings)",
    )
    command.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="instead of a task: JSON Lines with 'prompt' and 'expected', each a text or a list of token ids; an "
        "answer is right if it equals 'expected' exactly (default: none)",
    )  # fmt: skip
    command.add_argument(
        "--verdict", metavar="NAME",
        help="with --prompts, how answers are judged: exact, extraction, choice, json-schema, refusal, attack, "
        "infilling or code (default: equality)",
    )  # fmt: skip
    add_out(command, "folder of the records; created, or resumed if it exists")
    command.add_argument("--data", type=Path, help="local file or folder of a published task (default: the hub)")
    _add_masking(command)
    command.add_argument(
        "--cache", nargs="+", default=[], metavar="POLICY",
        help="also evaluate every condition under these cache policies, such as prefix, dual or keep-sinks:4; an "
        "unknown name lists all (default: every step is exact)",
    )  # fmt: skip
    _add_execution(command)
    command.add_argument(
        "--regimes", nargs="*", metavar="REGIME",
        help="run every condition in several decoding regimes: diffusion (one block), blocks (those of the settings, "
        "or of 32) or blocks:N; without a value diffusion and blocks (default: the settings' own)",
    )  # fmt: skip
    add_settings(command)
    add_run(command, "seed", "chat_template")
    add_loading(command)
    command.set_defaults(command=run_evaluate)


def _add_masking(command: Any) -> None:
    masks = command.add_argument_group("masking")
    masks.add_argument(
        "--mask-sinks", type=int, nargs="+", default=[], metavar="K",
        help="mask the K strongest keys of each head by the scores of the previous step (so none at step 0); 0, no "
        "masking, is always included (default: 0)",
    )  # fmt: skip
    masks.add_argument(
        "--controls", nargs="+", default=[], metavar="CONTROL",
        help="for each K, also mask other keys in the same heads and steps: random (weaker than the strongest, the "
        "same throughout a run), same_kind (of token), same_mass (of attention), nearest, permuted (over heads), "
        "weakest, random_any (redrawn at every step, possibly among the strongest); default: no controls",
    )  # fmt: skip
    masks.add_argument(
        "--kind", nargs="+", default=[], metavar="KIND",
        help="only the K strongest keys of these token kinds, e.g. digit, or 'not digit' (default: all kinds)",
    )  # fmt: skip
    masks.add_argument(
        "--part", default="all", choices=("all", "sink", "other"),
        help="of these keys, only those that are a sink by the paper's definition, or only the others "
        "(default: %(default)s)",
    )  # fmt: skip
    masks.add_argument(
        "--of-unmasked", action="store_true",
        help="for each K, also mask the sinks that the unmasked run had at the previous step; doubles the time "
        "(default: no)",
    )  # fmt: skip
    masks.add_argument(
        "--scope",
        default="head",
        choices=("head", "layer", "model"),
        help="one set of keys per ... (default: %(default)s)",
    )
    masks.add_argument(
        "--queries", default="newest", choices=("newest", "all"),
        help="in autoregressive models: hide keys from the newest token, or from all tokens (needs --no-use-cache; "
        "default: %(default)s)",
    )  # fmt: skip


def _add_execution(command: Any) -> None:
    work = command.add_argument_group("execution")
    add_limit(work, "only the first N samples (default: all)")
    work.add_argument(
        "--batch",
        type=int,
        default=25,
        metavar="N",
        help="samples that are run and recorded together (default: %(default)s)",
    )
    work.add_argument(
        "--shard",
        default="0/1",
        metavar="I/N",
        help="every N-th sample, starting at I; processes with other shards may run at once (default: %(default)s)",
    )
    work.add_argument(
        "--engine",
        default="here",
        choices=("here", "ray"),
        help="this process, or a Ray cluster (default: %(default)s)",
    )
    work.add_argument(
        "--workers", type=int, help="[ray] number of workers (default: one per GPU, or one per core without a GPU)"
    )
    work.add_argument(
        "--gpus-per-worker", type=float, metavar="N", help="[ray] GPUs per worker (default: 1, or 0 without a GPU)"
    )
    work.add_argument(
        "--cpus-per-worker", type=float, default=1, metavar="N", help="[ray] cores per worker (default: %(default)s)"
    )
    work.add_argument("--address", help="[ray] address of a running cluster, e.g. auto (default: start one here)")
    add_planning(work)


def add_score(command: argparse.ArgumentParser) -> None:
    """Add the options of ``score``."""
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder that `sinklens evaluate` wrote")
    command.add_argument(
        "--run-generated-code",
        action="store_true",
        help="allow programs written by a model to run on this machine (default: no)",
    )
    command.add_argument("--data", type=Path, help="local file or folder of the published task (default: the hub)")
    command.add_argument(
        "--seconds", type=float, default=10.0, help="time limit of each program (default: %(default)s)"
    )
    command.add_argument(
        "--memory", type=int, default=512, metavar="MIB", help="memory limit of each program (default: %(default)s)"
    )
    command.set_defaults(command=run_score)


def run_evaluate(options: argparse.Namespace) -> None:
    """`sinklens evaluate`."""
    from sinklens.evaluation.conditions import masking
    from sinklens.evaluation.counting import Counts
    from sinklens.evaluation.protocols import BOTH
    from sinklens.evaluation.runner import evaluate

    _refuse_without_effect(options)
    refuse_caches(options.cache, options)
    protocol = _protocol(options)
    conditions = masking(
        options.mask_sinks, options.controls, scope=options.scope, queries=options.queries,
        of_unmasked=options.of_unmasked, kind=options.kind, part=options.part, seed=options.seed,
    )  # fmt: skip
    task = protocol.make_task(options.prompts or options.data)
    _check_limit(task, options.limit)
    shared: dict[str, Any] = {
        "task": task, "limit": options.limit, "batch": options.batch,
        "seed": options.seed, "shard": _shard(options.shard), "cache": options.cache,
    }  # fmt: skip
    regimes = [""] if options.regimes is None else options.regimes or BOTH
    for name, regime in product(options.models, regimes):
        shared["load"], here = loading(options, name), replace(protocol, regime=regime)
        if options.dry_run:
            print_plan(options, name, here, conditions, shared)
            continue
        with Counts("samples") as counts:

            def report(
                condition: "Condition", done: int, total: int,
                label: str = f"{name}, {regime}" if regime else name, counts: Counts = counts,
            ) -> None:  # fmt: skip
                counts(f"{label}: {condition.name}", done, total)

            try:
                evaluate(name, here, conditions, options.out, engine=_engine(options), progress=report, **shared)
            except KeyboardInterrupt:
                counts.stop(options.out, options.call)
    if not options.dry_run:
        _print_next_command(options.out)


def _protocol(options: argparse.Namespace) -> "EvalProtocol":
    from sinklens.evaluation.protocols import PROTOCOLS, find_protocol
    from sinklens.tasks import NAMES

    if options.prompts is not None:
        _refuse_with_prompts(options)
        options.task = "prompts" if options.verdict is None else f"prompts-{options.verdict}"
    elif options.verdict is not None:
        raise SinklensError("--verdict is for the answers to --prompts FILE; the verdicts of tasks are fixed.")
    if options.protocol is None and options.task is None:
        raise SinklensError(
            "name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k), or give a file (--prompts FILE)."
        )
    if options.protocol is None and options.task not in NAMES:
        raise SinklensError(
            f"no task is called {options.task!r}; known: {', '.join(NAMES)}.{nearest(options.task, NAMES)}"
            + (f" {options.task} is a protocol: --protocol {options.task}." if options.task in PROTOCOLS else "")
        )
    protocol = find_protocol(options.protocol or options.task)
    if options.task not in (None, protocol.task):
        raise SinklensError(
            f"the protocol {protocol.name} is for the task {protocol.task}, not {options.task}; remove one of them."
        )
    given = settings_given(options)
    _refuse_unused_settings(given, options)
    protocol = protocol.with_settings(given)
    return replace(protocol, chat_template=True) if options.chat_template else protocol


def _refuse_with_prompts(options: argparse.Namespace) -> None:
    from sinklens.tasks import NAMES

    if options.verdict is not None and f"prompts-{options.verdict}" not in NAMES:
        known = [name.removeprefix("prompts-") for name in NAMES if name.startswith("prompts-")]
        raise SinklensError(
            f"no verdict is called {options.verdict!r}; known: {', '.join(known)}.{nearest(options.verdict, known)}"
        )
    for name in ("task", "protocol", "data"):
        if getattr(options, name) is not None and not str(getattr(options, name)).startswith("prompts"):
            raise SinklensError(f"--prompts replaces --{name}; give only one of them.")


def _refuse_without_effect(options: argparse.Namespace) -> None:
    """Reject options that no other option of the call uses."""
    repeated = [name for name, number in Counter(options.models).items() if number > 1]
    if repeated:
        raise SinklensError(f"list each model once; {', '.join(repeated)} is listed several times.")
    masks = {
        "controls": [], "of_unmasked": False, "kind": [], "part": "all", "scope": "head", "queries": "newest",
    }  # fmt: skip
    ray = {"workers": None, "gpus_per_worker": None, "cpus_per_worker": 1, "address": None}
    planned = {"card": "h100", "cards": 1, "utilization": 0.4, "price": None}
    for defaults, needs, met in (
        (masks, "--mask-sinks with a K above 0", any(options.mask_sinks)),
        (ray, "--engine ray", options.engine == "ray"),
        (planned, "--dry-run", options.dry_run),
    ):
        for name, value in defaults.items():
            if getattr(options, name) != value and not met:
                flag = f"--{name.replace('_', '-')}"
                raise SinklensError(f"{flag} has no effect without {needs}; add it, or remove {flag}.")


def _check_limit(task: "Task", limit: int | None) -> None:
    number = len(task.samples(limit))
    if limit is not None and number < limit:
        raise SinklensError(
            f"--limit is {limit}, but the task {task.name} has {number} samples; omit --limit to use all of them."
        )


def _refuse_unused_settings(given: dict[str, Any], options: argparse.Namespace) -> None:
    """Reject settings that none of the models has; they would silently have no effect."""
    from sinklens.families.registry import find_sampler
    from sinklens.families.samplers import sampler_name

    models, queries = options.models, options.queries
    if not given and queries != "all":
        return
    families = [family_for(name, options) for name in models]
    mode = {"mode": given.get("mode")}
    samplers = sorted({sampler_name(family, mode) for family in families})
    if queries == "all" and "autoregressive" not in samplers:
        raise SinklensError(
            f"--queries all is for autoregressive models; {', '.join(models)} computes every query at every step."
        )
    samplers = [given["sampler"]] if "sampler" in given else samplers
    known = {"sampler", "mode", *(name for sampler in samplers for name in find_sampler(sampler).setting_names())}
    for name in given:
        if name not in known:
            raise SinklensError(
                f"--{name.replace('_', '-')} is not a setting of the {' or '.join(samplers)} sampler, which "
                f"{', '.join(models)} {'use' if len(models) > 1 else 'uses'}; remove it."
            )


def _shard(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not slash or not (number + parts).isdecimal() or not number or not parts or int(parts) < 1:
        raise SinklensError(f"--shard must be I/N, e.g. 0/4 for the first of four shards; got {text}.")
    return int(number), int(parts)


def _engine(options: argparse.Namespace) -> Any:
    if options.engine == "here":
        return None
    from sinklens.evaluation.distributed import OnRay

    return OnRay(
        workers=options.workers, gpus_per_worker=options.gpus_per_worker, cpus_per_worker=options.cpus_per_worker,
        address=options.address,
    )  # fmt: skip


def _print_next_command(out: Path) -> None:
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.scoring import verdicts

    unscored = sum(len(run.records()) - len(verdicts(run)) for run in LedgerRun.all(out))
    if unscored > 0:
        print(
            f"{unscored} generated programs have not been run; to run them: sinklens score {out} --run-generated-code"
        )
    else:
        print(f"Done. To print the table: sinklens table {out}")


def run_score(options: argparse.Namespace) -> None:
    """`sinklens score`."""
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.sandbox import Limits, available_isolation
    from sinklens.evaluation.scoring import score
    from sinklens.tasks import CodeTask, find_task

    if not options.run_generated_code:
        raise SinklensError(
            f"this command executes programs written by a model. Add --run-generated-code to allow that. Isolation on "
            f"this machine: {available_isolation()}."
        )
    print(f"Isolation: {available_isolation()}.", file=sys.stderr)
    names = sorted({str(run.what["protocol"]["task"]) for run in LedgerRun.all(options.ledger)})
    published = [name for name in names if isinstance(find_task(name), CodeTask) and hasattr(find_task(name), "path")]
    if options.data is not None and not published:
        raise SinklensError(
            f"--data is for published tasks whose answers are programs; {options.ledger} holds {', '.join(names)}."
        )
    paths = {} if options.data is None else dict.fromkeys(published, options.data)
    limits = Limits(seconds=options.seconds, memory_mb=options.memory)
    if not any(isinstance(find_task(name), CodeTask) for name in names):
        raise SinklensError(
            f"{options.ledger} holds no generated programs ({', '.join(names)}); there is nothing to run."
        )
    ran = score(options.ledger, paths=paths, limits=limits, progress=_score_progress)
    print(f"{ran} programs were run. To print the table: sinklens table {options.ledger}")


def _score_progress(run: Any, done: int, total: int) -> None:
    if done == total or done % 25 == 0:
        print(f"{run.what['model']}, {run.what['condition']['name']}: {done} of {total}", file=sys.stderr)


def run_merge(options: argparse.Namespace) -> None:
    """`sinklens merge`."""
    from sinklens.evaluation.ledger import merge
    from sinklens.utils.folders import check_folder

    check_folder(options.out, "an evaluation")
    print(
        f"{merge(options.ledgers, options.out)} records were copied. To print the table: sinklens table {options.out}"
    )


def run_export(options: argparse.Namespace) -> None:
    """`sinklens export`."""
    from sinklens.evaluation.ledger import export

    print(f"{export(options.ledger, options.out)} records were written to {options.out}.")
