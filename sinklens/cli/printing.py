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
    terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if terminal else WIDE)
    texts = [LEGEND] + [CACHES] * any(line.cache for line in lines)
    picks = {line.pick for line in lines}
    texts += [ESCAPING] * ("strongest" in picks and "steady" not in picks)
    for protocol in dict.fromkeys(line.protocol for line in lines):
        of_protocol = [line for line in lines if line.protocol == protocol]
        for text in baseline_texts(of_protocol):
            console.print(text, markup=False, soft_wrap=not terminal)
        console.print(_accuracies(protocol, of_protocol))
        for model in dict.fromkeys(line.model for line in of_protocol):
            for title, columns in _tables([line for line in of_protocol if line.model == model]).items():
                console.print(_table(f"{model}: {title}", columns))
    for text in texts:
        console.print(text, markup=False, soft_wrap=not terminal)
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


def _accuracies(protocol: str, lines: Sequence["Line"]) -> Table:
    """The layout of the paper's Table 1: a row per condition, a column per model."""
    table = Table(title=f"{escape(protocol)}: accuracy", title_justify="left")
    by_place = {(line.model, line.condition): line for line in lines}
    conditions = dict.fromkeys(line.condition for line in lines)
    columns = {_heading(lines): [_masked(name) for name in conditions]}
    for model in dict.fromkeys(line.model for line in lines):
        found = [by_place.get((model, name)) for name in conditions]
        most = max(line.accuracy.n for line in found if line is not None)
        columns[model] = ["" if line is None else _share(line, most) for line in found]
        published = ["" if line is None or line.paper is None else f"{line.paper:.2f}" for line in found]
        if any(published):
            columns[f"{model} in the paper"] = published
    for name in columns:
        title = "in the paper" if name.endswith(" in the paper") else escape(name)
        table.add_column(title, justify="left" if name == _heading(lines) else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _share(line: "Line", most: int) -> str:
    if not line.accuracy.n:
        return f"not scored ({line.unscored})"
    unfinished = f" ({line.accuracy.n} of {most})" if line.accuracy.n < most else ""
    return f"{line.accuracy.value:.3f} [{line.accuracy.low:.3f}, {line.accuracy.high:.3f}]{unfinished}"


def _tables(lines: Sequence["Line"]) -> dict[str, dict[str, list[str]]]:
    """The tables of one model, by title: paired differences, irregular answers with sinks and throughput, and form."""
    conditions = {_heading(lines): [_masked(line.condition) for line in lines]}
    found = {}
    if any(line.accuracy.n for line in lines):
        found["compared on the same samples"] = conditions | {
            "samples": [str(line.accuracy.n) for line in lines],
            "vs unmasked": [_difference(line.against_unmasked) or line.no_unmasked for line in lines],
            "vs random": [_difference(line.against_random) or line.no_random for line in lines],
        }
        if any(line.cache for line in lines):
            speeds = [f"{line.speed:.2f} x" if line.against_unmasked else "" for line in lines]
            found["compared on the same samples"]["speed"] = speeds
    found["its answers"] = conditions | {
        "empty": [f"{line.empty:.1%}" for line in lines],
        "masks left": [f"{line.masks:.1%}" for line in lines],
        "no end": [f"{line.unended:.1%}" for line in lines],
        "sinks/head": [f"{line.sinks:.2f}" for line in lines],
        "samples/s": [f"{line.per_second:.2f}" for line in lines],
        "guess": [f"{line.chance:.2f}" for line in lines],
    }
    if any(not math.isnan(line.keys_picked) for line in lines):
        found["its answers"]["keys"] = [
            "" if math.isnan(line.keys_picked) else f"{line.keys_picked:,.0f} of {line.keys_requested:,.0f}"
            for line in lines
        ]
    if any(line.formed is not None for line in lines):
        found["form of its answers"] = conditions | {
            "malformed": ["–" if line.formed is None else f"{line.malformed:.1%}" for line in lines],
            "right of formed": ["–" if line.formed is None else f"{line.formed.value:.3f}" for line in lines],
        }
    return found


def _table(title: str, columns: dict[str, list[str]]) -> Table:
    """A column for the condition, which a narrow terminal wraps, and columns of numbers, which never wrap."""
    table = Table(title=escape(title), title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _heading(lines: Sequence["Line"]) -> str:
    return "condition" if any(line.cache for line in lines) else "masked"


def _masked(condition: str) -> str:
    return "nothing" if condition == "unmasked" else escape(condition)


def _difference(pair: Any) -> str:
    if pair is None:
        return ""
    found = pair.difference
    p = "<0.0001" if found.p < 1e-4 else f"{found.p:.4f}"
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]\np {p}"
