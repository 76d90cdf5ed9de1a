"""Two runs beside each other: where their canvases, sinks and distributions differ.

Everything but the KL divergence is read from the runs as they were kept. The divergence needs logits, which no run
keeps, so both runs are repeated on their own canvases.

Caveat: two free runs work on different canvases after the first difference, and their divergence then includes its
consequences. So it is also measured on the canvases of the first run, where each step shows its own change alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sinklens.experiments import compare
from sinklens.interventions import MaskedLogits
from sinklens.live.execution import repeat
from sinklens.live.outcome import RunOutcome
from sinklens.live.problems import stated_number
from sinklens.live.spec import RunSpec
from sinklens.model import Model

ROOM = 512_000_000  # bytes of logits kept for one comparison


def differences(first: RunOutcome, second: RunOutcome) -> dict[str, Any]:
    """Where two runs differ.

    ``cells``: [step, position of the first run] at which the canvases hold different ids, step 0 being the canvas that
    the first step works on. ``first_difference``: the smallest step among them, or None. ``sinks_moved``: per step, the
    share of heads whose strongest key is another position; None for models of different shape. ``numbers``: the number
    that each answer states after ``####``, or None.

    Prompts of different lengths are not compared, and positions count from the end of the prompt.
    """
    steps = min(first.steps, second.steps)
    starts = (0, 0) if first.prompt_length == second.prompt_length else (first.prompt_length, second.prompt_length)
    length = min(first.canvas.shape[1] - starts[0], second.canvas.shape[1] - starts[1])
    one, two = (
        outcome.canvas[: steps + 1, start : start + length]
        for outcome, start in zip((first, second), starts, strict=True)
    )
    cells = np.argwhere(one != two) + np.array([0, starts[0]])
    return {
        "cells": cells.tolist(),
        "first_difference": int(cells[:, 0].min()) if len(cells) else None,
        "sinks_moved": _moved(first, second, starts, steps),
        "texts": [outcome.answer.text for outcome in (first, second)],
        "numbers": [stated_number(outcome.answer.text) for outcome in (first, second)],
    }


def _moved(first: RunOutcome, second: RunOutcome, starts: tuple[int, int], steps: int) -> list[float] | None:
    if first.score.shape[1:3] != second.score.shape[1:3]:
        return None
    one, two = (
        np.nan_to_num(outcome.score[:steps].astype(np.float32), nan=-1.0).argmax(axis=-1) - start
        for outcome, start in zip((first, second), starts, strict=True)
    )
    return [round(float(share), 4) for share in (one != two).mean(axis=(1, 2))]


def why_not(specs: Sequence[RunSpec], outcomes: Sequence[RunOutcome]) -> str | None:
    """Why the KL divergence of two runs is undefined; None if it is defined."""
    first, second = outcomes
    lengths = [outcome.settings["gen_length"] for outcome in outcomes]
    if specs[0].model != specs[1].model:
        return "KL is defined for two runs of one model; these are of two."
    if first.prompt_length != second.prompt_length or first.canvas.shape[1] != second.canvas.shape[1]:
        return "KL compares the same positions; these prompts or answers have different lengths."
    if any(outcome.settings.get("use_cache") for outcome in outcomes) and not outcomes[0].attrs.get("causal"):
        return "KL needs the logits of all undecided positions; run with use_cache off."
    if any(
        outcome.settings.get("canvas_length", length) < length
        for outcome, length in zip(outcomes, lengths, strict=True)
    ):
        return "KL compares complete answers; run with a gen_length of one canvas."
    return None


def divergences(specs: Sequence[RunSpec], outcomes: Sequence[RunOutcome], model: "Model") -> list[list[float | None]]:
    """Mean KL divergence per step in nats, of the second run's distributions from the first's.

    First with the changes of the second run on the canvases of the first, then with each run on its own canvases. See
    `experiments.compare`. None at steps without a position that is undecided in both, and at steps left out because the
    logits of all would need more than `ROOM` bytes.
    """
    steps = min(outcome.steps for outcome in outcomes)
    changed = replace(specs[0], chips=specs[1].chips)
    repeats = ((specs[0], outcomes[0]), (changed, outcomes[0]), (specs[1], outcomes[1]))
    chosen = fitting(outcomes, model, steps, len(repeats))
    kept = [MaskedLogits(steps=chosen) for _ in repeats]
    first, *others = [
        repeat(spec, model, outcome, steps=max(chosen) + 1, extra=[logits])
        for (spec, outcome), logits in zip(repeats, kept, strict=True)
    ]
    found = [
        compare(first, other, kept[0].kept, logits.kept, edited=True)["kl"].to_numpy()[0]
        for other, logits in zip(others, kept[1:], strict=True)
    ]
    return [[None if np.isnan(value) else float(value) for value in one] + [None] * (steps - len(one)) for one in found]


def fitting(outcomes: Sequence[RunOutcome], model: "Model", steps: int, rows: int) -> list[int]:
    """The steps, all or evenly spaced ones, whose logits for `rows` rows fit into `ROOM`."""
    undecided = max(int(outcome.undecided[:steps].sum(axis=1).max()) for outcome in outcomes)
    number = max(1, min(steps, ROOM // (4 * model.cfg.d_vocab * max(1, undecided) * rows)))
    return sorted({int(step) for step in np.linspace(0, steps - 1, number).round()})
