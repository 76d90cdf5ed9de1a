"""Write the tables of docs/findings.md from the stored results in docs/results.

    python scripts/findings.py

A table is what stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; `TABLES` says which numbers it
holds. tests/test_findings.py fails if a table is not current, or if a number in the text of a section is in none of its
tables.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "findings.md"
RESULTS = ROOT / "docs" / "results"
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
class Table:
    """One table of the page.

    Attributes:
        file: name of the stored table, without ``.csv``.
        rows: its rows.
        models: its columns.
    """

    file: str
    rows: tuple[Row, ...]
    models: tuple[str, ...] = MODELS


def percent(label: str, digits: int = 1, **where: Any) -> Row:
    """A row in percent."""
    return Row(label, where, 100.0, digits)


def plain(label: str, digits: int = 2, **where: Any) -> Row:
    """A row in the stored unit."""
    return Row(label, where, 1.0, digits)


TABLES: dict[str, Table] = {}


@cache
def stored(file: str) -> pandas.DataFrame:
    """A stored table."""
    return pandas.read_csv(RESULTS / f"{file}.csv")


def cell(row: Row, file: str, model: str) -> str:
    """Estimate and interval of one model; empty where nothing was measured."""
    table = stored(row.file or file)
    for column, value in {"model": model, **row.where}.items():
        table = table[table[column] == value]
    if len(table) > 1:
        raise ValueError(f"{row.label}, {model}: {len(table)} rows of {row.file or file} match {row.where}")
    if table.empty or table["estimate"].isna().all():
        return ""
    found = table.iloc[0]
    estimate, low, high = (number(found[name] * row.scale, row.digits) for name in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]"


def number(value: float, digits: int) -> str:
    """A rounded number, with a minus sign and without a negative zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def rendered(table: Table) -> str:
    """A table in Markdown."""
    lines = [["", *table.models], ["---"] * (len(table.models) + 1)]
    lines += [[row.label, *(cell(row, table.file, model) for model in table.models)] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def current(text: str) -> str:
    """The page with all tables written again."""
    return MARKED.sub(lambda match: f"{match[1]}\n{rendered(TABLES[match[2]])}\n{match[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
