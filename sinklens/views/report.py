"""A run as one HTML file: the canvas filling in step by step, and where its sinks are.

The page opens offline: it contains its numbers as deflated typed arrays, and CircuitsVis's script. Everything it shows
is computed in Python (report_data.py): the strongest key of every step and head, the sinks, the layer × head map. The
page only draws it.

A page has a size budget. Attention patterns are stored in eight bits; for the chosen steps, the page includes as many
layers as are sure to fit, beginning with that of the most moving head. If even that one does not fit, neighboring
positions are merged into blocks that show their largest value. Scores of a long run of a large model are cut as well,
first by layers, then by steps. The page says what was left out.

Caveat: scores on the page are rounded, by at most about √(score · peak) / 65535 (/ 255 in large runs), with the head's
largest score as peak. Sinks and strongest keys are determined before rounding, so of two positions that look equal one
may be a sink.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinklens.errors import require
from sinklens.runs import Trace
from sinklens.runs.result import Generation
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import checked
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import spelled
from sinklens.views.attention import CELLS
from sinklens.views.html import HEADS, REPORT, circuitsvis_chunk, json_block
from sinklens.views.patterns import generation_of, patterns_at, recorded
from sinklens.views.report_budget import PageScores, Patterns, fit_patterns, fit_scores, wanted_of
from sinklens.views.report_data import Material, Numbers

SPARE = 40_000  # bytes reserved for what is written last


@checked
def report(
    run: "Generation | Trace",
    out: str | Path,
    *,
    row: int = 0,
    budget_mb: float | int = 15.0,
) -> Path:
    """Write a run as one HTML file that opens offline, and return its path.

    It holds the attention patterns that the run recorded; otherwise those of up to four steps over the run and of as
    many layers as fit.

    Args:
        run: a finished run with sink scores, or a trace after its block.
        out: the file; its folder is created.
        row: row of the batch.
        budget_mb: largest size of the file, in 10⁶ bytes.

    Raises:
        TrackError: no sink scores, or no such row.
        SettingError: the budget is too small for what the page has to hold.
        SinklensError: the file cannot be written.
    """
    write_file(out, build(material(run, row), budget_mb))
    return Path(out)


def material(t: "Generation | Trace", row: int = 0) -> Material:
    """The data for the page of row `row` of a run.

    Raises:
        TrackError: no sink scores, or no such row.
    """
    run = generation_of(t)
    track = recorded(run)
    track.require(batch=row)
    row %= track.data.sizes["batch"]
    tokenizer, start = run.model.tokenizer, run.prompt_length
    ids = run.canvas[row, 0, :start][run.real[row, :start]].tolist()
    if tokenizer is None:
        prompt, answer = f"token ids {ids}", f"token ids {run.tokens[row, start:].tolist()}"
    else:
        prompt, answer = str(tokenizer.decode(ids)), run.answers[row].text or ""
    return Material(
        track=track.isel(batch=row),
        canvas=run.canvas[row, : track.steps + 1].numpy(),
        prompt=prompt,
        answer=answer,
        patterns=lambda step, layers: patterns_at(run, step, layers, row),
        kept=sorted(run.patterns),
    )


def build(material: Material, budget_mb: float | int = 15.0) -> str:
    """The page as text; arguments and errors are those of `report`."""
    numbers = Numbers(material.track, material.canvas)
    bare = len(REPORT.document(data="", late="")) + len(circuitsvis_chunk()) + SPARE
    room = int(budget_mb * 1e6) - bare
    wanted = wanted_of(material, numbers, room)
    scores = fit_scores(numbers, wanted, room)
    patterns = fit_patterns(material, wanted, room - sum(map(len, scores.blocks)))
    page = _page(material, numbers, scores, patterns, wanted.left_out)
    weight = len(page.encode())
    require(
        weight <= budget_mb * 1e6,
        f"budget_mb={budget_mb} is too small: the smallest page takes {weight / 1e6:.1f} MB, {bare / 1e6:.1f} MB "
        f"of it without any data. Give a larger budget.",
    )
    return page


def _page(material: Material, numbers: Numbers, scores: PageScores, patterns: Patterns, left_out: int) -> str:
    attributes = material.track.data.attrs
    info = {
        **numbers.info(scores.steps),
        "model": spelled(str(attributes.get("model", "")).rstrip("/").rpartition("/")[2]) or "a run",
        "facts": [*_facts(material.track, numbers), *material.facts],
        "settings": _settings(attributes),
        "prompt": spelled(material.prompt, keep="\n\t\u200c\u200d"),
        "answer": spelled(material.answer, keep="\n\t\u200c\u200d"),
        "notes": _notes(numbers, scores, patterns, left_out),
        "held": scores.layers,
        "peaks": scores.peaks,
        "start": numbers.most_moving(scores.layers),
        "attention": {
            "places": [[*place, side] for place, side in patterns.sides.items()],
            "block": patterns.block,
            "cells": CELLS,
            "why": patterns.why,
        },
        "frame": HEADS.document(data=""),
    }
    late = "".join(patterns.blocks) + circuitsvis_chunk()
    return REPORT.document(data=json_block("info", info) + "".join(scores.blocks), late=late)


def _facts(track: SinkTrack, numbers: Numbers) -> list[tuple[str, str]]:
    """(value, meaning) of each entry of the line below the title."""
    planned = json.loads(track.data.attrs.get("settings", "{}")).get("steps", numbers.steps)
    ran = f"{numbers.steps} of {planned}" if planned > numbers.steps else str(numbers.steps)
    answer = numbers.positions - numbers.prompt_positions
    return [
        ("autoregressive" if track.causal else "diffusion", str(track.data.attrs.get("family", ""))),
        (ran, "steps"),
        (str(numbers.positions), f"positions ({numbers.prompt_positions} prompt, {answer} answer)"),
        (f"{numbers.layers} × {numbers.heads}", "layers × heads"),
        ("", f"seed {track.data.attrs.get('seed', 'unknown')}"),
    ]


def _settings(attributes: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = {name: attributes[name] for name in ("model", "revision", "dtype", "device") if attributes.get(name)}
    for part in ("settings", "versions"):
        settings |= json.loads(attributes.get(part, "{}"))
    return [(name, spelled(str(value))) for name, value in settings.items()]


def _notes(numbers: Numbers, scores: PageScores, patterns: Patterns, left_out: int) -> list[str]:
    """How to read the page, and what it leaves out."""
    layers = len({layer for _, layer in patterns.sides})
    steps = ", ".join(map(str, sorted({step for step, _ in patterns.sides})))
    cells = f"each cell covers {patterns.block} × {patterns.block} positions and shows the largest value"
    few, some = len(scores.steps) < numbers.steps, len(scores.layers) < numbers.layers
    notes = {
        "Score of a position: the column sum Σᵢ A[i, j] of the attention pattern A, the attention it receives from all "
        "queries of the step. Uniform attention gives each position 1.": True,
        "Sink: a position whose score exceeds the mean of the others by more than 3 (Rulli et al., arXiv 2510.15731, "
        "Eq. 3, with ε = 3 in column sums). For a mean over heads the rule is applied to mean scores.": True,
        "A step shows the canvas that the model worked on. Tokens decided in the step are already shown, and marked; "
        "their score is that of the undecided position.": not numbers.track.causal,
        "A step is one decoded token; the position it adds has no score until the next step.": numbers.track.causal,
        "In a causal model early positions are seen by more queries, which alone raises their scores.": (
            numbers.track.causal
        ),
        f"Positions count from the start of the row, which begins with {numbers.first} of padding.": (
            numbers.first > 0
        ),
        f"Attention is stored in eight bits, rounded by at most √a / 255. It is included for steps "
        f"{steps} and {layers} of {numbers.layers} layers.": bool(patterns.sides),
        f"To keep the page small, {cells} in the attention maps.": patterns.block > 1,
        f"To keep the page small, the attention of {left_out} more layers was left out.": (
            left_out > 0 and bool(patterns.sides)
        ),
        f"To keep the page small, {len(scores.steps)} of {numbers.steps} steps are shown.": few,
        f"To keep the page small, it holds score maps of {len(scores.layers)} of {numbers.layers} layers; the layer × "
        f"head map and the paths cover all.": some,
        patterns.why: bool(patterns.why),
    }
    return [spelled(text) for text, holds in notes.items() if holds]
