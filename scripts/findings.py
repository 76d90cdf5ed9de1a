"""Write the tables of docs/findings.md from the stored results in docs/results.

    python scripts/findings.py

A table is what stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; findings_tables.py says which
numbers it holds. tests/test_findings.py fails if a table is not current, or if a number in the text of a section is in
none of its tables. Results of further training runs, with other seeds, are in docs/results/seed-2 and seed-3, as models
"NAME-seed-2" and "NAME-seed-3": they add columns beside those of the first, and `Contrast` compares them.
`judged` combines them by the rule of analyses/estimates/seeds.py.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pandas
from findings_tables import TABLES, Contrast, Row, Table

from sinklens.analyses.estimates.scales import Scale
from sinklens.analyses.estimates.seeds import over_seeds
from sinklens.analyses.estimates.tables import verdict
from sinklens.utils.estimates import Estimate, holm

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "findings.md"
RESULTS = ROOT / "docs" / "results"
FEWEST = 10  # prompts of a run with something to compare; with fewer, the run is left out of the table of seeds
SEEDS = {"": "first seed", "-seed-2": "seed 2", "-seed-3": "seed 3"}  # end of a model's name -> its column
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@cache
def stored(file: str) -> pandas.DataFrame:
    """A stored table, with its rows of further training runs."""
    paths = [RESULTS / seed.strip("-") / f"{file}.csv" for seed in SEEDS]
    parts = [pandas.read_csv(path, keep_default_na=False, na_values=[""]) for path in paths if path.is_file()]
    return pandas.concat(parts)


def matching(table: pandas.DataFrame, row: Row, model: str) -> pandas.DataFrame:
    """The rows of a stored table that belong to a row of the page and a model."""
    for column, value in {"model": model, **row.where}.items():
        table = table[table[column] == value]
    return table


def only(table: pandas.DataFrame, row: Row) -> pandas.Series | None:
    """The only row of `table`; None if it is empty."""
    if len(table) > 1:
        raise ValueError(f"{row.label}: {len(table)} stored rows match {row.where}")
    return None if table.empty else table.iloc[0]


def found(
    row: Row, file: str, model: str, comparable: float = Table.comparable
) -> tuple[float, float, float, int] | None:
    """Estimate, interval and number of prompts of one model; None where nothing, or too little, was measured."""
    one = only(matching(stored(row.file or file), row, model), row)
    if one is None:
        return None
    names = ("estimate", "low", "high") if "estimate" in one else ("share", "share_low", "share_high")
    estimate, low, high = (float(one[name]) for name in names)
    too_few = float(one.get("matched_share", 1.0)) < comparable
    return None if math.isnan(estimate) or too_few else (estimate, low, high, int(one.get("prompts", 0)))


def cell(row: Row, table: Table, model: str, counted: bool = False) -> str:
    """Estimate and interval of one model, and the number of prompts if `counted`; empty where nothing was measured."""
    values = found(row, table.file, model, table.comparable)
    if values is None:
        return ""
    estimate, low, high = (number(value * row.scale, row.digits) for value in values[:3])
    return f"{estimate} [{low}, {high}]" + (f", n = {values[3]}" if counted else "")


def number(value: float, digits: int) -> str:
    """A rounded number, with a minus sign and without a negative zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def files(table: Table) -> set[str]:
    """The stored tables that a table is written from; for the table of seeds, those of further runs."""
    found = {row.file or table.file for row in table.rows}
    again = {name for name in found if stored(name)["model"].str.contains("-seed-").any()}
    return again if isinstance(table.rows[0], Contrast) else found


def columns(table: Table) -> list[str]:
    """The training runs of a table's models that were measured, in its order."""
    measured = {model for file in files(table) for model in stored(file)["model"]}
    return [model + seed for model in table.models for seed in SEEDS if model + seed in measured]


def lines_of(table: Table) -> list[list[str]]:
    """Header and rows, without rows that no model has."""
    models = columns(table)
    rows = [[row.label, *(cell(row, table, model, table.counted) for model in models)] for row in table.rows]
    header = [model.replace("-seed-", ", seed ") for model in models]
    return [["", *header], *(line for line in rows if any(line[1:]))]


def compared(table: Table) -> list[list[str]]:
    """Header and rows of the table of seeds: one row for every contrast and model that has several training runs."""
    lines = []
    for model in table.models:
        found_rows = []
        for row in table.rows:
            values = [found(row, table.file, model + seed) for seed in SEEDS]
            values = [value if value and value[3] >= FEWEST else None for value in values]
            known = [value[:3] for value in values if value]
            if values[0] and len(known) > 1 and isinstance(row, Contrast):
                runs = zip(SEEDS, values, strict=True)
                cells = [cell(row, table, model + seed, counted=True) if value else "" for seed, value in runs]
                found_rows.append((row, cells, combined(known, row.on, row.threshold)))
        p_values = [mean.p for _, _, mean in found_rows]
        corrected = iter(holm([p for p in p_values if not math.isnan(p)]))
        for (row, cells, mean), alone in zip(found_rows, p_values, strict=True):
            p = 0.0 if math.isnan(alone) else next(corrected)  # a share is above 0 by definition
            text = "" if math.isnan(alone) else f"{p:.2g}"
            if row.listed:
                lines.append([model, row.label, *cells, shown(row, mean), text, judged(mean, row.threshold, p)])
    used = [0, 1, *(at for at in range(2, 2 + len(SEEDS)) if any(line[at] for line in lines)), -3, -2, -1]
    header = ["model", "measure", *SEEDS.values(), "mean of the seeds", "p (Holm)", "verdict"]
    return [[line[at] for at in used] for line in (header, *lines)]


def combined(estimates: Sequence[tuple[float, ...]], scale: Scale, threshold: float = 0.0) -> Estimate:
    """The estimate over seeds (`seeds.over_seeds`) from the estimate and interval of each.

    The seeds answered the same prompts. How much of their errors is shared is not stored; all of it is assumed to be.
    """
    z = 1.959964
    limits = [scale.to((low, high)) for _, low, high in estimates]
    errors = [(high - low) / (2 * z) for low, high in limits if math.isfinite(high - low)]
    shared = sum(error**2 for error in errors) / len(errors) if errors else 0.0
    return over_seeds([estimate for estimate, _, _ in estimates], shared, scale, threshold=threshold)


def shown(row: Row, mean: Estimate) -> str:
    """The estimate over seeds and its interval."""
    estimate, low, high = (number(value * row.scale, row.digits) for value in (mean.value, mean.low, mean.high))
    return f"{estimate} [{low}, {high}]"


def judged(mean: Estimate, threshold: float, p: float) -> str:
    """The verdict of a claim, from its p value corrected over the model's rows."""
    return verdict(mean.value, mean.low, mean.high, threshold, "above", "below", p)


def rendered(table: Table) -> str:
    """A table in Markdown."""
    header, *rows = compared(table) if isinstance(table.rows[0], Contrast) else lines_of(table)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def current(text: str) -> str:
    """The page with all tables written again."""
    return MARKED.sub(lambda match: f"{match[1]}\n{rendered(TABLES[match[2]])}\n{match[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
