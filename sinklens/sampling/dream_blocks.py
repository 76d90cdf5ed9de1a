"""Fast-dLLM's sampler for Dream: blocks from left to right, each filled by a schedule or by a threshold.

The first step of a block writes only the block's first token, which the position before it predicts. The later ones
decide inside the block: by Dream's schedule over the block's steps, or, with a threshold, every proposal that is
confident enough and at least one. Logits predict the next position; `State.logits` has shifted them back, inside the
columns that the step computes.

Source: NVlabs/Fast-dLLM, v1/dream/model/generation_utils_block.py. It takes one row with a threshold or the dual cache,
and names all rules other than the threshold's alike (negative entropy); here rows are independent, and `alg` counts.

Pitfall: the first token of a block is written however unsure the model is of it.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.proposals import draw
from sinklens.sampling.settings_shifted import DreamBlockSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: DreamBlockSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    per_block = settings.steps * settings.block_length // settings.gen_length
    times = decisions.dream_times(per_block, settings.eps)
    for start in range(state.prompt_length, state.prompt_length + settings.gen_length, settings.block_length):
        block = slice(start, start + settings.block_length)
        for number in range(per_block):
            if not bool((state.canvas[:, block] == state.mask_id).any()):
                break
            yield
            _step(state, settings, block, times, number)


def _step(state: State, settings: DreamBlockSettings, block: slice, times: Float[Tensor, " step"], number: int) -> None:
    canvas = state.begin_step(block)
    masks = torch.zeros_like(state.real)
    decided = slice(block.start, block.start + 1) if number == 0 else block
    masks[:, decided] = (canvas[:, decided] == state.mask_id) & state.real[:, decided]
    where = masks & state.computed()
    drawn = draw(state, canvas, where, settings.truncation)
    scores = decisions.dream_confidence(settings.alg, drawn.probs, drawn.candidates)
    confidence = state.spread_confidence(where, scores)
    counts = _counts(settings, masks.sum(dim=1), times, number)
    threshold = None if number == 0 else settings.threshold
    commit = at(state.tree.denoise.hook_commit, decisions.most_confident(confidence, counts, threshold, state.padding))
    state.end_step(torch.where(commit, drawn.canvas, canvas))


def _counts(
    settings: DreamBlockSettings, masks: Int[Tensor, " batch"], times: Float[Tensor, " step"], number: int
) -> list[int]:
    """Tokens that the step commits in each row, at least those that a threshold allows."""
    if number == 0 or settings.threshold is not None:
        return [1] * len(masks)
    return decisions.dream_schedule(masks, times, number)
