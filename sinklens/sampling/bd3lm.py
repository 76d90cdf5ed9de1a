"""dLLM's sampler for models trained with block diffusion (BD3LM): blocks from left to right, a float32 schedule.

Prompts are padded on the left to a whole number of blocks, so a block never holds prompt and answer; the last block may
be shorter. Within a block, the sampler is LLaDA's with another schedule (`decisions.linear_schedule`).

Where the published implementation depends on the batch or on accidental tokens, this sampler does not: a row whose
finished block contains an end token ends there (the reference continues it until all rows have ended), and a generated
padding token is an ordinary token (the reference hides it from the next block on).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.block_cache import BlockCache
from sinklens.sampling.progress_of_blocks import BlockProgress
from sinklens.sampling.settings_blocks import Bd3lmCardSettings, Bd3lmSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: Bd3lmSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    state.shift = state.shift or settings.right_shift_logits
    schedule = partial(decisions.linear_schedule, steps=settings.steps_per_block)
    progress = BlockProgress(state, schedule, state.eos_ids if settings.stop else ())
    state.cache = BlockCache(state.tree) if settings.use_cache else None
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress)


def _step(state: State, settings: Bd3lmSettings, progress: BlockProgress) -> None:
    canvas, block, counts = state.begin_step(), progress.current(), progress.take_counts()
    where = (canvas == state.mask_id) & block
    logits = state.logits(canvas, where, settings.cfg_scale, window=progress.window())
    commit_most_confident(state, settings, canvas, where, logits, counts)


def commit_most_confident(
    state: State,
    settings: Bd3lmSettings | Bd3lmCardSettings,
    canvas: Int[Tensor, "batch pos"],
    where: Bool[Tensor, "batch pos"],
    logits: Float[Tensor, "masked vocab"],
    counts: Sequence[int],
) -> None:
    """End the step: draw tokens at `where` and accept each row's `counts` most confident ones."""
    noise = None
    if settings.temperature > 0:
        noise = state.noise.uniform(where, logits.shape[-1], dtype=torch.float64)
    candidates = decisions.gumbel_candidates(logits, settings.temperature, noise)
    proposed, candidates = state.propose(where, candidates, canvas)
    if settings.remasking == "random":
        confidence = state.noise.uniform(where, dtype=torch.float32)
    else:
        confidence = decisions.probability_by_slices(logits, candidates)
    spread = state.spread_confidence(where, confidence)
    commit = at(state.tree.denoise.hook_commit, decisions.most_confident(spread, counts, None))
    state.end_step(torch.where(commit, proposed, canvas))
