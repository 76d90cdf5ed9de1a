"""One proposal at each position that a step may change: the logits there, a token drawn from them, its probability.

The samplers that draw from a truncated distribution share this. It passes ``denoise.hook_logits``, then
``denoise.hook_candidates``.

Pitfall: `Proposals.canvas` keeps its own tokens where nothing is proposed; only `where` says which are proposals.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.settings import Truncation
from sinklens.sampling.state import State


class Proposals(NamedTuple):
    """The proposals of a step, at the positions ``masked`` of its canvas.

    Attributes:
        logits: before temperature and truncation.
        probs: the distribution that the tokens were drawn from, in float64.
        candidates: the tokens.
        canvas: the step's canvas with the tokens.
    """

    logits: Float[Tensor, "masked vocab"]
    probs: Float[Tensor, "masked vocab"]
    candidates: Int[Tensor, " masked"]
    canvas: Int[Tensor, "batch pos"]


def draw(
    state: State,
    canvas: Int[Tensor, "batch pos"],
    where: Bool[Tensor, "batch pos"],
    truncation: Truncation,
    window: slice | None = None,
    greedy: Bool[Tensor, "batch pos"] | None = None,
) -> Proposals:
    """Draw a token at every True of `where`; at temperature 0 the most likely one.

    Args:
        greedy: positions that get the most likely token of the model's own distribution whatever the temperature.
    """
    logits = state.logits(canvas, where, window=window)
    probs = decisions.truncate(logits, truncation).softmax(dim=-1, dtype=torch.float64)
    noise = state.noise.uniform(where, dtype=torch.float64) if truncation.temperature > 0 else None
    drawn = decisions.categorical_candidates(probs, noise)
    if greedy is not None and truncation.temperature > 0:
        best = greedy[where]
        probs[best] = logits[best].softmax(dim=-1, dtype=torch.float64)
        drawn[best] = logits[best].argmax(dim=-1)
    proposed, candidates = state.propose(where, drawn, canvas)
    return Proposals(logits, probs, candidates, proposed)
