"""The study "Attention Sinks in Diffusion Language Models" (Rulli et al., 2510.15731) in one folder.

`reproduce` generates text as for the paper's figures (paper.py), evaluates as for its Table 1, and writes one page on
which every number stands beside the paper's. Both parts resume where they stopped: a study stores each prompt, and an
evaluation each answer.

    OUT/index.html, report.md    every item: ours, the paper's, the verdict, what the paper leaves open
    OUT/ITEM.csv, paper-ITEM.*   its numbers and its picture
    OUT/comparisons.csv          every comparison
    OUT/reproduce.json           what was asked, with versions and seed
    OUT/generations              a study of each model
    OUT/table1                   an evaluation, which `sinklens table` prints

A *verdict* is given only for the models that the paper names. It rests on the 95 % interval of the difference: "differ"
if it excludes what the paper says, "agree" if the whole interval fits it, "cannot tell" otherwise. Where the paper
prints a number, "agree" means that the interval contains 0, with at least as many samples or generations as the paper
has; with fewer, the verdict is "cannot tell". Table 2 prints no errors; its 30 generations are taken to vary like ours.

Limitation: the shipped models cannot answer GSM8K, so they are evaluated on the problems that ship with them, without
`data`. The tiny ones also have a context of 128 tokens and generate at their own lengths. Such models are stand-ins:
they show that the measurements work, and have no verdict.
"""

import base64
import json
import math
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series  # type: ignore[import-untyped,unused-ignore]

from sinklens.analyses.paper import CHECKPOINTS, ITEMS, Claim, PaperFigures, pictures, tables_of
from sinklens.analyses.results import Findings, draw
from sinklens.analyses.study import setting_names
from sinklens.errors import nearest, require
from sinklens.evaluation.conditions import Condition, masking
from sinklens.evaluation.distributed import OnRay
from sinklens.evaluation.protocols import PROTOCOLS, STUDY, EvalProtocol, find_protocol, is_checkpoint
from sinklens.evaluation.runner import evaluate
from sinklens.evaluation.scoring import score
from sinklens.evaluation.tables import frame
from sinklens.evaluation.verification import MASKED, STAND_INS, protocol_for, ships
from sinklens.model import load
from sinklens.model.files import shipped_names
from sinklens.tasks.base import Task
from sinklens.tasks.registry import reads_files
from sinklens.tasks.word_problems import held_out
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import in_csv
from sinklens.utils.estimates import Estimate, unpaired
from sinklens.utils.folders import check_folder
from sinklens.utils.progress import Progress, reporting
from sinklens.utils.versions import versions
from sinklens.views import accuracy_curves
from sinklens.views.reproduction import PAGES, reproduction_pages

GENERATIONS = 30
SETTINGS = {"gen_length": 128, "steps": 128, "block_length": 32}
CONTROLS = ("random", "same_mass")
COLUMNS = ["item", "model", "what", "ours", "low", "high", "paper", "verdict"]
STAND_IN = "a shipped model: problems that it can answer, at its own lengths; a stand-in without a verdict"
NOT_IN_PAPER = {"paper": "", "verdict": "not in the paper"}
COLUMNS_OF_TABLE_1 = [
    "protocol", "model", "condition", "total", "unscored", "estimate", "low", "high", "against_unmasked_difference",
    "against_unmasked_low", "against_unmasked_high", "against_random_difference", "against_random_low",
    "against_random_high", "against_same_mass_difference", "against_same_mass_low", "against_same_mass_high", "departs",
]  # fmt: skip
SHOWN = 7  # rows of a model and measure on a page; the CSV has all


@dataclass(frozen=True)
class Request:
    """What is reproduced.

    Attributes:
        models: as `sinklens.load` takes them.
        only: names of `ITEMS`; none means all.
        limit: the first so many generations and samples; None for 30 generations and every sample.
        data: folder of ``test.jsonl``, ``train.jsonl`` and ``HumanEval.jsonl``; None for the hub, and for shipped
            models the problems that ship with them.
        sinks_only: Table 1 also under the reading of `masking`'s ``sinks_only``.
        run_generated_code: run the programs of HumanEval, in isolation.
        batch_size, seed: of runs.
        loading: model -> keyword arguments of `sinklens.load`.
        call: the words of the command.

    Raises:
        SettingError: no model, or an unknown item.
    """

    models: tuple[str, ...]
    only: tuple[str, ...] = ()
    limit: int | None = None
    data: str | None = None
    sinks_only: bool = False
    run_generated_code: bool = False
    batch_size: int = 5
    seed: int = 0
    loading: dict[str, dict[str, Any]] = field(default_factory=dict)
    call: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.models, "name at least one model, such as tiny-llada or GSAI-ML/LLaDA-8B-Instruct.")
        for name in self.only:
            require(name in ITEMS, f"no item is called {name!r}; known: {', '.join(ITEMS)}.{nearest(name, ITEMS)}")

    @property
    def items(self) -> list[str]:
        """The items, in the paper's order."""
        return [name for name in ITEMS if name in self.only or not self.only]

    @property
    def prompts(self) -> list[str]:
        """Those of the generations."""
        return [problem.prompt for problem in held_out(min(self.limit or GENERATIONS, GENERATIONS))]

    @property
    def conditions(self) -> list[Condition]:
        """Those of Table 1."""
        return masking(MASKED, CONTROLS, sinks_only=self.sinks_only, seed=self.seed)

    def tasks(self, model: str) -> Iterator[tuple[EvalProtocol, Task]]:
        """The protocols of Table 1 for a model, each with its task."""
        for task in STAND_INS:
            name = f"llada-{task}" if self.data and ships(model) else protocol_for(model, task)  # type: ignore[arg-type]
            protocol = find_protocol(name)
            yield protocol, protocol.make_task(self.data if reads_files(protocol.task) else None)

    def settings(self, model: str) -> dict[str, Any]:
        """The settings of the generations of a model."""
        return {} if is_tiny(model) else SETTINGS


def is_tiny(model: str) -> bool:
    """Whether a model ships with its weights: its context of 128 tokens is too short for the paper's lengths."""
    return any(is_checkpoint(model, name) for name in shipped_names())


def reproduce(
    asked: Request,
    out: Path,
    shard: tuple[int, int] = (0, 1),
    progress: Progress = None,
    engine: OnRay | None = None,
) -> list[Path]:
    """Measure what is missing in `out` and write the pages; see the module.

    Args:
        asked: what is reproduced.
        out: the folder.
        shard: (index, number of shards): measure every n-th generation and sample. Processes with other shards may run
            at once; the pages are written by a call without shards.
        progress: as in `Study.run`; a function is called with a label, the units done and the total.
        engine: workers of a Ray cluster, which run the samples of Table 1; None for this process.

    Returns:
        The pages; none from a shard.

    Raises:
        SinklensError: as `Study.run`, `evaluate` and `score` do.
    """
    check_folder(out, "a reproduction")
    about = {"versions": versions("sinklens", "torch", "transformers"), "python": platform.python_version()}
    write_file(out / "reproduce.json", json.dumps(asdict(asked) | about, indent=1) + "\n")
    found = list[Findings]()
    with reporting(progress, "units", str) as report:
        for name in asked.models:
            model = load(name, **asked.loading.get(name, {}))
            if set(asked.items) != {"table1"}:
                chosen = {key: value for key, value in asked.settings(name).items() if key in setting_names(model, {})}
                templated = bool(getattr(model.tokenizer, "chat_template", None))
                study = PaperFigures(asked.seed, asked.batch_size, chosen, templated, shard=shard)
                found.append(study.run([model], asked.prompts, out / "generations" / model.fingerprint, report))
            for protocol, task in asked.tasks(name) if "table1" in asked.items else ():
                evaluate(
                    name if engine else model, protocol, asked.conditions, out / "table1", task=task,
                    limit=asked.limit, batch_size=asked.batch_size, seed=asked.seed, shard=shard,
                    allow_longer=is_tiny(name), engine=engine,
                    load=asked.loading.get(name) if engine else None,
                    progress=lambda condition, done, total, name=name: report(
                        f"{name}: {condition.name}", done, total
                    ),
                )  # fmt: skip
    return [] if shard[1] > 1 else _written(asked, out, found, about)


def _written(asked: Request, out: Path, found: Sequence[Findings], about: Mapping[str, Any]) -> list[Path]:
    """Write tables, pictures and pages."""
    measured = {name: data for one in found for name, data in one.measured.items()}
    examples = {name: data for one in found for name, data in one.examples.items()}
    tables = tables_of(measured, [name for name in asked.items if name != "table1"], asked.seed)
    figures, rows = pictures(measured, examples, tables), list[dict[str, Any]]()
    if "table1" in asked.items:
        if asked.run_generated_code:
            score(out / "table1", data=asked.data)
        table = frame(out / "table1")
        tables = {"table1": table[[name for name in table if name not in ("speed", "per_second")]], **tables}
        rows += [_of_accuracy(row) for _, row in table[table["pick"].isin(["", "strongest"])].iterrows()]
        figures["table1"] = accuracy_curves(table[table["total"] > 0])
    rows += [row for name in tables if name != "table1" for row in _claims(name, tables[name], measured)]
    compared = DataFrame(rows, columns=COLUMNS).drop_duplicates()
    for name, table in {**tables, "comparisons": compared}.items():
        write_file(out / f"{name}.csv", in_csv(table))
    drawn = {file.stem.removeprefix("paper-"): file for file in draw("paper", figures, out) if file.suffix == ".png"}
    sections = [_section(name, tables[name], compared[compared["item"] == name], drawn) for name in asked.items]
    shown = {
        "call": shlex.join(["sinklens", *asked.call]), "seed": asked.seed, "about": about, "sections": sections,
        "generations": len(asked.prompts),
        "settings": {name: asked.settings(name) or STAND_IN for name in asked.models},
    }  # fmt: skip
    for name, content in reproduction_pages(shown).items():
        write_file(out / name, content)
    return [out / name for name in PAGES]


def _section(name: str, table: "DataFrame", compared: "DataFrame", drawn: Mapping[str, Path]) -> dict[str, Any]:
    """What the pages show of an item."""
    columns = COLUMNS_OF_TABLE_1 if name == "table1" else [column for column in table if column not in ("id", "kind")]
    groups = [column for column in ("protocol", "model", "condition", "measure") if column in table]
    rows = table.groupby(groups, sort=False).head(5 if name == "table2" else SHOWN)[columns]
    image = base64.b64encode(drawn[name].read_bytes()).decode() if name in drawn else ""
    return {
        "name": name, "item": ITEMS[name], "columns": columns,
        "rows": _cells(rows),
        "compared": _cells(compared.drop(columns="item")),
        "heads": COLUMNS[1:], "picture": drawn[name].name if name in drawn else "", "image": image,
    }  # fmt: skip


def _cells(table: "DataFrame") -> list[list[str]]:
    return table.round(3).astype(object).where(table.notna(), "").astype(str).to_numpy().tolist()


def _of_accuracy(row: "Series") -> dict[str, Any]:
    """The comparison of a row of Table 1."""
    listed = getattr(PROTOCOLS.get(row["protocol"]), "published", ()) if "," not in row["condition"] else ()
    printed = next(
        (
            one
            for one in listed
            if (one.source, one.masked) == (STUDY, row["masked"]) and is_checkpoint(row["checkpoint"], one.model)
        ),
        None,
    )
    if printed is None or printed.accuracy is None:
        return {"item": "table1", "model": row["model"], "what": "", **NOT_IN_PAPER}
    ours = Estimate(row["estimate"], row["low"], row["high"], row["total"])
    gap, departs = unpaired(printed.accuracy, ours), row["departs"] or "" if ours.n else "no program was run"
    return {
        "item": "table1", "model": row["model"], "what": f"{row['protocol']}, {row['condition']}",
        "ours": ours.value, "low": ours.low, "high": ours.high, "paper": f"{printed.score:.2f}",
        "verdict": f"cannot tell: {departs}" if departs else
        _verdict("equals", gap.low, gap.high, bool(ours.n >= printed.accuracy.n)),
    }  # fmt: skip


def _claims(item: str, table: "DataFrame", models: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The comparisons of an item with every model: one for each claim about it. Other models have no verdict."""
    for model in models:
        named = next((name for name, checkpoint in CHECKPOINTS.items() if is_checkpoint(model, checkpoint)), "")
        made = [claim for claim in ITEMS[item].claims if (named in claim.models if named else claim.side != "equals")]
        for claim in made:
            found = _judged(claim, table[table["model"] == model])
            yield {"item": item, "model": model, **found, **({} if named else NOT_IN_PAPER)}
        if not made:
            nothing = {"verdict": "cannot tell: the paper prints no number and no statement"} if named else NOT_IN_PAPER
            yield {"item": item, "model": model, "what": "", "paper": "", **nothing}


def _judged(claim: Claim, rows: "DataFrame") -> dict[str, Any]:
    for column, label in {"measure": claim.measure, **claim.where}.items():
        rows = rows[rows[column] == label]
    value, low, high, count = rows.iloc[0][["estimate", "low", "high", "prompts"]] if len(rows) else (0.0, 0.0, 0.0, 0)
    what = ", ".join([claim.measure, *map(str, claim.where.values())])
    paper = f"{claim.number:g}" if claim.side == "equals" else f"{claim.side} {claim.number:g}"
    widened = math.sqrt(2) if claim.side == "equals" else 1.0  # the paper's generations vary, too
    near, far = (value - claim.number + widened * (limit - value) for limit in (low, high))
    verdict = _verdict(claim.side, near, far, bool(count >= GENERATIONS))
    return {"what": what, "ours": value, "low": low, "high": high, "paper": paper, "verdict": verdict}


def _verdict(side: str, low: float, high: float, enough: bool) -> str:
    """The verdict by the interval of a value minus what the paper says."""
    above, below = low > 0, high < 0
    agrees = {"above": above, "below": below, "equals": enough and low <= 0 <= high}[side]
    differs = {"above": high <= 0, "below": low >= 0, "equals": above or below}[side]
    return f"{'agree' if agrees else 'differ' if differs else 'cannot tell'}: difference [{low:+.3f}, {high:+.3f}]"
