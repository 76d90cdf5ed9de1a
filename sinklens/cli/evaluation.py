"""The command ``sinklens evaluate``.

Pitfall: ``evaluate`` with other settings adds new runs beside the old ones. ``table`` names the settings that differ.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from sinklens.cli.options import Asked, Call, Integer, Integers, LoadingOfRun, Names, family_for, fitted
from sinklens.cli.planning import DryRun, print_plan
from sinklens.cli.settings import Settings
from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import Condition
    from sinklens.evaluation.counting import Counts
    from sinklens.evaluation.protocols import EvalProtocol


@Parameter(name="*", group="Masking")
@dataclass(frozen=True)
class Masking:
    """Which keys are masked.

    Attributes:
        controls: for each K, also mask other keys in the same heads and steps: random (weaker than the strongest, the
            same throughout a run), same_kind (of token), same_mass (of attention), nearest, permuted (over heads),
            weakest, random_any (redrawn at every step, possibly among the strongest); default: no controls
        kind: only the K strongest keys of these token kinds, e.g. digit, or 'not digit' (default: all kinds)
        part: of these keys, only those that are a sink by the paper's definition, or only the others
        of_unmasked: for each K, also mask the sinks that the unmasked run had at the previous step; doubles the time
        scope: one set of keys per ...
        queries: in autoregressive models: hide keys from the newest token, or from all tokens (needs --no-use-cache)
    """

    controls: Names = ()
    kind: Names = ()
    part: Literal["all", "sink", "other"] = "all"
    of_unmasked: bool = False
    scope: Literal["head", "layer", "model"] = "head"
    queries: Literal["newest", "all"] = "newest"


@Parameter(name="*", group="Ray")
@dataclass(frozen=True)
class Cluster:
    """The workers of a Ray cluster.

    Attributes:
        workers: number of workers (default: one per GPU, or one per core without a GPU)
        gpus_per_worker: GPUs per worker (default: 1, or 0 without a GPU)
        cpus_per_worker: cores per worker
        address: address of a running cluster, e.g. auto (default: start one here)
    """

    workers: Integer | None = None
    gpus_per_worker: float | None = None
    cpus_per_worker: float = 1
    address: str | None = None


MASKING, CLUSTER, DRY_RUN = Masking(), Cluster(), DryRun()


def evaluate(
    models: tuple[str, ...],
    /,
    *,
    call: Call,
    task: str | None = None,
    protocol: str | None = None,
    prompts: Path | None = None,
    out: Path = Path("sinklens-evaluate"),
    data: Path | None = None,
    mask_sinks: Integers = (),
    masks: Masking = MASKING,
    cache: Names = (),
    limit: Integer | None = None,
    batch: Integer = 25,
    shard: str = "0/1",
    engine: Literal["here", "ray"] = "here",
    cluster: Cluster = CLUSTER,
    dry_run: bool = False,
    planned: DryRun = DRY_RUN,
    regimes: list[str] | None = None,
    settings: Settings | None = None,
    run: Asked | None = None,
    loading: LoadingOfRun | None = None,
) -> None:
    """Measure accuracy under interventions; rerun to resume.

    Args:
        models: shipped names, hub names or folders
        task: e.g. tiny-gsm, tiny-code, gsm8k, humaneval (default: that of --protocol)
        protocol: a named set of settings, e.g. llada-gsm8k (default: the task with the checkpoint's settings)
        prompts: instead of a task: JSON Lines with 'prompt' and 'expected', each a text or a list of token ids; an
            answer is right if it equals 'expected' exactly (default: none)
        out: folder of the records; created, or resumed if it exists
        data: local file or folder of a published task (default: the hub)
        mask_sinks: mask the K strongest keys of each head by the scores of the previous step (so none at step 0); 0, no
            masking, is always included (default: 0)
        cache: also evaluate every condition under these cache policies, such as prefix, dual or keep-sinks:4; an
            unknown name lists all (default: every step is exact)
        limit: only the first N samples (default: all)
        batch: samples that are run and recorded together
        shard: I/N: every N-th sample, starting at I; processes with other shards may run at once
        engine: this process, or a Ray cluster
        dry_run: run nothing; print passes, operations, time on a card and memory by batch, and, if the weights are
            there, the time here, measured on a few samples
        regimes: run every condition in several decoding regimes: diffusion (one block), blocks (those of the settings,
            or of 32) or blocks:N; without a value diffusion and blocks (default: the settings' own)
    """
    from sinklens.evaluation.conditions import masking
    from sinklens.evaluation.counting import Counts
    from sinklens.evaluation.protocols import BOTH
    from sinklens.evaluation.runner import evaluate as measure

    repeated = [name for name, number in Counter(models).items() if number > 1]
    if repeated:
        raise SinklensError(f"list each model once; {', '.join(repeated)} is listed several times.")
    _refuse_unused(masks, "--mask-sinks with a K above 0", any(mask_sinks))
    _refuse_unused(cluster, "--engine ray", engine == "ray")
    _refuse_unused(planned, "--dry-run", dry_run)
    asked, sampler = run or {}, settings or {}
    _refuse_caches(models, cache, dict(loading or {}, **sampler))
    chosen = _named(task, protocol, prompts, data)
    _refuse_settings(models, sampler, masks.queries, dict(loading or {}, **sampler))
    chosen = chosen.with_settings(sampler)
    chosen = replace(chosen, chat_template=True) if asked.get("chat_template") else chosen
    seed = asked.get("seed", 0)
    conditions = masking(mask_sinks, **vars(masks), seed=seed)
    made = chosen.make_task(prompts or data)
    number = len(made.samples(limit))
    if limit is not None and number < limit:
        raise SinklensError(
            f"--limit is {limit}, but the task {made.name} has {number} samples; omit --limit to use all of them."
        )
    shared: dict[str, Any] = {
        "task": made, "limit": limit, "batch": batch, "seed": seed, "shard": _shard(shard), "cache": cache,
    }  # fmt: skip
    for name, regime in product(models, [""] if regimes is None else regimes or BOTH):
        shared["load"], here = fitted(name, loading, sampler), replace(chosen, regime=regime)
        if dry_run:
            print_plan(planned, name, here, conditions, out, shared)
            continue
        with Counts("samples") as counts:
            report = partial(_report, counts, f"{name}, {regime}" if regime else name)
            try:
                measure(name, here, conditions, out, engine=_engine(engine, cluster), progress=report, **shared)
            except KeyboardInterrupt:
                counts.stop(out, call)
    if not dry_run:
        _print_next_command(out)


def _report(counts: "Counts", label: str, condition: "Condition", done: int, total: int) -> None:
    counts(f"{label}: {condition.name}", done, total)


def _refuse_unused(group: Any, needs: str, met: bool) -> None:
    """Reject options of a group that no other option of the call uses."""
    for option in fields(group):
        if getattr(group, option.name) != option.default and not met:
            flag = f"--{option.name.replace('_', '-')}"
            raise SinklensError(f"{flag} has no effect without {needs}; add it, or remove {flag}.")


def _refuse_caches(models: Sequence[str], names: Sequence[str], given: Mapping[str, Any]) -> None:
    """Reject unknown policies, and models that cannot run under one, before anything is loaded."""
    from sinklens.sampling.policies import as_policy

    if not [name for name in names if as_policy(name) is not None]:
        return
    for model in models:
        attention = family_for(model, given).attention
        if attention != "bidirectional":
            raise SinklensError(
                f"--cache is for bidirectional models; the attention of {model} is {attention}. Remove one of them."
            )


def _named(task: str | None, protocol: str | None, prompts: Path | None, data: Path | None) -> "EvalProtocol":
    """The protocol that the options name."""
    from sinklens.evaluation.protocols import PROTOCOLS, find_protocol
    from sinklens.tasks import NAMES

    if prompts is not None:
        for name, given in (("task", task), ("protocol", protocol), ("data", data)):
            if given is not None:
                raise SinklensError(f"--prompts replaces --{name}; give only one of them.")
        task = "prompts"
    named = protocol or task
    if named is None:
        raise SinklensError(
            "name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k), or give a file (--prompts FILE)."
        )
    if protocol is None and task not in NAMES:
        raise SinklensError(
            f"no task is called {task!r}; known: {', '.join(NAMES)}.{nearest(named, NAMES)}"
            + (f" {task} is a protocol: --protocol {task}." if task in PROTOCOLS else "")
        )
    found = find_protocol(named)
    if task not in (None, found.task):
        raise SinklensError(f"the protocol {found.name} is for the task {found.task}, not {task}; remove one of them.")
    return found


def _refuse_settings(models: Sequence[str], given: Mapping[str, Any], queries: str, load: Mapping[str, Any]) -> None:
    """Reject settings that none of the models has; they would silently have no effect."""
    from sinklens.families.registry import find_sampler
    from sinklens.families.samplers import sampler_name

    listed, mode = ", ".join(models), {"mode": given.get("mode")}
    samplers = sorted({sampler_name(family_for(name, load), mode) for name in models})
    if queries == "all" and "autoregressive" not in samplers:
        raise SinklensError(f"--queries all is for autoregressive models; {listed} computes every query at every step.")
    samplers = [given["sampler"]] if "sampler" in given else samplers
    known = {"sampler", "mode", *(name for sampler in samplers for name in find_sampler(sampler).setting_names())}
    for name in given:
        if name not in known:
            raise SinklensError(
                f"--{name.replace('_', '-')} is not a setting of the {' or '.join(samplers)} sampler, which "
                f"{listed} {'use' if len(models) > 1 else 'uses'}; remove it."
            )


def _shard(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not number.isdecimal() or not parts.isdecimal() or int(parts) < 1:
        raise SinklensError(f"--shard must be I/N, e.g. 0/4 for the first of four shards; got {text}.")
    return int(number), int(parts)


def _engine(name: str, cluster: Cluster) -> Any:
    from sinklens.evaluation.distributed import OnRay

    return None if name == "here" else OnRay(**vars(cluster))


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
