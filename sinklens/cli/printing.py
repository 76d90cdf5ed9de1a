"""Prints a ledger's results on a terminal: the paper's table, paired comparisons, answer statistics, and a legend.

Limitation: a narrow terminal wraps the names of conditions and, with several models, their accuracies. In a file or a
pipe, nothing is wrapped.
"""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from sinklens.evaluation.departures import Baseline
    from sinklens.evaluation.tables import Line

WIDE = 400  # columns of a table written to a file or a pipe, where nothing should be cut
LEGEND = (
    "Brackets: 95 % score intervals (accuracy: Wilson; paired differences: Tango). p: McNemar's exact test, two-sided, "
    "Holm-corrected over the conditions of a model. 'vs random': accuracy with sinks masked minus accuracy with as "
    "many random keys masked, or minus that of the condition's own control (control_of), on the samples that both "
    "have. Shares of answers: malformed, "
    "i.e. not of the required form (right of formed: accuracy over the others); empty; with masks left; without an end "
    "token. sinks/head: per head and step, by Eq. 3 with epsilon = 3 in column sums. guess: accuracy of guessing. "
    "keys: those that a control picked of those it was to pick, per sample, summed over heads and steps. Published "
    "scores: Wilson's intervals; differences from them: Newcombe's, as if the samples were independent."
)
IRREGULAR = ("empty", "masks left", "no end")
CACHES = (
    "speed: seconds per sample of the exact unmasked run over those of the condition, on the samples that both have. "
    "Compare runs of one machine, with one --batch. A step under a policy computes fewer queries, so do not compare "
    "its sinks/head with those of exact steps."
)
ESCAPING = (
    "A key masked at one step receives no attention there, so it does not count as a sink and is not masked at the "
    "next: --of-unmasked adds conditions that mask the sinks of the unmasked run, at every step."
)


def show(lines: Sequence["Line"], notes: Sequence[str]) -> None:
    """Print every table of `lines`, the legend, and `notes`."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for protocol in dict.fromkeys(line.protocol for line in lines):
        of_protocol = [line for line in lines if line.protocol == protocol]
        for text in baseline_texts(of_protocol):
            console.print(text, markup=False, soft_wrap=not sys.stdout.isatty())
        console.print(_first_table(protocol, of_protocol))
        for model in dict.fromkeys(line.model for line in of_protocol):
            of_model = [line for line in of_protocol if line.model == model]
            if any(line.accuracy.n for line in of_model):
                console.print(_second_table(model, of_model))
            console.print(_third_table(model, of_model))
            if any(line.formed is not None for line in of_model):
                console.print(_form_table(model, of_model))
    console.print(LEGEND, markup=False, soft_wrap=not sys.stdout.isatty())
    if any(line.cache for line in lines):
        console.print(CACHES, markup=False, soft_wrap=not sys.stdout.isatty())
    if {line.pick for line in lines} >= {"strongest"} and "steady" not in {line.pick for line in lines}:
        console.print(ESCAPING, markup=False, soft_wrap=not sys.stdout.isatty())
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def baseline_texts(lines: Sequence["Line"]) -> list[str]:
    """How each unmasked accuracy compares with the published scores, and how runs depart from their protocol."""
    from sinklens.evaluation.departures import baselines

    found = []
    for line in (one for one in lines if one.condition == "unmasked" and not one.cache):
        if line.departs:
            found.append(f"{line.model} departs from {line.protocol}: {'; '.join(line.departs)}.")
        beside = baselines(line.protocol, line.checkpoint, line.accuracy, line.departs)
        found += [_baseline_text(line, one) for one in beside]
    return found


def _baseline_text(line: "Line", one: "Baseline") -> str:
    stated = "no number" if one.published.score is None else f"{one.published.score:.3f}"
    if one.published.accuracy is not None:
        stated = str(one.published.accuracy)
    text = f"{line.model}, unmasked: {line.accuracy}. Published ({one.published.source}): {stated}. "
    if one.gap is None:
        return text + ("Not compared, since the run departs." if line.departs else "Nothing to compare with.")
    gap = f"{one.gap.value:+.3f} [{one.gap.low:+.3f}, {one.gap.high:+.3f}]"
    words = {"agrees": "agrees with it", "below": "is below it", "above": "is above it"}
    part = "".join(f" ({one})" for one in one.departs)
    return f"{text}The run {words[one.verdict]}: {gap}{part}."


def _first_table(protocol: str, lines: Sequence["Line"]) -> Table:
    """The layout of the paper's Table 1: a row per condition, a column per model."""
    models = list(dict.fromkeys(line.model for line in lines))
    in_paper = {line.model for line in lines if line.paper is not None}
    table = Table(title=f"{escape(protocol)}: accuracy", title_justify="left")
    table.add_column(_heading(lines))
    for model in models:
        table.add_column(escape(model), justify="right")
        if model in in_paper:
            table.add_column("in the paper", justify="right")
    for condition in dict.fromkeys(line.condition for line in lines):
        cells = []
        for model in models:
            line = next((one for one in lines if (one.model, one.condition) == (model, condition)), None)
            most = max(one.accuracy.n for one in lines if one.model == model)
            cells.append("" if line is None else _share(line, most))
            if model in in_paper:
                cells.append("" if line is None or line.paper is None else f"{line.paper:.2f}")
        table.add_row("nothing" if condition == "unmasked" else escape(condition), *cells)
    return table


def _share(line: "Line", most: int) -> str:
    if not line.accuracy.n:
        return f"not scored ({line.unscored})"
    unfinished = f" ({line.accuracy.n} of {most})" if line.accuracy.n < most else ""
    return f"{line.accuracy.value:.3f} [{line.accuracy.low:.3f}, {line.accuracy.high:.3f}]{unfinished}"


def _second_table(model: str, lines: Sequence["Line"]) -> Table:
    """Accuracy differences between conditions, paired by sample."""
    timed = any(line.cache for line in lines)
    columns = ("samples", "vs unmasked", "vs random", *["speed"] * timed)
    table = _table(f"{model}: compared on the same samples", columns, _heading(lines))
    for line in lines:
        differences = (
            _difference(line.against_unmasked) or line.no_unmasked,
            _difference(line.against_random) or line.no_random,
        )
        speed = [f"{line.speed:.2f} x" if line.against_unmasked else ""] * timed
        table.add_row(_masked(line), str(line.accuracy.n), *differences, *speed)
    return table


def _third_table(model: str, lines: Sequence["Line"]) -> Table:
    """Irregular answers, sinks, throughput and, if there are controls, the keys that they picked."""
    counted = ("keys",) * any(not math.isnan(line.keys_picked) for line in lines)
    columns = (*IRREGULAR, "sinks/head", "samples/s", "guess", *counted)
    table = _table(f"{model}: its answers", columns, _heading(lines))
    for line in lines:
        shares = (f"{share:.1%}" for share in (line.empty, line.masks, line.unended))
        numbers = (f"{number:.2f}" for number in (line.sinks, line.per_second, line.chance))
        table.add_row(_masked(line), *shares, *numbers, *(_keys(line) for _ in counted))
    return table


def _keys(line: "Line") -> str:
    """Keys that a control picked, of those that it was to pick."""
    if math.isnan(line.keys_picked):
        return ""
    return f"{line.keys_picked:,.0f} of {line.keys_requested:,.0f}"


def _form_table(model: str, lines: Sequence["Line"]) -> Table:
    """Answers that are not of the required form, and accuracy over the others; "–" for records without this."""
    table = _table(f"{model}: form of its answers", ("malformed", "right of formed"), _heading(lines))
    for line in lines:
        formed = ("–", "–") if line.formed is None else (f"{line.malformed:.1%}", f"{line.formed.value:.3f}")
        table.add_row(_masked(line), *formed)
    return table


def _heading(lines: Sequence["Line"]) -> str:
    return "condition" if any(line.cache for line in lines) else "masked"


def _table(title: str, numbers: Sequence[str], heading: str) -> Table:
    """A column for the condition, which a narrow terminal wraps, and columns of numbers, which never wrap."""
    table = Table(title=escape(title), title_justify="left")
    table.add_column(heading)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _masked(line: "Line") -> str:
    return "nothing" if line.condition == "unmasked" else escape(line.condition)


def _difference(pair: Any) -> str:
    if pair is None:
        return ""
    found = pair.difference
    p = "<0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]\np {p}"
