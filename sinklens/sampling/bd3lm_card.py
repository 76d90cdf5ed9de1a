"""The sampler in the model card of dLLM's BD3LM checkpoints: blocks that begin inside the prompt's last block.

Blocks are counted from a row's first token, so the first one completes the prompt's last block. While it is decoded,
the prompt tokens in it do not see the answer (`Blocks.sealed`), because the model card's code computes their keys
before it and keeps them; once the block is finished, they do. Each block's positions are divided evenly among its
passes, earlier passes taking the remainder. A row ends in the step in which an end token appears.

Rows are independent, and prompts are padded on the left. The model card's code pads on the right and counts blocks by
columns, so there a shorter row depends on the longest one; and it continues rows that have ended until all have.

Limitation: a single pass of the model over a canvas of the first block lets the prompt see the answer, so its logits
differ from those of the run.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from sinklens.hooks.blocks import Blocks, ruled_by
from sinklens.sampling import decisions
from sinklens.sampling.bd3lm import commit_most_confident
from sinklens.sampling.block_cache import BlockCache
from sinklens.sampling.progress_of_blocks import BlockProgress
from sinklens.sampling.settings_blocks import Bd3lmCardSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: Bd3lmCardSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    blocks = Blocks(settings.block_length, "token")

    def shares(masked: int) -> list[int]:
        counts = decisions.even_schedule(torch.tensor([masked]), settings.denoising_steps)
        return [count for (count,) in counts if count]

    progress = BlockProgress(state, shares, state.eos_ids if settings.stop else (), blocks=blocks)
    state.cache = BlockCache(state.tree) if settings.use_cache else None
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress, blocks)


def _step(state: State, settings: Bd3lmCardSettings, progress: BlockProgress, blocks: Blocks) -> None:
    block, counts, start = progress.current(), progress.take_counts(), state.prompt_length
    sealed = replace(blocks, sealed=tuple(start if here else 0 for here in block[:, start].tolist()))
    with ruled_by(state.tree.hf.config, sealed):  # a hook on the canvas may run another pass
        canvas = state.begin_step()
        where = (canvas == state.mask_id) & block
        given = ~block & (canvas != state.mask_id)
        logits = state.logits(canvas, where, settings.cfg_scale, window=progress.window(), given=given)
    commit_most_confident(state, settings, canvas, where, logits, counts)
    progress.end(progress.stops(state.canvas, block))
