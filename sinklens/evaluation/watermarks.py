"""Detect a watermark: how many tokens of a text are green, and how often the detector is wrong.

With T tokens, G of them green and γ the green share of the vocabulary (Kirchenbauer et al., 2301.10226, eq. 3),

    z = (G − γ T) / √(T γ (1 − γ))

Equal pairs of a token and its context count once, as there, because their draws are not independent.

Pitfall: z has mean 0 and variance 1 over random *keys*. With one key, text without a mark may use green tokens more or
less often than γ, above all short templated text. Estimate the rate of false alarms from unmarked text of the same
kind (`detection_errors`), not from the normal distribution.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from sinklens.errors import SettingError
from sinklens.evaluation.statistics import Accuracy
from sinklens.interventions.watermark import GreenList
from sinklens.runs.result import require_run

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


@dataclass(frozen=True, eq=False)
class GreenScores:
    """Green tokens of some answers.

    Attributes:
        green, tokens: numbers of distinct pairs of a token and its context, those that are green and all.
        z: see the module; NaN for an empty answer.
        p: probability of at least this z for a normal variable.
    """

    green: Int[np.ndarray, " row"]
    tokens: Int[np.ndarray, " row"]
    z: Float[np.ndarray, " row"]
    p: Float[np.ndarray, " row"]


@dataclass(frozen=True)
class DetectionErrors:
    """How often a detector is wrong at a threshold of z.

    Attributes:
        threshold: texts with at least this z are called marked.
        false_alarms: unmarked texts that are called marked; ``str`` shows the share with its interval.
        misses: marked texts that are not.
    """

    threshold: float
    false_alarms: Accuracy
    misses: Accuracy


def green_scores(run: "Generation", mark: GreenList) -> GreenScores:
    """Count the green tokens of a run's answers, up to their end tokens.

    Args:
        run: any run of the model or of another with the same vocabulary; only its tokens are read.
        mark: the watermark to look for.
    """
    require_run(run, "run")
    start, size = run.prompt_length, run.model.cfg.d_vocab
    counts = []
    for row, answer in zip(run.tokens.tolist(), run.answers, strict=True):
        places = [place for place in range(start, start + answer.tokens) if row[place] >= 0]
        pairs = {(row[place - 1] if mark.context == "previous" else -1, row[place]) for place in places}
        counts.append((sum(bool(mark.green(size, before)[token]) for before, token in pairs), len(pairs)))
    green, tokens = (np.array(part, dtype=np.int64) for part in zip(*counts, strict=True))
    share = float(mark.green(size, 0).double().mean())
    with np.errstate(invalid="ignore", divide="ignore"):
        z = (green - share * tokens) / np.sqrt(tokens * share * (1 - share))
    return GreenScores(green, tokens, z, np.array([math.erfc(value / math.sqrt(2)) / 2 for value in z]))


def detection_errors(marked: GreenScores, unmarked: GreenScores, threshold: float = 4.0) -> DetectionErrors:
    """The errors at a threshold, with score intervals; texts without a token are never called marked.

    Raises:
        SettingError: there is no marked or no unmarked text.
    """
    if not len(marked.z) or not len(unmarked.z):
        raise SettingError("error rates need at least one marked and one unmarked text.")
    found = [np.nan_to_num(scores.z, nan=-np.inf) >= threshold for scores in (marked, unmarked)]
    return DetectionErrors(
        threshold, Accuracy(int(found[1].sum()), len(found[1])), Accuracy(int((~found[0]).sum()), len(found[0]))
    )
