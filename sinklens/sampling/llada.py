"""LLaDA's sampler: blocks from left to right; the least confident proposals stay masked.

Within a block, every step proposes a token at each masked position and commits the next share of them, the most
confident first. If the proposal is the mask token itself, the position stays masked, as in the reference code.

Under a cache policy a step decides only positions that it computes, and a row's block ends when none of its own is
masked; masks that earlier blocks kept are decided only in steps that compute them, as in Fast-dLLM.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.settings import LladaSettings
from sinklens.sampling.state import State


def denoise(state: State, settings: LladaSettings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    if settings.stop_at_eos:
        state.require_end_tokens()
    blocks = settings.gen_length // settings.block_length
    for block in range(blocks):
        end = state.prompt_length + (block + 1) * settings.block_length
        start = end - settings.block_length
        masked = state.canvas[:, start:end] == state.mask_id
        for number, counts in enumerate(decisions.even_schedule(masked.sum(dim=1), settings.steps // blocks)):
            first = start if number and state.keys is not None else 0
            if not bool((state.canvas[:, first:end] == state.mask_id).any()):
                break
            yield
            _step(state, settings, slice(start, end), counts if settings.by_quota else [1] * len(counts), first)


def _step(state: State, settings: LladaSettings, block: slice, counts: list[int], first: int) -> None:
    canvas = state.begin_step(block)
    where = canvas == state.mask_id
    where[:, block.stop :] = False
    waiting = ~where[:, first:].any(dim=1, keepdim=True)  # alone, these rows would be in their next block
    where &= state.computed() & ~waiting
    logits = state.logits(canvas, where, settings.cfg_scale)
    if settings.logits_eos_inf:
        logits[:, list(state.eos_ids)] = -torch.inf
    noise = None
    if settings.temperature > 0:
        noise = state.noise.uniform(where, logits.shape[-1], dtype=torch.float64)
    candidates = decisions.gumbel_candidates(logits, settings.temperature, noise)
    proposed, candidates = state.propose(where, candidates, canvas)
    confidence = state.spread_confidence(where, _confidence(state, settings, where, logits, candidates))
    chosen = decisions.most_confident(confidence, counts, settings.threshold, state.padding)
    if settings.factor is not None:
        chosen = decisions.by_rank(confidence, settings.factor)
    commit = at(state.tree.denoise.hook_commit, chosen)
    result = torch.where(commit, proposed, canvas)
    state.end_step(state.filled(result) if settings.stop_at_eos else result)


def _confidence(
    state: State,
    settings: LladaSettings,
    where: Bool[Tensor, "batch pos"],
    logits: Float[Tensor, "masked vocab"],
    candidates: Int[Tensor, " masked"],
) -> Float[Tensor, " masked"]:
    if settings.remasking == "random":
        return state.noise.uniform(where, dtype=torch.float32)
    if settings.confidence_eos_eot_inf:
        ended = [*state.eos_ids, *([] if state.eot_id is None else [state.eot_id])]
        logits = logits.clone()
        logits[:, ended] = -torch.inf
    return decisions.probability_by_slices(logits, candidates)
