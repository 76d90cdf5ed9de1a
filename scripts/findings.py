"""Write the tables of docs/findings.md from the stored results in docs/results.

    python scripts/findings.py

A table is what stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; `TABLES` says which numbers it
holds. tests/test_findings.py fails if a table is not current, or if a number in the text of a section is in none of its
tables. Results of a second training run, with another seed, are in docs/results/seed-2, as model "NAME-seed-2": they
add columns beside those of the first, and `Contrast` compares the two.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "findings.md"
RESULTS = ROOT / "docs" / "results"
SECOND = "-seed-2"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MODELS = ("tiny-llada", "tiny-dream", "tiny-mmada", "tiny-llama")


@dataclass(frozen=True)
class Row:
    """One row: a label, and for each model the estimate and interval of the stored row with these values.

    Attributes:
        label: first cell.
        where: column -> value; the row of each model must be unique.
        scale: factor, e.g. 100 for percent.
        digits: decimals.
        file: stored table without ``.csv``; by default the table's.
    """

    label: str
    where: dict[str, Any]
    scale: float = 1.0
    digits: int = 2
    file: str | None = None


@dataclass(frozen=True)
class Contrast(Row):
    """A row of the table of seeds: a measure of each model that says something by being above or below a threshold."""

    threshold: float = 0.0


@dataclass(frozen=True)
class Table:
    """One table of the page.

    Attributes:
        file: name of the stored table, without ``.csv``.
        rows: its rows.
        models: its columns.
        counted: whether each cell says from how many prompts it is, because the rows differ.
    """

    file: str
    rows: tuple[Row, ...]
    models: tuple[str, ...] = MODELS
    counted: bool = False


def percent(label: str, digits: int = 1, **where: Any) -> Row:
    """A row in percent."""
    return Row(label, where, 100.0, digits)


def plain(label: str, digits: int = 2, **where: Any) -> Row:
    """A row in the stored unit."""
    return Row(label, where, 1.0, digits)


def contrast(
    file: str, label: str, threshold: float = 0.0, scale: float = 1.0, digits: int = 2, **where: Any
) -> Contrast:
    """A row of the table of seeds."""
    return Contrast(label, where, scale, digits, file, threshold)


DIFFUSION = MODELS[:3]
WINDOWS = {"none": "all keys", "earlier": "earlier keys only", "later": "later keys only", "near": "near keys only"}
EQ3 = "epsilon-over-mean (sum, 3)"
TABLES: dict[str, Table] = {
    "existence": Table(
        "existence-detectors",
        (
            percent("positions that are sinks, %", 2, measure="found", detector=EQ3),
            percent("heads and steps with a sink, %", measure="heads", detector=EQ3),
            plain("value norm at sinks ÷ median of the row", measure="value_ratio", detector=EQ3),
            percent("positions that are no-op sinks, %", 2, measure="found", detector="no-op"),
        ),
    ),
    "motion": Table("dynamics-null", (
        percent("strongest key changes, % of steps", measure="jump_share", source="measured"),
        percent("… under the null", measure="jump_share", source="null model"),
        percent("… with the queries held fixed", measure="jump_share", source="queries held fixed"),
        percent("the same between steps with a sink, %", measure="sink_jump_share", source="measured"),
        percent("… under the null", measure="sink_jump_share", source="null model"),
        percent("heads whose strongest key never changes, %", measure="static_share", source="measured"),
        percent("… under the null", measure="static_share", source="null model"),
        percent("… with the queries held fixed", measure="static_share", source="queries held fixed"),
        Row("steps that a sink lasts (at most 24)", {"measure": "restricted_mean"}, 1.0, 1, "dynamics-lifetimes"),
    )),
    "kinds": Table("token_types-matched", tuple(
        plain(label, measure="ratio", by="kind", set=kind, matched=matched)
        for kind in ("digit", "mask", "newline", "punctuation", "start")
        for label, matched in ((f"{kind}: crude", "nothing"), (f"{kind}: same step and place", "step, position"))
    )),
    "undecided": Table(
        "masked_sinks-matched",
        tuple(
            Row(f"{label}, layer {layer}", {"measure": measure, "layer": layer}, scale, digits, file)
            for label, measure, scale, digits, file in (
                ("lens names the final token: sinks − others, points", "named_difference", 100.0, 0, None),
                ("value norm: sinks ÷ others", "value_ratio", 1.0, 2, "masked_sinks-layers"),
            )
            for layer in range(4)
        ),
        DIFFUSION,
    ),
    "order": Table("events-order", (
        plain("score against deciding step", measure="correlation"),
        plain("… position held fixed", measure="partial"),
        plain("… same step and place", measure="within"),
        Row("landings on just decided ÷ all others, crude",
            {"measure": "ratio", "others": "all", "matched": "nothing"}, 1.0, 1, "events-landings"),
        Row("… same step and place",
            {"measure": "ratio", "others": "all", "matched": "step, position"}, 1.0, 1, "events-landings"),
        Row("… ÷ tokens decided earlier, same step and place",
            {"measure": "ratio", "others": "decided earlier", "matched": "step, position"}, 1.0, 1, "events-landings"),
        Row("… ÷ the same token written over an earlier one, crude",
            {"measure": "ratio", "others": "written over", "matched": "nothing"}, 1.0, 2, "events-landings"),
        Row("… same step and place",
            {"measure": "ratio", "others": "written over", "matched": "step, position"}, 1.0, 2, "events-landings"),
        Row("change of the embedding, just decided", {"measure": "change_just"}, 1.0, 2, "events-changes"),
        Row("… written over", {"measure": "change_written"}, 1.0, 2, "events-changes"),
    ), DIFFUSION),
    "content": Table(
        "content-costs",
        tuple(
            Row(f"{kind}, {place}: {what}", {"measure": "cost", "kind": kind, "part": part, "change": change}, 100.0, 0)
            for kind, part, place in (
                ("any", "all", "everywhere"),
                ("digit", "sink", "a sink"),
                ("digit", "other", "no sink"),
                ("not digit", "sink", "a sink"),
                ("not digit", "other", "no sink"),
            )
            for change, what in (
                ("mask", "masked"),
                ("value", "value replaced"),
                ("mask_random", "random key masked"),
                ("mask_kind", "random key of the kind masked"),
            )
        ),
        DIFFUSION,
    ),
    "thresholds": Table(
        "necessity-thresholds",
        tuple(
            Row(f"ε = {epsilon:g}: {what}", {"measure": "above_cost", "epsilon": epsilon, "pick": pick}, 100.0, 0)
            for epsilon in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
            for pick, what in (("strongest", "keys above ε"), ("random", "as many random keys"))
        ),
        ("tiny-llada", "tiny-dream", "tiny-llama"),
    ),
    "definitions": Table(
        "definitions-excess",
        tuple(
            Row(
                f"{definition}, {hidden}, {count} per head",
                {"measure": "cost", "definition": code, "reach": reach, "top_k": count}, 100.0, 0,
            )
            for code, definition in (
                ("columns_steady", "column sums, steady"), ("columns_step", "column sums, step before"),
                ("row_steady", "newest query's row, steady"), ("row_step", "newest query's row, step before"),
                ("first", "first tokens"),
            )
            for reach, hidden in (("all", "from all queries"), ("newest", "from the newest"))
            for count in (1, 5)
        ),
        ("tiny-llada", "tiny-llama"),
    ),
    "interaction": Table(
        "interaction-costs",
        (
            *(percent(f"answers right, {seen}", 0, measure="base", window=window) for window, seen in WINDOWS.items()),
            *(
                percent(f"points lost by masking, {seen}: {what}", 0, measure="cost", window=window, pick=pick)
                for window, seen in list(WINDOWS.items())[:2]
                for pick, what in (("strongest", "strongest keys"), ("random", "random keys"))
            ),
            *(
                plain(f"KL in nats, {seen}: {what}", measure="kl", window=window, pick=pick)
                for window, seen in WINDOWS.items()
                for pick, what in (("strongest", "strongest keys"), ("random", "random keys"))
            ),
        ),
        ("tiny-llada", "tiny-dream"),
    ),
    "features": Table(
        "features-measures",
        tuple(
            Row(f"{place}: {label}, {who}", {"measure": measure, "sae": sae, "role": role}, scale, digits)
            for sae, place in (("masked", "masked positions"), ("decided", "tokens"))
            for measure, label, scale, digits in (
                ("excess", "firing at sinks − other positions, points", 100.0, 1),
                ("follows", "firing at a place while a sink − while not, points", 100.0, 1),
                ("arrives", "rise of firing where a sink moves to, points", 100.0, 1),
                ("leaves", "fall of firing where it was, points", 100.0, 1),
                ("gone", "sinks gone when ablated, %", 100.0, 1),
                ("removed", "length removed from the stream", 1.0, 2),
                ("kl", "KL in nats", 1.0, 4),
                ("changed", "answers changed, %", 100.0, 0),
                ("cost", "answers lost, points", 100.0, 0),
            )
            for role, who in (("sink", "chosen"), ("control", "control"))
        ),
        ("tiny-llada",),
        counted=True,
    ),
    "writers": Table(
        "circuits-writers",
        tuple(
            Row(f"{name}, {place}: {label}", {"role": role, "place": code, "writer": writer})
            for role, name in (("strongest", "strongest sink"), ("mobile", "most mobile sink"))
            for code, place in (("sink", "its key"), ("control", "control key"))
            for writer, label in (("head", "heads"), ("mlp", "MLPs"))
        ),
        ("tiny-llada", "tiny-dream"),
        counted=True,
    ),
    "readers": Table(
        "circuits-readers",
        tuple(
            Row(f"{name}, {place}: {label}", {"role": role, "place": code, "reader": reader}, 1.0, 4)
            for role, name in (("strongest", "strongest sink"), ("mobile", "most mobile sink"))
            for code, place in (("sink", "its key"), ("control", "control key"))
            for reader, label in (
                ("all", "all later components"), ("queries", "queries of later heads"), ("keys", "keys"),
                ("values", "values"), ("mlp", "MLPs"), ("logits", "logits"),
            )
            if code == "sink" or reader == "all"
        ),
        ("tiny-llada", "tiny-dream"),
        counted=True,
    ),
    "jumps": Table(
        "circuits-edges",
        (
            Row("jumps per problem", {"measure": "jumps"}, 1.0, 1),
            *(
                percent(f"undone through {name}, %: {label}", 0, measure="undone", letter=letter, sender=sender)
                for letter, name in (("q", "queries"), ("k", "keys"))
                for sender, label in (("all", "all components"), ("head", "heads"), ("mlp", "MLPs"))
            ),
            percent("queries of just decided positions, %", 0, measure="local", where="decided"),
            percent("queries of as many nearest others, %", 0, measure="local", where="nearby"),
            percent("queries of as many earlier tokens, masked again, %", 0, measure="local", where="again"),
            plain("change of the embedding, just decided", measure="change", where="decided"),
            plain("… nearest others", measure="change", where="nearby"),
            plain("… masked again", measure="change", where="again"),
        ),
        ("tiny-llada", "tiny-dream"),
        counted=True,
    ),
    "stale": Table("caching-costs", (
        *(
            Row(f"{label}, 10⁻⁶ nats", {"measure": "kl", "change": change, "choice": choice, "layer": "all"}, 1e6, 0)
            for change, choice, label in (
                ("stale", "sink", "only sinks stale"),
                ("stale", "same_mass", "only random keys with as much attention stale"),
                ("stale", "nearest", "only the nearest keys stale"),
                ("stale", "random", "only as many random keys stale"),
                ("stale", "sink_of_kind", "only sinks with another key of their kind stale"),
                ("stale", "same_kind", "only random keys of these kinds stale"),
                ("fresh", "none", "everything decided stale"),
                ("fresh", "sink", "… but the sinks"),
                ("fresh", "same_mass", "… but random keys with as much attention"),
                ("fresh", "nearest", "… but the nearest keys"),
                ("fresh", "random", "… but as many random keys"),
            )
        ),
        *(
            percent(f"proposals that change, {label}, %", 2, measure="proposals", layer="all", change=how, choice=keys)
            for how, keys, label in (
                ("stale", "sink", "only sinks stale"),
                ("fresh", "none", "everything stale"),
                ("fresh", "sink", "all but sinks stale"),
            )
        ),
    ), DIFFUSION),
    "stale-layers": Table("caching-costs", tuple(
        Row(f"layer {layer}: {label}, 10⁻⁶ nats",
            {"measure": "kl", "change": change, "choice": choice, "layer": str(layer)}, 1e6, 0)
        for layer in (1, 2, 3)
        for change, choice, label in (
            ("stale", "sink", "only sinks stale"),
            ("stale", "same_mass", "only random keys with as much attention stale"),
            ("fresh", "none", "everything decided stale"),
            ("fresh", "sink", "… but the sinks"),
        )
    ), DIFFUSION),
    "stale-motion": Table("caching-motion", tuple(
        percent(f"{name}: {label}", measure="jump_share", policy=policy, source=source)
        for policy, name in (
            ("dual", "DualCache"), ("delayed", "DelayedCache"), ("keep-sinks", "KeepSinks"),
            ("not keep-sinks", "its negation"),
        )
        for source, label in (
            ("policy", "strongest key changes, % of steps"), ("same queries", "… in the exact run, same queries"),
            ("exact", "… in the exact run, all queries"),
        )
        if source != "exact" or policy == "dual"
    ), DIFFUSION),
    "ranges": Table("ranges", tuple(
        Row(f"{kind}, {low} to {high}", {"kind": kind, "low": low, "high": high})
        for kind, ranges in (
            ("more", ((1, 7), (8, 20), (21, 40), (41, 120))), ("fewer", ((1, 7), (8, 20), (21, 40), (41, 120))),
            ("groups", ((2, 9), (10, 12), (13, 20))), ("share", ((2, 9), (10, 12), (13, 20))),
        )
        for low, high in ranges
    ), (*MODELS, "tiny-llada-skills", "tiny-llama-skills")),
    "seeds": Table("", (
        contrast("existence-detectors", "value norm at sinks ÷ median of the row, above 1", 1.0,
                 measure="value_ratio", detector=EQ3),
        contrast("dynamics-null", "strongest key changes, % of steps, beyond the null", 0.0, 100.0, 1,
                 measure="jump_share", source="measured − null model"),
        contrast("dynamics-null", "the same between steps with a sink", 0.0, 100.0, 1,
                 measure="sink_jump_share", source="measured − null model"),
        contrast("dynamics-null", "heads whose strongest key never changes, %, beyond the null", 0.0, 100.0, 1,
                 measure="static_share", source="measured − null model"),
        *(contrast("token_types-matched", f"{kind}: sinks at the same step and place, ratio above 1", 1.0,
                   measure="ratio", by="kind", set=kind, matched="step, position")
          for kind in ("digit", "mask", "newline", "punctuation")),
        *(contrast("necessity-claims", f"points lost beyond a random key, {where}", 0.0, 100.0, 0,
                   measure="cost", part=part)
          for part, where in (("all", "strongest keys"), ("sink", "those that are sinks"), ("other", "all others"))),
        *(contrast("content-claims", label, 0.0, 100.0, 0, measure=claim) for label, claim in (
            ("points that digits cost more if they are sinks",
             "a digit that is a sink costs more than one that is not"),
            ("points that other tokens cost more if they are sinks",
             "another token that is a sink costs more than one that is not"),
        )),
        contrast("events-order", "score against deciding step, same step and place", measure="within"),
        *(contrast("events-landings", f"landings on just decided ÷ {label}, same step and place, above 1", 1.0, 1.0, 1,
                   measure="ratio", others=others, matched="step, position")
          for others, label in (("all", "all others"), ("decided earlier", "tokens decided earlier"))),
        *(contrast("events-landings", f"landings on just decided ÷ the same token written over, {label}, above 1", 1.0,
                   measure="ratio", others="written over", matched=matched)
          for matched, label in (("nothing", "crude"), ("step, position", "same step and place"))),
    ), DIFFUSION),
}  # fmt: skip


@cache
def stored(file: str) -> pandas.DataFrame:
    """A stored table, with its rows of second training runs."""
    paths = [folder / f"{file}.csv" for folder in (RESULTS, RESULTS / SECOND.strip("-"))]
    parts = [pandas.read_csv(path, keep_default_na=False, na_values=[""]) for path in paths if path.is_file()]
    return pandas.concat(parts)


def found(row: Row, file: str, model: str) -> tuple[float, float, float, int] | None:
    """Estimate, interval and number of prompts of one model; None where nothing was measured."""
    table = stored(row.file or file)
    for column, value in {"model": model, **row.where}.items():
        table = table[table[column] == value]
    if len(table) > 1:
        raise ValueError(f"{row.label}, {model}: {len(table)} rows of {row.file or file} match {row.where}")
    if table.empty:
        return None
    one = table.iloc[0]
    names = ("estimate", "low", "high") if "estimate" in one else ("share", "share_low", "share_high")
    estimate, low, high = (float(one[name]) for name in names)
    return None if math.isnan(estimate) else (estimate, low, high, int(one.get("prompts", 0)))


def cell(row: Row, file: str, model: str, counted: bool = False) -> str:
    """Estimate and interval of one model, and the number of prompts if `counted`; empty where nothing was measured."""
    values = found(row, file, model)
    if values is None:
        return ""
    estimate, low, high = (number(value * row.scale, row.digits) for value in values[:3])
    return f"{estimate} [{low}, {high}]" + (f", n = {values[3]}" if counted else "")


def number(value: float, digits: int) -> str:
    """A rounded number, with a minus sign and without a negative zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def files(table: Table) -> set[str]:
    """The stored tables that a table is written from; for the table of seeds, those of second runs."""
    found = {row.file or table.file for row in table.rows}
    seconds = {name for name in found if stored(name)["model"].str.endswith(SECOND).any()}
    return seconds if isinstance(table.rows[0], Contrast) else found


def columns(table: Table) -> list[str]:
    """The models of a table, each followed by its second training run if that was measured."""
    measured = {model for file in files(table) for model in stored(file)["model"]}
    both = [(model, model + SECOND) for model in table.models]
    return [one for first, second in both for one in (first, second) if one == first or second in measured]


def lines_of(table: Table) -> list[list[str]]:
    """Header and rows, without rows that no model has."""
    models = columns(table)
    rows = [[row.label, *(cell(row, table.file, model, table.counted) for model in models)] for row in table.rows]
    header = [model.replace(SECOND, ", seed 2") for model in models]
    return [["", *header], *(line for line in rows if any(line[1:]))]


def compared(table: Table) -> list[list[str]]:
    """Header and rows of the table of seeds: one row for every contrast and model that has two training runs."""
    lines = [["model", "measure", "first seed", "second seed", "they"]]
    for model in table.models:
        for row in table.rows:
            pair = [found(row, table.file, name) for name in (model, model + SECOND)]
            if pair[0] and pair[1] and isinstance(row, Contrast):
                cells = [cell(row, table.file, name, counted=True) for name in (model, model + SECOND)]
                lines.append([model, row.label, *cells, agreement(pair[0][:3], pair[1][:3], row.threshold)])
    return lines


def agreement(first: tuple[float, ...], second: tuple[float, ...], threshold: float) -> str:
    """Whether two estimates with intervals are on the same side of a threshold."""
    signs = [(estimate > threshold) - (estimate < threshold) for estimate, _, _ in (first, second)]
    if signs[0] * signs[1] < 0:
        return "**disagree**"
    clear = all(low > threshold or high < threshold for _, low, high in (first, second))
    return "agree" if clear else "cannot tell"


def tally(studies: Iterable[str]) -> str:
    """For the page's first table: how many contrasts of some studies agree between two seeds; "1" without a second."""
    study = {row.label: str(row.file).split("-")[0] for row in TABLES["seeds"].rows}
    lines = [line for line in compared(TABLES["seeds"])[1:] if study[line[1]] in set(studies)]
    found = Counter(line[-1].strip("*") for line in lines)
    parts = [f"{found[name]} {name}" for name in ("agree", "disagree", "cannot tell") if found[name]]
    return f"2: {', '.join(parts)}" if parts else "1"


def rendered(table: Table) -> str:
    """A table in Markdown."""
    header, *rows = compared(table) if isinstance(table.rows[0], Contrast) else lines_of(table)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_tallies(line: str) -> str:
    """A line of the page; in a row of its first table, with the seeds of its studies."""
    cells = line.split(" | ")
    if len(cells) != 6 or not (studies := re.findall(r"`(\w+)`", cells[-1])):
        return line
    return " | ".join([*cells[:4], tally(studies), cells[5]])


def current(text: str) -> str:
    """The page with all tables and tallies written again."""
    first, *rest = text.split("\n## ", 1)
    text = "\n## ".join(["\n".join(map(with_tallies, first.split("\n"))), *rest])
    return MARKED.sub(lambda match: f"{match[1]}\n{rendered(TABLES[match[2]])}\n{match[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
