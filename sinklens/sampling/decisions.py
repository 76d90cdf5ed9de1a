"""The decisions a sampler takes at every step, one function each.

*Schedule*: how many tokens each step commits. *Candidates*: which token is proposed at each masked position.
*Confidence*: how sure each proposal is. *Commit*: which proposals are taken. The samplers (llada.py, dream.py,
autoregressive.py) are loops over these, with a hook point after each, so an intervention can sit between any two.

Confidence is computed in float64: in float32 the probabilities of a trained model round to 1 in droves, and which of
the tied positions comes first would depend on the last bit. Candidates and confidence work on the masked positions
only, flattened to one axis ``masked``; random numbers are drawn row by row from the row's own generator, so a prompt's
result does not depend on what else is in its batch.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

SLICE = 1 << 22
"""Logits that are turned into float64 probabilities at a time."""


class RowNoise:
    """One random generator per row of the batch.

    A row's generator is seeded by the run's seed, the row's own prompt, and how often the same prompt came before in
    the batch. The same seed gives the same result; a prompt gives the same result alone and in any batch; copies of
    one prompt in a batch give different samples.
    """

    def __init__(self, seed: int, prompts: Sequence[Sequence[int]]) -> None:
        seen: dict[tuple[int, ...], int] = {}
        self.generators = []
        for prompt in map(tuple, prompts):
            copy = seen[prompt] = seen.get(prompt, -1) + 1
            digest = hashlib.sha256(repr((seed, copy, prompt)).encode()).digest()
            self.generators.append(torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1))

    def uniform(
        self, where: Bool[Tensor, "batch pos"], *trailing: int, dtype: torch.dtype
    ) -> Float[Tensor, "masked *t"]:
        """U[0, 1) for every True of `where`, row by row; trailing sizes are added behind."""
        counts = where.sum(dim=1).tolist()
        parts = [
            torch.rand(count, *trailing, generator=generator, dtype=dtype)
            for count, generator in zip(counts, self.generators, strict=True)
        ]
        return torch.cat(parts).to(where.device)


# --- schedule ---------------------------------------------------------------------------------------------------


def even_schedule(masked: Int[Tensor, " batch"], steps: int) -> list[list[int]]:
    """LLaDA's schedule of a block: tokens committed per row at each of `steps` steps, the remainder first.

    Returns:
        One list of `batch` counts per step.
    """
    counts = [divmod(int(n), steps) for n in masked.tolist()]
    return [[base + (step < extra) for base, extra in counts] for step in range(steps)]


def dream_times(steps: int, eps: float) -> Float[Tensor, " step"]:
    """Dream's times: `steps` + 1 values from 1 down to `eps`, in float32 as in the reference."""
    return torch.linspace(1, eps, steps + 1)


def dream_schedule(masked: Int[Tensor, " batch"], times: Float[Tensor, " step"], step: int) -> list[int]:
    """Dream's schedule: ⌊masked · (1 − s/t)⌋ tokens per row, everything left at the last step.

    The reference takes the mean count over the batch; per row it is the same unless a row proposed the mask itself,
    and rows stay independent.
    """
    if step == len(times) - 2:
        return [int(n) for n in masked.tolist()]
    share = 1 - times[step + 1] / times[step]
    return [int(n * share) for n in masked.float().cpu()]


# --- candidates -------------------------------------------------------------------------------------------------


def gumbel_candidates(
    logits: Float[Tensor, "masked vocab"], temperature: float, noise: Float[Tensor, "masked vocab"] | None
) -> Int[Tensor, " masked"]:
    """argmax of exp(logits) / (−log u)^temperature in float64 (Gumbel-max; 2409.02908 on why float64)."""
    if temperature == 0 or noise is None:
        return logits.argmax(dim=-1)
    return (logits.double() - temperature * torch.log(-torch.log(noise))).argmax(dim=-1)


def truncate(
    logits: Float[Tensor, "masked vocab"], temperature: float, top_p: float | None, top_k: int | None
) -> Float[Tensor, "masked vocab"]:
    """Temper logits, then keep the `top_p` nucleus and the `top_k` best; the rest get the lowest finite value."""
    if temperature > 0:
        logits = logits / temperature
    lowest = torch.finfo(logits.dtype).min
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        beyond = ordered.softmax(dim=-1).cumsum(dim=-1) > top_p
        beyond = F.pad(beyond[..., :-1], (1, 0), value=False)  # the token that crosses top_p stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), lowest)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, lowest)
    return logits


def categorical_candidates(
    probs: Float[Tensor, "masked vocab"], noise: Float[Tensor, " masked"] | None
) -> Int[Tensor, " masked"]:
    """A token drawn from `probs` by inverting its distribution function at `noise`; the most likely if that is None."""
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
    logits: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]
) -> Float[Tensor, " masked"]:
    """Probability of the proposed token, in float64, from logits; equal to the last bit to softmax and `probability`.

    The softmax is taken of `SLICE` values at a time: at 8B's vocabulary, a float64 copy of the logits of a whole canvas
    would be half a gigabyte.
    """
    rows = max(1, SLICE // logits.shape[-1])
    parts = zip(logits.split(rows), candidates.split(rows), strict=True)
    return torch.cat([probability(part.softmax(dim=-1, dtype=torch.float64), chosen) for part, chosen in parts])


def margin(probs: Float[Tensor, "masked vocab"]) -> Float[Tensor, " masked"]:
    """Lead of the likeliest token over the second, in [0, 1]."""
    best = probs.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def negative_entropy(probs: Float[Tensor, "masked vocab"]) -> Float[Tensor, " masked"]:
    """Σ_v p_v log(p_v + 1e-10) in nats, at most 0."""
    return (probs * torch.log(probs + 1e-10)).sum(dim=-1)


# --- commit -----------------------------------------------------------------------------------------------------


def most_confident(
    confidence: Float[Tensor, "batch pos"], counts: Sequence[int], threshold: float | None
) -> Bool[Tensor, "batch pos"]:
    """True at each row's `counts` most confident positions, and wherever confidence reaches `threshold`.

    Positions with confidence −inf are never taken.
    """
    commit = torch.zeros_like(confidence, dtype=torch.bool)
    for row, count in enumerate(counts):
        if count:
            commit[row, confidence[row].topk(min(count, confidence.shape[1])).indices] = True
    if threshold is not None:
        commit |= confidence >= threshold
    return commit & (confidence > -torch.inf)


def drawn_by_confidence(
    confidence: Float[Tensor, "batch pos"], counts: Sequence[int], alg_temp: float, noise: RowNoise
) -> Bool[Tensor, "batch pos"]:
    """True at `counts` positions per row, drawn without replacement with weights softmax(confidence / alg_temp)."""
    commit = torch.zeros_like(confidence, dtype=torch.bool)
    weights = (confidence / alg_temp).softmax(dim=-1).cpu()
    for row, (count, generator) in enumerate(zip(counts, noise.generators, strict=True)):
        count = min(count, int((weights[row] > 0).sum()))
        if count:
            commit[row, torch.multinomial(weights[row], count, generator=generator).to(confidence.device)] = True
    return commit
