"""Dream's sampler: no blocks; a time that falls from 1 to eps decides how many tokens each step commits.

Dream was trained from an autoregressive model's weights: its logits at position i predict the token at i + 1.
`State.logits` has already shifted them back.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.proposals import draw
from sinklens.sampling.settings import DreamSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: DreamSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    if settings.stop_at_eos:
        state.require_end_tokens()
    times = decisions.dream_times(settings.steps, settings.eps)
    for step in range(settings.steps):
        if not bool((state.canvas == state.mask_id).any()):
            return
        yield
        _step(state, settings, times, step)


def _step(state: State, settings: DreamSettings, times: Float[Tensor, " step"], step: int) -> None:
    canvas = state.begin_step()
    masks = (canvas == state.mask_id) & state.real
    where = masks & state.computed()
    drawn = draw(state, canvas, where, settings.truncation)
    scores = decisions.dream_confidence(settings.alg, drawn.probs, drawn.candidates)
    confidence = state.spread_confidence(where, scores)
    commit = at(
        state.tree.denoise.hook_commit, _commit(state, settings, where, masks.sum(dim=1), confidence, times, step)
    )
    result = torch.where(commit, drawn.canvas, canvas)
    state.end_step(state.filled(result) if settings.stop_at_eos else result)


def _commit(
    state: State,
    settings: DreamSettings,
    where: Bool[Tensor, "batch pos"],
    masks: Int[Tensor, " batch"],
    confidence: Float[Tensor, "batch pos"],
    times: Float[Tensor, " step"],
    step: int,
) -> Bool[Tensor, "batch pos"]:
    if settings.alg == "origin":
        share = 1 - times[step + 1] / times[step] if step < settings.steps - 1 else torch.tensor(1.0)
        drawn = state.noise.uniform(where, dtype=torch.float32) < share.to(where.device)
        return torch.zeros_like(where).masked_scatter(where, drawn)
    if settings.tokens_per_step and settings.threshold is not None:
        later = max(settings.gen_length // settings.tokens_per_step - 1 - step, 0) * settings.tokens_per_step
        counts = [max(int(n) - later, 0) for n in masks.tolist()]
        return decisions.confident_within(confidence, counts, settings.threshold, state.padding)
    counts = decisions.dream_schedule(masks, times, step)
    if not settings.alg_temp:
        return decisions.most_confident(confidence, counts, settings.threshold, state.padding)
    commit = decisions.sampled_by_confidence(confidence, counts, settings.alg_temp, state.noise)
    return commit if settings.threshold is None else commit | (confidence >= settings.threshold)
