"""A ledger's results: tables with a legend on a terminal.

Limitation: a narrow terminal wraps cells. In a file or a pipe, nothing is wrapped.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from sinklens.utils.escaping import on_console, spelled

if TYPE_CHECKING:
    from pandas import DataFrame, Series  # type: ignore[import-untyped,unused-ignore]

WIDE = 400  # columns of a table written to a file or a pipe, where nothing should be cut
LEGEND = (
    "Brackets: 95 % score intervals (accuracy: Wilson; paired differences: Tango). p: McNemar's exact test, two-sided, "
    "Holm-corrected over the conditions of a model. 'vs random': accuracy with sinks masked minus accuracy with as "
    "many random keys masked, or minus that of the condition's own control (control_of), on the samples that both "
    "have; 'vs same mass': minus that with random keys masked that are no sinks and receive as much attention. "
    "published: a published score, and the accuracy minus that score with Newcombe's interval, as if the samples were "
    "independent. Shares of answers: malformed, i.e. not of the required form (right of formed: accuracy over the "
    "others); empty; with masks left; without an end token. sinks/head: per head and step, by Eq. 3 with epsilon = 3 "
    "in column sums. keys: those that a control picked of those it was to pick, per sample."
)
CACHES = (
    "speed: seconds per sample of the exact unmasked run over those of the condition, on the samples that both have. "
    "Compare runs of one machine, with one --batch-size. A step under a policy computes fewer queries, so do not "
    "compare its sinks/head with those of exact steps."
)
ESCAPING = (
    "A key masked at one step receives no attention there, so it does not count as a sink and is not masked at the "
    "next: --of-unmasked adds conditions that mask the sinks of the unmasked run, at every step."
)


SHARES = {
    "malformed": ("malformed", "{:.1%}"), "right of formed": ("right_of_formed", "{:.3f}"),
    "empty": ("empty", "{:.1%}"), "masks left": ("masks", "{:.1%}"), "no end": ("unended", "{:.1%}"),
    "sinks/head": ("sinks", "{:.2f}"), "samples/s": ("per_second", "{:.2f}"), "keys": ("keys_picked", "{:,.0f}"),
    "of": ("keys_requested", "{:,.0f}"),
}  # fmt: skip
"""Heading -> the column of the frame and its form."""


def show(table: "DataFrame", notes: Sequence[str]) -> None:
    """Print the tables of every protocol, the legend, and `notes`."""
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if terminal else WIDE)
    for (protocol, model), rows in table.groupby(["protocol", "model"], sort=False):
        for departs in rows["departs"][rows["departs"] != ""].unique():
            console.print(on_console(f"{model} departs from {protocol}: {departs}."), soft_wrap=not terminal)
        conditions = rows[["condition"]].map(spelled)
        scored, most = rows["total"] > 0, rows["total"].max()
        found = _written(rows["estimate"], "{:.3f}")
        found += _written(rows["total"], f" ({{}} of {most})").where(rows["total"] < most, "")
        found += _written(rows["low"], "\n[{:.3f}") + _written(rows["high"], ", {:.3f}]")
        accuracies = {
            "accuracy": found.where(scored, _written(rows["unscored"], "not scored ({})")),
            "vs unmasked": _compared(rows, "against_unmasked").where(rows["no_unmasked"] == "", rows["no_unmasked"]),
            "vs random": _compared(rows, "against_random").where(rows["no_random"] == "", rows["no_random"]),
            "vs same mass": _compared(rows, "against_same_mass"),
            "speed": _written(rows["speed"].where(rows["cache"] != ""), "{:.2f} x"),
            "published": _written(rows["published"], "{:.3f} ") + _limits(rows, "published", rows["source"]),
        }
        shares = {name: _written(rows[column], form) for name, (column, form) in SHARES.items()}
        for title, texts in (("accuracy", accuracies), ("answers", shares)):
            console.print(on_console(f"{protocol}, {model}: {title}"), soft_wrap=not terminal)
            console.print(_table(conditions.assign(**texts)))
    picks = set(table["pick"])
    lines = [LEGEND, *[CACHES] * bool((table["cache"] != "").any())]
    lines += [ESCAPING] * ("strongest" in picks and "steady" not in picks)
    for text in (*lines, *notes):
        console.print(on_console(text), soft_wrap=not terminal)


def _written(column: "Series", form: str) -> "Series":
    """The values of a column as text; "" for missing ones."""
    return column.map(form.format, na_action="ignore").astype(object).fillna("")


def _limits(rows: "DataFrame", kind: str, remark: "Series") -> "Series":
    """A difference with a remark, and its limits on a line of their own."""
    value, low, high = (rows[f"{kind}_{name}"] for name in ("difference", "low", "high"))
    return _written(value, "{:+.3f} ") + remark + _written(low, "\n[{:+.3f}") + _written(high, ", {:+.3f}]")


def _compared(rows: "DataFrame", kind: str) -> "Series":
    """A paired difference and its p value."""
    return _limits(rows, kind, _written(rows[f"{kind}_p"], "p {:.4f}").replace("p 0.0000", "p <0.0001"))


def _table(texts: "DataFrame") -> Table:
    """A table of the columns that have a text."""
    table = Table()
    texts = texts.loc[:, (texts != "").any()]
    for place, name in enumerate(texts):
        table.add_column(name, justify="right" if place else "left", no_wrap=place > 0 and name != "published")
    for row in texts.to_numpy():
        table.add_row(*(on_console(text, keep="\n") for text in row))
    return table
