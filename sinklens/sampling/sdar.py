"""SDAR's sampler: blocks from left to right, each filled by a few passes under block-causal attention.

Every row has its own current block, counted from its first token, and moves to the next one as soon as no position of
the block is masked, or after ``denoising_steps`` passes. Rows therefore do not wait for each other, and a row's
canvases are the same as in a run of that row alone.

Where the published implementations fail, this sampler does not. Only masked positions are ever written (generate.py and
JetEngine overwrite prompt and decided tokens if fewer masks are left than the pass would decide). A position whose
proposal is the mask token stays masked (generate.py raises IndexError).

Pitfall: a finished block is not decided again. A position of it that a hook masks again stays masked.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.progress_of_blocks import BlockProgress, even_passes
from sinklens.sampling.proposals import Proposals, draw
from sinklens.sampling.settings_blocks import SdarSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: SdarSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    progress = even_passes(state, settings)
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress)


def _step(state: State, settings: SdarSettings, progress: BlockProgress) -> None:
    canvas, block, counts = state.begin_step(), progress.current(), progress.take_counts()
    where = (canvas == state.mask_id) & block
    drawn = draw(state, canvas, where, settings.truncation, progress.window())
    confidence = state.spread_confidence(where, _confidence(settings, drawn))
    commit = at(state.tree.denoise.hook_commit, _commit(settings, where, confidence, counts))
    state.end_step(torch.where(commit, drawn.canvas, canvas))


def _confidence(settings: SdarSettings, drawn: Proposals) -> Float[Tensor, " masked"]:
    if settings.remasking_strategy == "entropy_bounded":
        return decisions.clamped_negative_entropy(drawn.probs)
    if settings.confidence_of == "model":
        return decisions.probability_by_slices(drawn.logits, drawn.candidates)
    return decisions.probability(drawn.probs, drawn.candidates)


def _commit(
    settings: SdarSettings,
    where: Bool[Tensor, "batch pos"],
    confidence: Float[Tensor, "batch pos"],
    counts: list[int],
) -> Bool[Tensor, "batch pos"]:
    strategy = settings.remasking_strategy
    if strategy == "sequential":
        return decisions.leftmost(where, counts)
    if strategy == "entropy_bounded":
        return decisions.within_entropy(confidence, settings.eb_threshold)
    if strategy == "low_confidence_static":
        return decisions.most_confident(confidence, counts, None)
    return decisions.above_or_best(confidence, counts, settings.threshold)
