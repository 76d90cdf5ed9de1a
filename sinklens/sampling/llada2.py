"""LLaDA2.0's sampler: blocks from left to right, confident proposals first, with an early stop inside a block.

Every row has its own current block, as in sdar.py, from which this sampler differs in two respects: the number of
passes follows from `minimal_topk` too, and a row may end in the step that decides an end token.

Where the published implementation fails, this sampler does not: an end token of the prompt does not end the run (the
reference then returns an empty answer), and positions before the answer are never written.

Pitfall: an end token that was decided before its left neighbors ends the row only after the block, as in the reference.
"""

from collections.abc import Iterator

import torch

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.progress_of_blocks import BlockProgress, even_passes
from sinklens.sampling.proposals import draw
from sinklens.sampling.settings_llada2 import Llada2Settings
from sinklens.sampling.state import State


def denoise(state: State, settings: Llada2Settings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    progress = even_passes(state, settings)
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress)


def _step(state: State, settings: Llada2Settings, progress: BlockProgress) -> None:
    canvas, block, counts = state.begin_step(), progress.current(), progress.take_counts()
    where = (canvas == state.mask_id) & block
    drawn = draw(state, canvas, where, settings.truncation, progress.window())
    confidence = state.spread_confidence(where, decisions.probability(drawn.probs, drawn.candidates))
    commit = decisions.above_or_best(confidence, counts, settings.threshold)
    commit = at(state.tree.denoise.hook_commit, commit)
    state.end_step(torch.where(commit, drawn.canvas, canvas))
    if settings.eos_early_stop:
        decided_now = block & (state.canvas != canvas)
        progress.end(progress.stops(state.canvas, decided_now) & progress.ended(state.canvas))
