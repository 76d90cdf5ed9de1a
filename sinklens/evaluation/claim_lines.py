"""The claims of a ledger, one line each, in formats that papers and other programs read.

A *claim* is an accuracy, or a difference of two: from the unmasked run, from a control, or from a published score. Each
line says what it rests on: samples, interval, p value, seed, decoding regime, revision, versions and devices.

Two runs are compared only if nothing but the intervention differs. Otherwise the line has no numbers, and `refused`
names the difference: another seed, setting, revision or version. `read_lines` stops with an error if device types
differ.

Pitfall: p values are corrected over the comparisons of one group, not over all lines of a ledger.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from sinklens.errors import SettingError, nearest
from sinklens.evaluation.departures import Baseline, baselines
from sinklens.evaluation.lines import Line
from sinklens.evaluation.statistics import Paired

TableFormat = Literal["markdown", "latex", "csv", "json"]
FORMATS = get_args(TableFormat)
SHOWN = (
    "model",
    "condition",
    "against",
    "n",
    "value",
    "low",
    "high",
    "p",
    "seed",
    "regime",
    "keys",
    "device",
    "refused",
)
"""Columns of markdown and LaTeX, which pages must hold; csv and json have all."""
ESCAPED = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
           "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """An accuracy or a difference of two, with what it rests on.

    Attributes:
        task, protocol, model, condition: as in `Line`.
        against: what `value` is a difference from: "" for an accuracy, "unmasked", the name of a control, or
            "published: SOURCE".
        value: the accuracy, or the difference.
        low, high: 95 % interval.
        p: McNemar's test, corrected by Holm's method within the group; NaN for accuracies and published scores.
        n: number of samples.
        lost, gained: samples that only the other run, or only this one, got right; None where nothing is paired.
        seed, regime, cache, dtype, revision: how the run was made.
        versions, device: of sinklens, torch and transformers; device types and names.
        keys: keys that a control picked of those it was to pick, per sample; "" without one.
        departs: how the run differs from its protocol.
        refused: why there is no number; "" if there is one.
    """

    task: str
    protocol: str
    model: str
    condition: str
    against: str
    value: float
    low: float
    high: float
    p: float
    n: int
    lost: int | None
    gained: int | None
    seed: int
    regime: str
    cache: str
    dtype: str
    revision: str
    versions: str
    device: str
    keys: str
    departs: str
    refused: str


def claims(lines: Sequence[Line]) -> list[Claim]:
    """The claims of `lines`: published scores of a baseline first, then each condition and its comparisons."""
    found = []
    for line in lines:
        found.append(_accuracy(line))
        if line.condition == "unmasked" and not line.cache:
            beside = baselines(line.protocol, line.checkpoint, line.accuracy, line.departs)
            found += [_beside(line, one) for one in beside]
        for against, pair, missing in (
            ("unmasked", line.against_unmasked, line.no_unmasked),
            (line.control or "control", line.against_random, line.no_random),
        ):
            if pair is not None or missing:
                found.append(_compared(line, against, pair, missing, lines))
    return found


def _accuracy(line: Line) -> Claim:
    low, high = line.accuracy.interval
    missing = "" if line.accuracy.total else f"not scored ({line.unscored} programs)"
    return _claim(line, "", line.accuracy.share, low, high, math.nan, line.accuracy.total, refused=missing)


def _beside(line: Line, one: Baseline) -> Claim:
    against = f"published: {one.published.source}"
    if one.gap is None:
        why = f"the run departs: {'; '.join(one.departs)}" if line.departs else "the source states no number"
        return _claim(line, against, math.nan, math.nan, math.nan, math.nan, line.accuracy.total, refused=why)
    return _claim(line, against, *one.gap, math.nan, line.accuracy.total)


def _compared(line: Line, against: str, pair: Paired | None, missing: str, lines: Sequence[Line]) -> Claim:
    other = next((one for one in lines if one.condition == against and _together(one, line)), None)
    if pair is not None and other is not None and (differing := sorted({*other.versions} ^ {*line.versions})):
        missing, pair = f"versions differ: {', '.join(differing)}", None
    if pair is None:
        why = missing
        if other is None and against == "unmasked":
            why = _elsewhere(line, lines) or missing
        return _claim(line, against, math.nan, math.nan, math.nan, math.nan, 0, refused=why)
    return _claim(line, against, pair.difference, pair.low, pair.high, pair.p, pair.total, pair.lost, pair.gained)


def _together(one: Line, other: Line) -> bool:
    """Whether two lines are of one group."""
    return (one.protocol, one.model) == (other.protocol, other.model)


def _elsewhere(line: Line, lines: Sequence[Line]) -> str:
    """How an unmasked run of the checkpoint in another group was made differently; "" without such a run."""
    others = [one for one in lines if one.condition == "unmasked" and one.checkpoint == line.checkpoint]
    if not others:
        return ""
    made = ("protocol", "seed", "regime", "dtype", "revision", "model")
    differing = [
        f"{name} {_word(getattr(other, name))}, here {_word(getattr(line, name))}"
        for other in others[:1]
        for name in made
        if getattr(other, name) != getattr(line, name)
    ]
    return f"the unmasked run differs: {'; '.join(differing)}"


def _word(value: Any) -> str:
    return "unset" if value == "" else str(value)


def _claim(
    line: Line, against: str, value: float, low: float, high: float, p: float, n: int,
    lost: int | None = None, gained: int | None = None, refused: str = "",
) -> Claim:  # fmt: skip
    keys = "" if math.isnan(line.keys_picked) else f"{line.keys_picked:g} of {line.keys_requested:g}"
    return Claim(
        line.task, line.protocol, line.model, line.condition, against, value, low, high, p, n, lost, gained, line.seed,
        line.regime, line.cache, line.dtype, line.revision, "; ".join(line.versions),
        "; ".join((*line.devices, *line.machines)), keys, "; ".join(line.departs), refused,
    )  # fmt: skip


def format_claims(found: Sequence[Claim], kind: str) -> str:
    """The claims as text.

    Args:
        kind: "markdown" and "latex" show the columns that fit a page; "csv" and "json" have all, unrounded, with
            nothing (csv) or null (json) for missing numbers.

    Raises:
        SettingError: an unknown format.
    """
    writers = {"markdown": _markdown, "latex": _latex, "csv": _csv, "json": _json}
    if kind not in writers:
        raise SettingError(f"a table's format is one of {', '.join(FORMATS)}; got {kind!r}.{nearest(kind, FORMATS)}")
    return writers[kind](found)


def _plain(claim: Claim) -> dict[str, Any]:
    """Columns of a claim; None for NaN."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value for name, value in asdict(claim).items()
    }


def _json(found: Sequence[Claim]) -> str:
    return json.dumps([_plain(claim) for claim in found], indent=1, ensure_ascii=False) + "\n"


def _csv(found: Sequence[Claim]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [one.name for one in fields(Claim)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_plain(claim) for claim in found)
    return text.getvalue()


def _rounded(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "p":
        return "<0.0001" if value < 1e-4 else f"{value:.4f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _cells(found: Sequence[Claim]) -> list[list[str]]:
    plain = [_plain(claim) for claim in found]
    return [[_rounded(name, row[name]) for name in SHOWN] for row in plain]


def _markdown(found: Sequence[Claim]) -> str:
    rows = [list(SHOWN), ["---"] * len(SHOWN), *_cells(found)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _latex(found: Sequence[Claim]) -> str:
    def escaped(cell: str) -> str:
        return "".join(ESCAPED.get(letter, letter) for letter in cell).replace("<", "$<$")

    lines = [" & ".join(map(escaped, row)) + r" \\" for row in ([*SHOWN], *_cells(found))]
    head, *body = lines
    frame = rf"\begin{{tabular}}{{{'l' * len(SHOWN)}}}"
    return "\n".join([frame, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"
