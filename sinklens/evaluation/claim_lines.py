"""The claims of a ledger, one line each, in formats that papers and other programs read.

A *claim* is an accuracy, or a difference of two: from the unmasked run, from a control, or from a published score. Each
line says what it rests on: samples, interval, p value, seed, decoding regime, revision, versions and devices.

Two runs are compared only if nothing but the intervention differs. Otherwise the line has no numbers, and `refused`
names the difference: another seed, setting, revision or version. `read_lines` stops with an error if device types
differ.

Pitfall: p values are corrected over the comparisons of one group, not over all lines of a ledger.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from sinklens.errors import SettingError, nearest
from sinklens.evaluation.departures import baselines
from sinklens.evaluation.tables import Line
from sinklens.utils.estimates import Estimate, Paired

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

TableFormat = Literal["markdown", "latex", "csv", "json"]
FORMATS = get_args(TableFormat)
SHOWN = (
    "model", "condition", "against", "n", "value", "low", "high", "p", "seed", "regime", "keys", "device", "refused",
)  # fmt: skip
"""Columns of markdown and LaTeX, which pages must hold; csv and json have all."""
MADE = ("protocol", "seed", "regime", "dtype", "revision", "model")


def claims(lines: Sequence[Line]) -> "DataFrame":
    """The claims of `lines`: each accuracy, published scores of a baseline, and comparisons.

    Returns:
        One row a claim, with the columns "task", "protocol", "model", "condition", "cache", "seed", "regime", "dtype"
        and "revision" (of the run), "versions" (sinklens, torch, transformers), "device" (types and names) and
        "departs" (from the protocol), and

        - "against": what "value" is a difference from: "" for an accuracy, "unmasked", the name of a control, or
          "published: SOURCE";
        - "value", "low", "high": the accuracy or the difference, and its 95 % interval; "n": number of samples;
        - "p": McNemar's test, corrected by Holm's method within the group; empty for accuracies and published scores;
        - "lost", "gained": samples that only the other run, or only this one, got right;
        - "keys": keys that a control picked of those it was to pick, per sample; "" without one;
        - "refused": why there is no number; "" if there is one.
    """
    import pandas as pd

    found = pd.DataFrame([row for line in lines for row in _claims(line, lines)])
    return found.astype({"lost": "Int64", "gained": "Int64"}) if len(found) else found


def _claims(line: Line, lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    unscored = "" if line.accuracy.n else f"not scored ({line.unscored} programs)"
    yield _claim(line, "", line.accuracy, unscored)
    if line.condition == "unmasked" and not line.cache:
        for one in baselines(line.protocol, line.checkpoint, line.accuracy, line.departs):
            why = f"the run departs: {'; '.join(line.departs)}" if line.departs else "the source states no number"
            yield _claim(line, f"published: {one.published.source}", one.gap, why if one.gap is None else "")
    for against, pair, missing in (
        ("unmasked", line.against_unmasked, line.no_unmasked),
        (line.control or "control", line.against_random, line.no_random),
    ):
        if pair is not None or missing:
            why = _refused(line, against, lines) or missing
            yield _claim(line, against, None if why else pair, why)


def _refused(line: Line, against: str, lines: Sequence[Line]) -> str:
    """What differs in more than the intervention between a run and the one it is compared with; "" if nothing does."""
    here = (line.protocol, line.model)
    other = next((one for one in lines if one.condition == against and (one.protocol, one.model) == here), None)
    if other is not None:
        differing = sorted({*other.versions} ^ {*line.versions})
        return f"versions differ: {', '.join(differing)}" if differing else ""
    elsewhere = [one for one in lines if one.condition == against == "unmasked" and one.checkpoint == line.checkpoint]
    pairs = [(name, getattr(one, name), getattr(line, name)) for one in elsewhere[:1] for name in MADE]
    texts = [f"{name} {_word(before)}, here {_word(after)}" for name, before, after in pairs if before != after]
    return f"the unmasked run differs: {'; '.join(texts)}" if texts else ""


def _word(value: object) -> str:
    return "unset" if value == "" else str(value)


def _claim(line: Line, against: str, found: Estimate | Paired | None, refused: str) -> dict[str, Any]:
    one, lost, gained = found if isinstance(found, Paired) else (found, None, None)
    one = one or Estimate(math.nan, math.nan, math.nan, line.accuracy.n if against.startswith("published") else 0)
    n = line.accuracy.n if against.startswith("published") else one.n
    return {
        "task": line.task, "protocol": line.protocol, "model": line.model, "condition": line.condition,
        "against": against, "value": one.value, "low": one.low, "high": one.high,
        "p": math.nan if one.p is None else one.p, "n": n, "lost": lost, "gained": gained, "seed": line.seed,
        "regime": line.regime, "cache": line.cache, "dtype": line.dtype, "revision": line.revision,
        "versions": "; ".join(line.versions), "device": "; ".join((*line.devices, *line.machines)),
        "keys": "" if math.isnan(line.keys_picked) else f"{line.keys_picked:g} of {line.keys_requested:g}",
        "departs": "; ".join(line.departs), "refused": refused,
    }  # fmt: skip


def format_claims(found: "DataFrame", kind: str) -> str:
    """The claims as text.

    Args:
        kind: "markdown" and "latex" show the columns that fit a page; "csv" and "json" have all, unrounded, with
            nothing (csv) or null (json) for missing numbers.

    Raises:
        SettingError: an unknown format.
    """
    if kind not in FORMATS:
        raise SettingError(f"a table's format is one of {', '.join(FORMATS)}; got {kind!r}.{nearest(kind, FORMATS)}")
    if kind == "csv":
        return str(found.to_csv(index=False))
    if kind == "json":
        return f"{found.to_json(orient='records', indent=1, force_ascii=False, double_precision=15)}\n"
    cells = [[_rounded(name, row[name]) for name in SHOWN] for row in found.to_dict(orient="records")]
    if kind == "markdown":
        rows = [list(SHOWN), ["---"] * len(SHOWN), *cells]
        return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
    import pandas as pd

    latex = pd.DataFrame(cells, columns=SHOWN).to_latex(index=False, escape=True, column_format="l" * len(SHOWN))
    return str(latex).replace("<", "$<$")


def _rounded(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return ""
    return ("<0.0001" if value < 1e-4 else f"{value:.4f}") if name == "p" else f"{value:.3f}"
