"""The command ``sinklens reproduce``: the study of sinks in diffusion language models, item by item.

Pitfall: the pages show only the items and models of the last call. Measurements of other calls stay in the folder, and
a call that names their items and models shows them again.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli.evaluation import CLUSTER, Cluster, Engine, shard_of, workers_of
from sinklens.cli.options import Call, Integer, LoadingOfRun, Names, fitted
from sinklens.cli.planning import DryRun, print_plan
from sinklens.errors import SinklensError, require
from sinklens.utils.escaping import say

if TYPE_CHECKING:
    from sinklens.analyses.reproduce import Request

DRY_RUN = DryRun()


def reproduce(
    models: Names = (),
    /,
    *,
    call: Call,
    out: Path = Path("sinklens-reproduce"),
    only: Names = (),
    limit: Integer | None = None,
    data: Path | None = None,
    sinks_only: bool = False,
    run_generated_code: bool = False,
    batch_size: Integer = 5,
    seed: Integer = 0,
    shard: str = "0/1",
    engine: Engine = "here",
    cluster: Cluster = CLUSTER,
    resume: bool = False,
    dry_run: bool = False,
    planned: DryRun = DRY_RUN,
    loading: LoadingOfRun | None = None,
) -> None:
    """Repeat "Attention Sinks in Diffusion Language Models" (arXiv 2510.15731): its tables and figures beside ours.

    Args:
        models: shipped names, hub names or folders
        out: folder of the page index.html, report.md and the measurements; rerun to resume
        only: items, such as table1,fig5: table1, table2, fig1, fig3 to fig10, frontier, lifetimes, rare (default: all)
        limit: only the first N generations and samples (default: 30 generations, all samples)
        data: folder of test.jsonl, train.jsonl and HumanEval.jsonl (default: the hub; for shipped models, the problems
            that ship with them)
        sinks_only: Table 1 also with only those of the K strongest keys masked that are sinks by Eq. 3
        run_generated_code: allow the programs of HumanEval, written by a model, to run on this machine, in isolation
        batch_size: prompts run together
        seed: the same seed gives the same result
        shard: I/N: every N-th generation and sample, starting at I; processes with other shards may run at once. Then
            run once without it to write the pages
        engine: where the samples of Table 1 run: in this process, or on a Ray cluster
        resume: continue what OUT holds with the options of its call; needs no MODEL
        dry_run: run nothing; print passes, operations, time on a card and memory by batch
    """
    from sinklens.analyses.reproduce import Request
    from sinklens.analyses.reproduce import reproduce as measure
    from sinklens.evaluation.counting import counting
    from sinklens.utils.documents import read_json

    if resume:
        require(
            not models,
            "--resume takes the models and options of OUT; give only --out, --shard and --engine.",
            SinklensError,
        )
        stored, names = read_json(out / "reproduce.json", SinklensError), Request.__dataclass_fields__
        lacks = f"{out / 'reproduce.json'} does not hold the options of a reproduction; name the models again."
        require(set(names) <= set(stored), lacks, SinklensError)
        asked = Request(**{name: stored[name] for name in names})
    else:
        given = {name: fitted(name, loading) for name in models}
        path = None if data is None else str(data)
        items = tuple(name for words in only for name in words.split(","))
        asked = Request(
            models, items, limit, path, sinks_only, run_generated_code, batch_size, seed, given, tuple(call)
        )
    if dry_run:
        for name in asked.models:
            _print_plans(planned, name, asked)
        return
    with counting("prompts", out, call) as count:
        written = measure(asked, out, shard_of(shard), count, workers_of(engine, cluster))
    say(*(f"Written: {file}" for file in written))


def _print_plans(options: DryRun, name: str, asked: "Request") -> None:
    """What the generations and the evaluations of a model would cost."""
    from sinklens.evaluation.conditions import UNMASKED
    from sinklens.evaluation.protocols import find_protocol

    shared: dict[str, Any] = {"shard": (0, 1), "cache": (), "load": asked.loading[name]}
    if set(asked.items) != {"table1"}:
        problems = find_protocol("tiny-gsm").with_settings(asked.settings(name))
        limits = {"task": problems.make_task(), "limit": len(asked.prompts)}
        say("generations")
        print_plan(options, name, problems, [UNMASKED], shared | limits)
    for protocol, task in asked.tasks(name) if "table1" in asked.items else ():
        limits = {"task": task, "limit": asked.limit}
        say(f"Table 1, {protocol.name}")
        print_plan(options, name, protocol, asked.conditions, shared | limits)
