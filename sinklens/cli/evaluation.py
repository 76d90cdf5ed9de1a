"""The command ``sinklens evaluate``.

Pitfall: ``evaluate`` with other settings adds new runs beside the old ones. ``table`` names the settings that differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from sinklens.cli.options import Asked, Call, Integer, Integers, LoadingOfRun, Names, fitted
from sinklens.cli.planning import DryRun, print_plan
from sinklens.cli.settings import Settings
from sinklens.errors import SinklensError, require
from sinklens.utils.escaping import say

if TYPE_CHECKING:
    from sinklens.evaluation.distributed import OnRay
    from sinklens.evaluation.protocols import EvalProtocol


@Parameter(name="*", group="Masking")
@dataclass(frozen=True)
class Masking:
    """Which keys are masked.

    Attributes:
        controls: for each K, also mask other keys in the same heads and steps: random (weaker than the strongest, the
            same throughout a run), same_kind (of token), same_mass (of attention), nearest, weakest,
            random_any (redrawn at every step, possibly among the strongest); default: no controls
        of_unmasked: for each K, also mask the sinks that the unmasked run had at the previous step; doubles the time
        sinks_only: for each K, also mask only those of the K strongest keys that are sinks by Eq. 3
        queries: in autoregressive models: hide keys from the newest token, or from all tokens (needs --no-use-cache)
    """

    controls: Names = ()
    of_unmasked: bool = False
    sinks_only: bool = False
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


Engine = Literal["here", "ray"]
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
    batch_size: Integer = 25,
    allow_longer: bool = False,
    shard: str = "0/1",
    engine: Engine = "here",
    cluster: Cluster = CLUSTER,
    dry_run: bool = False,
    planned: DryRun = DRY_RUN,
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
        batch_size: samples that are run and recorded together
        allow_longer: run prompts beyond the model's context, e.g. to rehearse a protocol with a small model
        shard: I/N: every N-th sample, starting at I; processes with other shards may run at once
        engine: this process, or a Ray cluster
        dry_run: run nothing; print passes, operations, time on a card and memory by batch
    """
    from sinklens.evaluation.conditions import masking
    from sinklens.evaluation.counting import counting
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.runner import evaluate as measure
    from sinklens.evaluation.scoring import verdicts

    _refuse_unused(masks, "--mask-sinks with a K above 0", any(mask_sinks))
    _refuse_unused(planned, "--dry-run", dry_run)
    asked, sampler = run or {}, settings or {}
    chosen = _named(task, protocol, prompts, data)
    _refuse_settings(models, sampler, masks.queries, cache, {**(loading or {}), **sampler})
    chosen = chosen.with_settings(sampler)
    chosen = replace(chosen, chat_template=chosen.chat_template or asked.get("chat_template", False))
    seed = asked.get("seed", 0)
    conditions = masking(mask_sinks, **vars(masks), seed=seed)
    shared: dict[str, Any] = {
        "task": chosen.make_task(prompts or data), "limit": limit, "batch_size": batch_size, "seed": seed,
        "shard": shard_of(shard), "cache": cache, "allow_longer": allow_longer,
    }  # fmt: skip
    workers = workers_of(engine, cluster)
    with counting("samples", out, call) as count:
        for name in dict.fromkeys(models):
            shared["load"] = fitted(name, loading, sampler)
            if dry_run:
                print_plan(planned, name, chosen, conditions, shared)
                continue
            measure(
                name,
                chosen,
                conditions,
                out,
                engine=workers,
                progress=lambda condition, done, total, name=name: count(f"{name}: {condition.name}", done, total),
                **shared,
            )
    if dry_run:
        return
    unscored = sum(len(run.records()) - len(verdicts(run)) for run in LedgerRun.all(out))
    score = f"{unscored} generated programs have not been run; to run them: sinklens score {out} --run-generated-code"
    say(score if unscored else f"Done. To print the table: sinklens table {out}")


def workers_of(engine: Engine, cluster: Cluster) -> "OnRay | None":
    """Those of ``--engine``; None for this process."""
    from sinklens.evaluation.distributed import OnRay

    _refuse_unused(cluster, "--engine ray", engine == "ray")
    return OnRay(**vars(cluster)) if engine == "ray" else None


def _refuse_unused(group: Any, needs: str, met: bool) -> None:
    """Reject options of a group that no other option of the call uses."""
    for option in fields(group):
        if getattr(group, option.name) != option.default and not met:
            flag = f"--{option.name.replace('_', '-')}"
            raise SinklensError(f"{flag} has no effect without {needs}; add it, or remove {flag}.")


def _named(task: str | None, protocol: str | None, prompts: Path | None, data: Path | None) -> "EvalProtocol":
    """The protocol that the options name."""
    from sinklens.evaluation.protocols import find_protocol

    if prompts is not None:
        require(
            (task, protocol, data) == (None, None, None),
            "--prompts replaces --task, --protocol and --data; give only one of them.",
            SinklensError,
        )
        return find_protocol("prompts")
    named = protocol or task
    if named is None:
        raise SinklensError(
            "name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k), or give a file (--prompts FILE)."
        )
    found = find_protocol(named)
    require(
        task in (None, found.task),
        f"the protocol {found.name} is for the task {found.task}, not {task}; remove one of them.",
        SinklensError,
    )
    return found


def _refuse_settings(
    models: Sequence[str], given: Mapping[str, Any], queries: str, caches: Sequence[str], load: Mapping[str, Any]
) -> None:
    """Reject what a model cannot do, and settings that none of the models has, before anything is run."""
    from sinklens.families.registry import find_sampler
    from sinklens.families.samplers import sampler_name
    from sinklens.model.loading import family_at
    from sinklens.sampling.policies import as_policy

    listed, families = ", ".join(models), {name: family_at(name, load) for name in models}
    samplers = sorted({sampler_name(family, {"mode": given.get("mode")}) for family in families.values()})
    require(
        queries != "all" or "autoregressive" in samplers,
        f"--queries all is for autoregressive models; {listed} computes every query at every step.",
        SinklensError,
    )
    exact = [name for name, family in families.items() if family.attention != "bidirectional"]
    require(
        not exact or not any(as_policy(name) for name in caches),
        f"--cache is for models with bidirectional attention, not for {', '.join(exact)}.",
        SinklensError,
    )
    samplers = [given["sampler"]] if "sampler" in given else samplers
    known = {"sampler", "mode", *(name for sampler in samplers for name in find_sampler(sampler).settings())}
    for name in given:
        require(
            name in known,
            f"--{name.replace('_', '-')} is not a setting of the {' or '.join(samplers)} sampler, which "
            f"{listed} {'use' if len(models) > 1 else 'uses'}; remove it.",
            SinklensError,
        )


def shard_of(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    require(
        number.isdecimal() and parts.isdecimal() and int(parts) >= 1,
        f"--shard must be I/N, e.g. 0/4 for the first of four shards; got {text}.",
        SinklensError,
    )
    return int(number), int(parts)
