"""Open-dCoder's sampler: Dream's schedule per row, or path planning ("p2"), which takes decisions back.

In path planning each step proposes a token, and its probability, at every answer position, masked or not. The least
probable positions become masks, fewer with every step; the other masked positions get their proposal, and the other
written ones keep their token. Logits predict the next position; `State.logits` has shifted them back.

Pitfall: a written position is judged by the probability of the *present* proposal there, not of its own token, as in
the published code. A token that the model no longer proposes can stay.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.proposals import Proposals, draw
from sinklens.sampling.settings_shifted import OpenDcoderSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: OpenDcoderSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    variable = (state.canvas == state.mask_id) & state.real
    times = decisions.dream_times(settings.steps, settings.eps)
    for step in range(settings.steps):
        if not bool((state.canvas == state.mask_id).any()):
            return
        yield
        if settings.alg == "p2":
            _plan(state, settings, variable, (step + 1) / settings.steps)
        else:
            _step(state, settings, times, step)


def _step(state: State, settings: OpenDcoderSettings, times: Float[Tensor, " step"], step: int) -> None:
    canvas = state.begin_step()
    masked = (canvas == state.mask_id) & state.real
    where = masked & state.computed()
    drawn = _draw(state, settings, canvas, where)
    confidence = state.spread_confidence(where, _confidence(settings, drawn))
    counts = decisions.dream_schedule(masked.sum(dim=1), times, step)
    if settings.alg_temp:
        commit = decisions.sampled_by_confidence(confidence, counts, settings.alg_temp, state.noise)
    else:
        commit = decisions.most_confident(confidence, counts, None, state.padding)
    commit = at(state.tree.denoise.hook_commit, commit)
    state.end_step(torch.where(commit, drawn.canvas, canvas))


def _plan(state: State, settings: OpenDcoderSettings, variable: Bool[Tensor, "batch pos"], kept: float) -> None:
    """One step of path planning; `kept` is the fraction of variable positions that hold a token after it."""
    canvas = state.begin_step()
    where = variable | ((canvas == state.mask_id) & state.real)  # a hook may have masked a prompt token
    drawn = _draw(state, settings, canvas, where)
    confidence = state.spread_confidence(where, decisions.probability(drawn.probs, drawn.candidates))
    counts = (where.sum(dim=1) * (1 - kept)).floor().long().tolist()
    least = decisions.most_confident(torch.where(where, -confidence, -torch.inf), counts, None, state.padding)
    commit = at(state.tree.denoise.hook_commit, (canvas == state.mask_id) & where & ~least)
    written = torch.where(commit, drawn.canvas, canvas)
    state.end_step(written.masked_fill(least & ~commit, state.mask_id))


def _draw(
    state: State, settings: OpenDcoderSettings, canvas: Int[Tensor, "batch pos"], where: Bool[Tensor, "batch pos"]
) -> Proposals:
    return draw(state, canvas, where, settings.truncation)


def _confidence(settings: OpenDcoderSettings, drawn: Proposals) -> Float[Tensor, " masked"]:
    if settings.alg == "topk_margin":
        return decisions.margin(drawn.probs)
    if settings.alg == "entropy":
        return decisions.floored_negative_entropy(drawn.probs)
    return decisions.probability(drawn.probs, drawn.candidates)
