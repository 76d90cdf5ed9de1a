"""Fast-dLLM v2's sampler: blocks from left to right, each in sub-blocks; the logits predict the next position.

The model was made from an autoregressive one, so the first token of a block is decided as there: from the last position
of the finished block before it, in a separate step. It is the most likely token at every temperature. The other
positions of a block are decided sub-block by sub-block: every step accepts the most confident proposal and all above a
threshold.

Where the published implementation fails, this sampler does not: a prompt of exactly one block is seen (the reference
ignores it), and a proposed mask token stays masked (the reference never ends).

With `use_block_cache`, a step computes only the sub-block that it decides, and reads the other keys of the block as
they were in the block's last complete pass. The complete block is computed in its first step and whenever the first
position of the sub-block is masked; a finished block is computed once more, with its final tokens, in the step that
decides the first token of the next one.

Pitfall: keys of the sub-block cache are stale, so its tokens differ from those of a run without it.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.block_cache import BlockCache
from sinklens.sampling.key_cache import History, KeyCache, Keys, Policy
from sinklens.sampling.progress_of_blocks import BlockProgress
from sinklens.sampling.proposals import draw
from sinklens.sampling.settings_blocks import FastDllmV2Settings
from sinklens.sampling.state import State


def denoise(state: State, settings: FastDllmV2Settings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    stop_ids = state.eos_ids if settings.stop else ()
    progress = BlockProgress(state, lambda masked: [1] * masked, stop_ids, early=True)
    state.cache = BlockCache(state.tree) if settings.use_cache else None
    if settings.use_block_cache:
        policy = SubBlockCache(state, progress, settings.small_block_size)
        state.keys = KeyCache(state.tree, policy, state.real, state.mask_id, state.shift)
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress)


def _step(state: State, settings: FastDllmV2Settings, progress: BlockProgress) -> None:
    canvas, block, counts = state.begin_step(progress.window()), progress.current(), progress.take_counts()
    where = _next((canvas == state.mask_id) & block, state, settings.small_block_size)
    drawn = draw(state, canvas, where, settings.truncation, progress.window(), greedy=_offsets(state) == 0)
    confidence = state.spread_confidence(where, decisions.probability(drawn.probs, drawn.candidates))
    commit = decisions.most_confident(confidence, counts, None) | (confidence > settings.threshold)
    commit = at(state.tree.denoise.hook_commit, commit)
    state.end_step(torch.where(commit, drawn.canvas, canvas))


class SubBlockCache(Policy):
    """The keys that a step computes: those of the sub-block that it decides, or of a complete block."""

    def __init__(self, state: State, progress: BlockProgress, size: int) -> None:
        self._state, self._progress, self._size = state, progress, size
        self._offsets = _offsets(state)

    def plan(self, history: History) -> Int[Tensor, "batch 1 pos"]:
        """The plan of the next step; keys that were never computed are computed anyway."""
        progress, size = self._progress, self._size
        masked = (history.canvas == self._state.mask_id) & progress.current()
        first = _next(masked, self._state, size)
        place = torch.where(first, self._offsets, self._offsets.max()).amin(dim=1, keepdim=True)
        in_block, starts = progress.in_block(), place == 0
        sub_block = in_block & (self._offsets // size == place // size)
        new = history.age.amin(dim=1) < 0
        complete = (in_block & new | sub_block & masked & (self._offsets % size == 0)).any(dim=1, keepdim=True)
        fresh = torch.where(starts, progress.in_block(-1) | first, torch.where(complete, in_block, sub_block))
        gone = progress.after() | (starts & in_block & ~first)
        plan = torch.where(fresh, int(Keys.FRESH), int(Keys.STALE))
        return torch.where(gone, int(Keys.GONE), plan)[:, None]


def _next(masked: Bool[Tensor, "batch pos"], state: State, size: int) -> Bool[Tensor, "batch pos"]:
    """Each row's masked positions of its first unfinished sub-block; of a block's first position, that one alone."""
    offsets = _offsets(state)
    group = torch.where(offsets == 0, -1, offsets // size).masked_fill(~masked, masked.shape[1])
    return masked & (group == group.amin(dim=1, keepdim=True))


def _offsets(state: State) -> Int[Tensor, "batch pos"]:
    """Place of each position within its block."""
    blocks = state.tree.attention_blocks
    assert blocks is not None
    return blocks.offsets(state.real)
