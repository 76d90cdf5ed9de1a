"""The decisions that a sampler makes at every step, one function each.

*Schedule*: how many tokens each step commits. *Candidates*: which token is proposed at each masked position.
*Confidence*: how confident the model is of each proposal. *Commit*: which proposals are accepted. The samplers
(llada.py, dream.py and others) are loops over these functions with a hook point after each, so an intervention
can act between any two.

Confidence is computed in float64 by default: in float32, many probabilities of a trained model round to 1, and in
bfloat16 most have equals. Published scripts mostly use the model's dtype (`confidence_dtype`). Candidates and
confidences are computed only at the masked positions, flattened to one axis ``masked``. Random numbers are drawn row by
row from each row's generator, so the result for a prompt does not depend on the rest of its batch.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

SLICE = 1 << 22
"""Number of logits converted to float64 probabilities at a time."""


class Truncation(NamedTuple):
    """How logits become the distribution that tokens are drawn from.

    Attributes:
        temperature: divides the logits; 0 draws the most likely token.
        top_p: keep the smallest set of tokens with this total probability; None keeps all.
        top_k: keep this many most likely tokens; None keeps all.
        top_p_first: apply `top_p` to all tokens, then `top_k`; otherwise `top_p` to those that `top_k` keeps.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    top_p_first: bool = False


class RowNoise:
    """One random generator per row of the batch.

    A row's generator is seeded with the run's seed, the row's prompt, and how often the same prompt occurred earlier in
    the batch. The same seed gives the same result, a prompt gives the same result alone and in any batch, and copies of
    one prompt in a batch give different samples.
    """

    def __init__(self, seed: int, prompts: Sequence[Sequence[int]], copies: int = 1) -> None:
        counts, digests = Counter[tuple[int, ...]](), []
        for prompt in map(tuple, prompts):
            digests.append(hashlib.sha256(repr((seed, counts[prompt], prompt)).encode()).digest())
            counts[prompt] += 1
        seeds = [int.from_bytes(digest[:8], "little") >> 1 for digest in digests]
        self.generators = [torch.Generator().manual_seed(number) for number in seeds * copies]

    def uniform(
        self, where: Bool[Tensor, "batch pos"], *trailing: int, dtype: torch.dtype
    ) -> Float[Tensor, "masked *t"]:
        """U[0, 1) for every True in `where`, row by row; `trailing` sizes become the last dimensions."""
        parts = [
            torch.rand(count, *trailing, generator=generator, dtype=dtype)
            for count, generator in zip(where.sum(dim=1).tolist(), self.generators, strict=True)
        ]
        return torch.cat(parts).to(where.device)


# --- schedule ---------------------------------------------------------------------------------------------------


def even_schedule(masked: Int[Tensor, " batch"], steps: int) -> list[list[int]]:
    """LLaDA's schedule of a block: tokens to commit per row at each of `steps` steps; early steps take the remainder.

    Returns:
        For each step, one count per row.
    """
    counts = [divmod(int(n), steps) for n in masked.tolist()]
    return [[base + (step < extra) for base, extra in counts] for step in range(steps)]


def linear_schedule(masked: int, steps: int) -> list[int]:
    """dLLM's schedule of a block with a linear α: tokens to commit at each step, without steps that commit none.

    Step t of `steps`, …, 1 commits round(left · (1 − (t − 1)/t)). The fraction is computed in float32, and its rounding
    errors decide: exact arithmetic would give another schedule for almost every third pair up to 64 tokens and steps.
    """
    counts, left, one = [], masked, np.float32(1)
    for t in range(steps, 0, -1):
        still, before = (one - (one - np.float32(time / steps)) for time in (t - 1, t))
        counts.append(min(round(left * (1 - float(still / before))), left))
        left -= counts[-1]
    return [count for count in counts if count]


def entropy_schedule(masked: int, steps: int) -> list[int]:
    """RND1's schedule: how many of `masked` positions each of `steps` steps leaves masked, none after the last.

    ⌊masked · (s / steps)⌋ for s = steps − 1, …, 0. The quotient is rounded to float32 before the product, as in the
    reference, and this matters: of 22 masks in 22 steps, 12 are left after the ninth, not 13.
    """
    return [int(np.float32(masked) * np.float32(left / steps)) for left in reversed(range(steps))]


def dream_schedule(masked: Int[Tensor, " batch"], times: Float[Tensor, " step"], step: int) -> list[int]:
    """Dream's schedule: ⌊masked · (1 − s/t)⌋ tokens per row, and all remaining ones at the last step.

    The reference uses the mean count over the batch. The count per row is the same unless a row proposed the mask
    token itself, and it keeps rows independent.
    """
    if step == len(times) - 2:
        return [int(n) for n in masked.tolist()]
    return [int(n * (1 - times[step + 1] / times[step])) for n in masked.float().cpu()]


# --- candidates -------------------------------------------------------------------------------------------------


def gumbel_candidates(
    logits: Float[Tensor, "masked vocab"], temperature: float, noise: Float[Tensor, "masked vocab"] | None
) -> Int[Tensor, " masked"]:
    """argmax of exp(logits) / (−log u)^temperature in float64 (Gumbel-max; arXiv 2409.02908 explains why float64)."""
    if temperature == 0 or noise is None:
        return logits.argmax(dim=-1)
    return (logits.double() - temperature * torch.log(-torch.log(noise))).argmax(dim=-1)


def truncate(logits: Float[Tensor, "masked vocab"], truncation: Truncation) -> Float[Tensor, "masked vocab"]:
    """Divide logits by the temperature, keep the `top_p` nucleus and the `top_k` largest, and lower the rest.

    The order of the two matters: a nucleus taken among the `top_k` largest holds fewer tokens than one taken among all.
    Logits that are not kept become the lowest finite value.
    """
    temperature, top_p, top_k, top_p_first = truncation
    if temperature > 0:
        logits = logits / temperature
    if top_p_first:
        return _largest(_nucleus(logits, top_p), top_k)
    return _nucleus(_largest(logits, top_k), top_p)


def _nucleus(logits: Float[Tensor, "masked vocab"], top_p: float | None) -> Float[Tensor, "masked vocab"]:
    """`logits`, lowered outside the smallest set whose probability exceeds `top_p`."""
    if top_p is None or top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    beyond = ordered.softmax(dim=-1).cumsum(dim=-1) > top_p
    beyond = F.pad(beyond[..., :-1], (1, 0), value=False)  # the token that crosses top_p stays
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), torch.finfo(logits.dtype).min)


def _largest(logits: Float[Tensor, "masked vocab"], top_k: int | None) -> Float[Tensor, "masked vocab"]:
    """`logits`, lowered below the `top_k` largest."""
    if top_k is None:
        return logits
    least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)


def categorical_candidates(
    probs: Float[Tensor, "masked vocab"], noise: Float[Tensor, " masked"] | None
) -> Int[Tensor, " masked"]:
    """Draw tokens from `probs` by inverting the distribution function at `noise`; without noise, the most likely."""
    if noise is None:
        return probs.argmax(dim=-1)
    cumulative = probs.double().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, noise.double()[:, None] * cumulative[:, -1:], right=True)
    return drawn[:, 0].clamp(max=probs.shape[-1] - 1)


# --- confidence -------------------------------------------------------------------------------------------------


def probability(probs: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]) -> Float[Tensor, " masked"]:
    """Probability of the proposed token, in [0, 1]."""
    return probs.gather(-1, candidates[:, None])[:, 0]


def probability_by_slices(
    logits: Float[Tensor, "masked vocab"],
    candidates: Int[Tensor, " masked"],
    dtype: torch.dtype | None = torch.float64,
) -> Float[Tensor, " masked"]:
    """Probability of the proposed token from logits; bit-identical to softmax in `dtype` followed by `probability`.

    The softmax processes `SLICE` values at a time: with the vocabulary of an 8B model, a float64 copy of a canvas's
    logits would take half a gigabyte.
    """
    rows = max(1, SLICE // logits.shape[-1])
    if logits.shape[0] <= rows:
        return probability(logits.softmax(dim=-1, dtype=dtype), candidates)
    parts = zip(logits.split(rows), candidates.split(rows), strict=True)
    return torch.cat([probability(part.softmax(dim=-1, dtype=dtype), chosen) for part, chosen in parts])


def margin(probs: Float[Tensor, "masked vocab"]) -> Float[Tensor, " masked"]:
    """Probability of the most likely token minus that of the second, in [0, 1]."""
    best = probs.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def dream_confidence(
    alg: str, probs: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]
) -> Float[Tensor, " masked"]:
    """Confidence of Dream's samplers by `alg`: margin, negative entropy in nats, or, for any other, the probability."""
    if alg == "topk_margin":
        return margin(probs)
    if alg == "entropy":
        return (probs * torch.log(probs + 1e-10)).sum(dim=-1)  # at most 0
    return probability(probs, candidates)


def floored_negative_entropy(probs: Float[Tensor, "masked vocab"]) -> Float[Tensor, " masked"]:
    """Σ_v p_v log max(p_v, 1e-10) in nats, as Open-dCoder computes it; at most 0."""
    return (probs * probs.clamp_min(1e-10).log()).sum(dim=-1)


def certainty(probs: Float[Tensor, "masked vocab"]) -> Float[Tensor, " masked"]:
    """Σ_v p_v log p_v in nats, where 0 log 0 = 0; at most 0."""
    return -torch.special.entr(probs).sum(dim=-1)


def clamped_negative_entropy(probs: Float[Tensor, "masked vocab"]) -> Float[Tensor, " masked"]:
    """Σ_v p_v log p_v in nats with p_v at least 1e-12, as JetEngine computes it; at most 0."""
    probs = probs.clamp_min(1e-12)
    return (probs * probs.log()).sum(dim=-1)


# --- commit -----------------------------------------------------------------------------------------------------


def among(tokens: Int[Tensor, "*shape"], ids: Sequence[int]) -> Bool[Tensor, "*shape"]:
    """Whether each token is one of `ids`."""
    return torch.isin(tokens, torch.tensor(ids, dtype=tokens.dtype, device=tokens.device))


def most_confident(
    confidence: Float[Tensor, "batch pos"],
    counts: Sequence[int],
    threshold: float | None,
    ranked: Bool[Tensor, "batch pos"] | None = None,
) -> Bool[Tensor, "batch pos"]:
    """True at each row's `counts` most confident positions, and wherever confidence reaches `threshold`.

    Positions with confidence −inf are never committed. Equal confidences come in the order in which `torch.topk` puts
    them on a CPU, whatever the device: the published samplers leave it to this call.

    Args:
        ranked: the positions that the published sampler ranks, of which those without a proposal come last; None ranks
            the positions with a proposal. The order of equal confidences depends on their places among these, and
            `top_k=1` makes all of them equal. So a row is ranked as if it were alone, without padding and without
            another row's block.
    """
    commit = torch.zeros_like(confidence, dtype=torch.bool)
    among = confidence > -torch.inf if ranked is None else ranked
    for row, count in enumerate(counts):
        if count:
            places = among[row].nonzero()[:, 0]
            first = confidence[row][places].cpu().topk(min(count, len(places))).indices
            commit[row].index_fill_(0, places[first.to(places.device)], True)
    if threshold is not None:
        commit |= confidence >= threshold
    return commit & (confidence > -torch.inf)


def leftmost_best(confidence: Float[Tensor, "batch pos"], counts: Sequence[int]) -> Bool[Tensor, "batch pos"]:
    """True at each row's `counts` most confident positions, the leftmost of equal ones first; never at −inf.

    This is how published samplers choose that call `torch.argmax` or `torch.argsort` on a CPU.
    """
    order = confidence.argsort(dim=1, descending=True, stable=True)
    best = torch.arange(order.shape[1], device=order.device) < torch.tensor(counts, device=order.device)[:, None]
    return torch.zeros_like(best).scatter(1, order, best) & (confidence > -torch.inf)


def chosen_among_equals(
    confidence: Float[Tensor, "batch pos"], chosen: Bool[Tensor, "batch pos"]
) -> Int[Tensor, " batch"]:
    """How many positions each row chose although one that it left was as confident, where the best are chosen.

    Positions with confidence −inf have no proposal and were not left.
    """
    best_left = confidence.masked_fill(chosen, -torch.inf).amax(dim=1, keepdim=True)
    return (chosen & (confidence == best_left) & (best_left > -torch.inf)).sum(dim=1)


def above_or_best(
    confidence: Float[Tensor, "batch pos"],
    counts: Sequence[int],
    threshold: float,
    ranked: Bool[Tensor, "batch pos"] | None = None,
) -> Bool[Tensor, "batch pos"]:
    """True above `threshold` in rows with at least `counts` such positions, else at the `counts` most confident."""
    high = confidence > threshold
    enough = high.sum(dim=1) >= torch.tensor(counts, device=high.device)
    return torch.where(enough[:, None], high, most_confident(confidence, counts, None, ranked))


def confident_within(
    confidence: Float[Tensor, "batch pos"],
    counts: Sequence[int],
    threshold: float,
    ranked: Bool[Tensor, "batch pos"] | None = None,
) -> Bool[Tensor, "batch pos"]:
    """True at the most confident position, and at those that reach `threshold` among each row's `counts` first."""
    best = most_confident(confidence, [1] * len(counts), None, ranked)
    return best | (most_confident(confidence, counts, None, ranked) & (confidence >= threshold))


def by_rank(
    confidence: Float[Tensor, "batch pos"], factor: float, ranked: Bool[Tensor, "batch pos"] | None = None
) -> Bool[Tensor, "batch pos"]:
    """Fast-dLLM's factor rule: commit by falling confidence while rank r, from 1, has at least 1 − factor / (r + 1).

    Rank 1 always passes. If only the last rank fails, it is committed too, as in the published code. Positions with
    confidence −inf have no rank.
    """
    ordered = confidence.sort(dim=1, descending=True).values
    ranks = torch.arange(1, confidence.shape[1] + 1, device=confidence.device)
    candidate = ordered > -torch.inf
    passes = (ordered >= 1 - factor / (ranks + 1)) | (ranks == 1)
    kept = (passes & candidate).long().cumprod(dim=1).sum(dim=1)
    last = candidate.sum(dim=1)
    return most_confident(confidence, torch.where(kept == last - 1, last, kept).tolist(), None, ranked)


def leftmost(where: Bool[Tensor, "batch pos"], counts: Sequence[int]) -> Bool[Tensor, "batch pos"]:
    """True at the first `counts` True positions of each row of `where`."""
    return where & (where.cumsum(dim=1) <= torch.tensor(counts, device=where.device)[:, None])


def within_entropy(confidence: Float[Tensor, "batch pos"], bound: float) -> Bool[Tensor, "batch pos"]:
    """True at the positions of lowest entropy whose sum of entropies stays below `bound`, at least one per row.

    `confidence` is the negative entropy; positions with confidence −inf are never committed.
    """
    ordered, order = confidence.sort(dim=1, descending=True, stable=True)
    within = (-ordered).cumsum(dim=1) < bound
    within[:, 0] = True
    return torch.zeros_like(within).scatter(1, order, within) & (confidence > -torch.inf)


def within_bound(
    confidence: Float[Tensor, "batch pos"], entropy: Float[Tensor, "batch pos"], bound: float
) -> Bool[Tensor, "batch pos"]:
    """True at the most confident positions whose summed entropy, minus the largest of these, is at most `bound`.

    The sum without the largest entropy bounds the mutual information of the accepted tokens (2505.24857). The most
    confident position is always accepted.
    """
    order = confidence.argsort(dim=1, descending=True, stable=True)
    ordered = entropy.gather(1, order)
    within = ordered.cumsum(dim=1) - ordered.cummax(dim=1).values <= bound
    return torch.zeros_like(within).scatter(1, order, within) & (confidence > -torch.inf)


def sampled_by_confidence(
    confidence: Float[Tensor, "batch pos"], counts: Sequence[int], alg_temp: float, noise: RowNoise
) -> Bool[Tensor, "batch pos"]:
    """True at `counts` positions per row, sampled without replacement with weights softmax(confidence / alg_temp).

    The most likely positions after Gumbel noise are such a sample (Gumbel-top-k). Weights so small that they would
    round to 0 can still be drawn, so a step commits as many positions as the schedule says.
    """
    where = confidence > -torch.inf
    uniform = noise.uniform(where, dtype=torch.float64).clamp_min(torch.finfo(torch.float64).tiny)
    scores = confidence[where].double() / alg_temp - torch.log(-torch.log(uniform))
    spread = torch.full_like(confidence, -torch.inf, dtype=torch.float64).masked_scatter(where, scores)
    return most_confident(spread, counts, None)


def exponential_race(
    weights: Float[Tensor, "*positions vocab"], uniform: Float[Tensor, "*positions vocab"]
) -> Int[Tensor, "*positions"]:
    """Draw each token with a probability proportional to its weight: argmax_v weight_v / (1e-10 − log(u_v + 1e-10)).

    Weights need not sum to 1; one that is not positive never wins (SEDD's catsample.py, used by MDLM and Duo).
    """
    return (weights / (1e-10 - (uniform + 1e-10).log())).argmax(dim=-1)


def log_linear_sigma(time: Float[Tensor, "*shape"], eps: float = 1e-3) -> Float[Tensor, "*shape"]:
    """The noise level σ(t) = −log(1 − (1 − ε) t) of the log-linear schedule; 6.9078 at t = 1 for ε = 1e-3."""
    return -(1 - (1 - eps) * time).log()


def token_probabilities(logits: Float[Tensor, "masked vocab"], mask_id: int) -> Float[Tensor, "masked vocab"]:
    """The distribution of the token behind a mask: softmax without the mask token, whose probability is 0."""
    logits = logits.clone()
    logits[:, mask_id] = -torch.inf
    return logits.softmax(dim=-1)


def posterior_weights(
    probs: Float[Tensor, "masked vocab"], mask_id: int, stays: Float[Tensor, "*masked"]
) -> Float[Tensor, "masked vocab"]:
    """The distribution of a masked position after a step: the mask with probability `stays`, else a token of `probs`.

    With linear noise, a step from time t to s has `stays` = s / t (MDLM, BD3-LM).
    """
    stays = stays.to(probs)
    weights = probs * (1 - stays)[..., None]
    weights[:, mask_id] = stays
    return weights


def euler_weights(
    score: Float[Tensor, "masked vocab"], mask_id: int, rate: Float[Tensor, ""]
) -> Float[Tensor, "masked vocab"]:
    """SEDD's Euler step at masked positions: `rate` · score for tokens, one minus their sum for the mask.

    The mask's weight may be negative; it then never wins an `exponential_race`.
    """
    weights = score * rate
    weights[:, mask_id] = 0
    weights[:, mask_id] = 1 - weights.sum(dim=-1)
    return weights


def analytic_weights(
    score: Float[Tensor, "masked vocab"], mask_id: int, decrease: Float[Tensor, ""]
) -> Float[Tensor, "masked vocab"]:
    """SEDD's analytic step at masked positions, when the noise level falls by `decrease` δ (arXiv 2310.16834, 5.2).

    Tokens get (e^δ − 1) · score. The mask gets e^δ · score + (1 − e^δ) Σ score, which may be negative.
    """
    weights = score * decrease.exp()
    weights[:, mask_id] += (1 - decrease.exp()) * score.sum(dim=-1)
    kept = weights[:, mask_id].clone()
    weights = weights * (1 - (-decrease).exp())
    weights[:, mask_id] = kept
    return weights


def capped_nucleus(probs: Float[Tensor, "masked vocab"], total: float) -> Float[Tensor, "masked vocab"]:
    """BD3-LM's nucleus: the most likely tokens whose probabilities sum to at most `total`, renormalized; at least one.

    The token that crosses `total` is left out, unlike in `truncate`.
    """
    if total >= 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    kept = ordered.cumsum(dim=-1) <= total
    kept[..., 0] = True
    found = torch.zeros_like(probs).scatter(-1, order, ordered * kept)
    return found / found.sum(dim=-1, keepdim=True)
