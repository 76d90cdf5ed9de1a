"""RND1's sampler: each step commits the masked positions of which the model is most certain, anywhere on the canvas.

Certain means low entropy of the distribution that a token is proposed from; with ``eb_gamma`` tokens are committed by
falling probability, as far as the sum of their entropies, minus the largest, stays within it. The last step commits
everything that is left. Logits predict the next position; `State.logits` has shifted them back.

The published sampler takes one prompt; here every row has its own number of masks and its own schedule. A proposed mask
token leaves its position masked here; there it is written like any other. With `top_k` or `top_p`, the published
entropies are NaN; here a token that is not kept contributes 0.

Pitfall: with more steps than masks, steps without a commit repeat the same pass, as in the published code.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.settings_shifted import Rnd1Settings
from sinklens.sampling.state import State


def denoise(state: State, settings: Rnd1Settings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    start = ((state.canvas == state.mask_id) & state.real).sum(dim=1).tolist()
    schedules = [decisions.entropy_schedule(masks, settings.steps) for masks in start]
    for number, keep in enumerate(zip(*schedules, strict=True)):
        if not bool((state.canvas == state.mask_id).any()):
            return
        yield
        _step(state, settings, keep, last=number == settings.steps - 1)


def _step(state: State, settings: Rnd1Settings, keep: Sequence[int], last: bool) -> None:
    canvas = state.begin_step()
    masked = (canvas == state.mask_id) & state.real
    where = masked & state.computed()
    logits = state.logits(canvas, where)
    kept = decisions.truncate(logits, settings.truncation)
    probs = kept.softmax(dim=-1, dtype=torch.float64)
    noise = None if settings.greedy else state.noise.uniform(where, dtype=torch.float64)
    proposed, candidates = state.propose(where, decisions.categorical_candidates(probs, noise), canvas)
    certainty = decisions.certainty(probs)
    bounded = settings.eb_gamma is not None and not last
    confidence = state.spread_confidence(where, decisions.probability(probs, candidates) if bounded else certainty)
    if bounded:
        commit = _within_gamma(confidence, where, certainty, settings.eb_gamma or 0.0)
    else:
        masks = masked.sum(dim=1).tolist()
        counts = [max(0, n - k) for n, k in zip(masks, keep, strict=True)]
        commit = decisions.most_confident(confidence, counts, None, state.padding)
    commit = at(state.tree.denoise.hook_commit, commit)
    state.end_step(torch.where(commit, proposed, canvas))


def _within_gamma(
    confidence: Float[Tensor, "batch pos"],
    where: Bool[Tensor, "batch pos"],
    certainty: Float[Tensor, " masked"],
    gamma: float,
) -> Bool[Tensor, "batch pos"]:
    """True at the most confident positions whose summed entropy, minus the largest of these, is at most `gamma`."""
    entropy = torch.zeros_like(confidence).masked_scatter(where, -certainty)
    order = confidence.argsort(dim=1, descending=True, stable=True)
    ordered = entropy.gather(1, order)
    within = ordered.cumsum(dim=1) - ordered.cummax(dim=1).values <= gamma
    return torch.zeros_like(within).scatter(1, order, within) & (confidence > -torch.inf)
