"""Prints the tables of a study: one per table and model, with the interval in one column and meanings below.

The tables are read from the files of the study, so `sinklens analyse` and a later `sinklens table` print the same.

Limitation: long tables, such as maps of layers and heads, are cut after `ROWS` rows, in file order, not by size. The
name of the complete file is printed.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklens.errors import CheckpointError, SinklensError
from sinklens.utils.arguments import read_as
from sinklens.utils.documents import read_json
from sinklens.utils.escaping import on_console, read_csv

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

ROWS = 24
ALONE = "Estimates of a single prompt have no interval; give more prompts (--limit or --prompts) for intervals."
WIDE = 400  # columns when writing to a file or a pipe, where nothing should wrap
INTERVAL = ("estimate", "low", "high")
NUMBERS = (*INTERVAL, "p", "p_holm", "shown", "removed", "matched_share")  # columns that may have empty cells
LEGEND = (
    "Brackets: 95 % intervals, t intervals over groups of prompts where there are several (groups), else over prompts: "
    "score intervals for outcomes (right, changed, cost) and their differences, or bootstrap. p: two-sided, that the "
    "mean is 0 or the threshold (over groups, t; outcomes: McNemar's exact or the score test; others: random signs); "
    "p_holm: corrected over all claims on a model. shown: the smallest effect that so many "
    "prompts show with a probability of 80 % after that correction; equivalent: a difference smaller than 0.05 of them."
)


def manifests(out: Path) -> list[dict[str, Any]]:
    """The manifest of every finished study in a folder, by name."""
    found = []
    for file in sorted(out.glob("*.json")):
        try:
            content = read_json(file)
        except CheckpointError:
            continue  # not a manifest of sinklens
        if {"study", "models", "options"} <= content.keys():
            if content["study"] != file.stem:  # its tables are named after it
                raise SinklensError(f"{file} is a manifest of {content['study']!r:.80}; restore the file's name.")
            for name in read_as(list, f"tables in {file}", content.get("tables", [])):
                read_as(str, f"a table's name in {file}", name)
            found.append(content)
    return found


def show(out: Path, manifest: Mapping[str, Any]) -> None:
    """Print the tables of the study that `manifest` describes, from their files in `out`."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    meanings: dict[tuple[str, str], None] = {}
    alone = False
    before = f"{manifest['study']}-"
    found = sorted(file.stem.removeprefix(before) for file in out.glob(f"{before}*.csv"))
    for name in [name for name in manifest.get("tables", found) if name in found]:
        file = out / f"{manifest['study']}-{name}.csv"
        frame = read_csv(file, INTERVAL, NUMBERS)
        meanings |= _meanings(frame)
        alone |= "prompts" in frame and bool((frame["prompts"] == 1).any())
        for model in dict.fromkeys(frame["model"]) if "model" in frame else ():
            _show_one(console, f"{name}: {model}", frame[frame["model"] == model].drop(columns="model"), file)
    for measure, meaning in meanings:
        console.print(on_console(f"{measure}: {meaning}"), soft_wrap=not sys.stdout.isatty())
    console.print(LEGEND, markup=False)
    if alone:
        console.print(ALONE, markup=False)


def _meanings(frame: "DataFrame") -> dict[tuple[str, str], None]:
    """What each measure means; one that depends on its group has several meanings."""
    if not {"measure", "meaning"} <= set(frame.columns):
        return {}
    pairs = zip(frame["measure"], frame["meaning"], strict=True)
    return {(str(measure), str(meaning)): None for measure, meaning in pairs if meaning}


def _show_one(console: Console, title: str, frame: "DataFrame", file: Path) -> None:
    """Print one table of one model: labels, the estimate with its interval, and further columns of the study."""
    labels = [name for name in frame.columns if name not in (*INTERVAL, "prompts", "meaning")]
    counts = sorted(set(frame["prompts"])) if "prompts" in frame else []
    title += f" ({counts[0]} prompt{'s' * (counts[0] != 1)})" if len(counts) == 1 else ""
    table = Table(title=on_console(title), title_justify="left")
    before = [name for name in labels if list(frame.columns).index(name) < list(frame.columns).index("estimate")]
    after = [name for name in labels if name not in before] + ["prompts"] * (len(counts) > 1)
    for name in before:
        table.add_column(on_console(name), overflow="fold")
    table.add_column("estimate", justify="right", no_wrap=True)
    for name in after:
        table.add_column(on_console(name), overflow="fold")
    for _, row in frame.head(ROWS).iterrows():
        table.add_row(*_cells(row, before), _interval(row), *_cells(row, after))
    console.print(table)
    if len(frame) > ROWS:
        console.print(on_console(f"  … {len(frame) - ROWS} more rows in {file}"), soft_wrap=True)


def _cells(row: Any, names: Sequence[str]) -> list[Text]:
    return [on_console(_number(row[name])) for name in names]


def _interval(row: Any) -> str:
    estimate, low, high = (float(row[name]) for name in INTERVAL)
    if math.isnan(estimate):
        return "–"
    return _number(estimate) + (f" [{_number(low)}, {_number(high)}]" if not math.isnan(low) else "")


def _number(value: Any) -> str:
    """A short form of a value: integers unchanged, others with three decimals, very small ones in powers of ten."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
    if math.isnan(number):
        return str(value) if isinstance(value, str) else ""
    if isinstance(value, str) or number.is_integer():
        return str(value).removesuffix(".0")
    return f"{number:.0e}" if abs(number) < 0.0005 else f"{number:.3f}" if abs(number) < 1e4 else f"{number:.3g}"
