"""Fast-dLLM v2's sampler: blocks from left to right, each in sub-blocks; the logits predict the next position.

The model was made from an autoregressive one, so the first token of a block is decided as there: from the last position
of the finished block before it, in a separate step. The other positions of a block are decided sub-block by sub-block:
every step accepts the most confident proposal and all above a threshold.

Where the published implementation fails, this sampler does not: a prompt of exactly one block is seen (the reference
ignores it), and a proposed mask token stays masked (the reference never ends).

Limitation: the reference's `use_block_cache`, which keeps stale keys within a block and changes results, is not
implemented. All keys are computed in every step.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.block_cache import BlockCache
from sinklens.sampling.progress_of_blocks import BlockProgress
from sinklens.sampling.proposals import draw
from sinklens.sampling.settings_blocks import FastDllmV2Settings
from sinklens.sampling.state import State


def denoise(state: State, settings: FastDllmV2Settings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    stop_ids = state.eos_ids if settings.stop else ()
    progress = BlockProgress(state, lambda masked: [1] * masked, stop_ids, early=True)
    state.cache = BlockCache(state.tree) if settings.use_cache else None
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress)


def _step(state: State, settings: FastDllmV2Settings, progress: BlockProgress) -> None:
    canvas, block, counts = state.begin_step(), progress.current(), progress.take_counts()
    where = _next((canvas == state.mask_id) & block, state, settings.small_block_size)
    top_p = settings.top_p if settings.temperature > 0 else None
    drawn = draw(state, canvas, where, settings.temperature, top_p, window=progress.window())
    confidence = state.spread_confidence(where, decisions.probability(drawn.probs, drawn.candidates))
    commit = decisions.most_confident(confidence, counts, None) | (confidence > settings.threshold)
    commit = at(state.tree.denoise.hook_commit, commit)
    state.end_step(torch.where(commit, drawn.canvas, canvas))


def _next(masked: Bool[Tensor, "batch pos"], state: State, size: int) -> Bool[Tensor, "batch pos"]:
    """Each row's masked positions of its first unfinished sub-block; of a block's first position, that one alone."""
    blocks = state.tree.attention_blocks
    assert blocks is not None
    offsets = blocks.offsets(state.real)
    group = torch.where(offsets == 0, -1, offsets // size).masked_fill(~masked, blocks.length)
    return masked & (group == group.amin(dim=1, keepdim=True))
