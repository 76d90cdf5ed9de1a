"""The training losses of networks that read a noise level: MDLM's masked one and Duo's uniform one.

Both are bounds on the negative log-likelihood of the answer, given the prompt: each is the mean over a time t ~ U(0, 1)
of what the network loses per unit of time. The prompt is never noisy and has no loss. At time t, an answer token is
still the clean one with probability α = 1 − 0.999 t, as in `sinklens.sampling.psi`; otherwise it is noise.

- MDLM (Sahoo et al., 2406.07524, eq. 10): noise is the mask. −α' / (1 − α) · (−log p(x)) at masked positions, where p
  excludes the mask; here −α' / (1 − α) = 1/t.
- Duo (Sahoo et al., 2506.10892, eq. 14; first in Schiff et al., 2412.10193): noise is any token, also the clean one.
  Every position counts, because none shows whether it is noise; `uniform_bound` has the formula.

The network gets σ = −log α of each row. Nothing else differs: both see the same prompts and times, and a position is
noise for both or for neither.

Limitation: Duo's curriculum, which starts with a relaxed loss on blurred tokens, is left out.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.sampling.psi import clean_share
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_TIME = 1e-3  # as published: below it, weights of 1/t would dominate the batch
SLOPE = -(1 - 1e-3)  # the derivative of α


class NoisyBatch(NamedTuple):
    """What a batch draws.

    Attributes:
        t: time of each row.
        replaced: which tokens of the answer are noise.
        token: the token that replaces them under uniform noise.
    """

    t: Float[Tensor, "batch 1"]
    replaced: Bool[Tensor, "batch answer"]
    token: Int[Tensor, "batch answer"]


def draw_noise(shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> NoisyBatch:
    """Times at equal distances from one random start (2107.00630, section 5), and noise with probability 1 − α."""
    rows = shape[0]
    spaced = (torch.rand(1, 1, generator=generator) + torch.arange(rows)[:, None]) / rows
    t = FIRST_TIME + (1 - FIRST_TIME) * spaced
    replaced = torch.rand(shape, generator=generator) < 1 - clean_share(t)
    return NoisyBatch(t, replaced, torch.randint(vocabulary, shape, generator=generator))


def masked_bound(
    logits: Float[Tensor, "batch answer vocab"], clean: Int[Tensor, "batch answer"], noise: NoisyBatch, mask_id: int
) -> Float[Tensor, "batch answer"]:
    """MDLM's loss of each token in nats: −log p(x) / t where the token is masked, else 0."""
    excluded = logits.index_fill(-1, torch.tensor(mask_id, device=logits.device), -torch.inf)
    lost = F.cross_entropy(excluded.transpose(1, 2), clean, reduction="none")
    return lost * (noise.replaced / noise.t).to(lost.device)


def uniform_bound(
    logits: Float[Tensor, "batch answer vocab"],
    clean: Int[Tensor, "batch answer"],
    noisy: Int[Tensor, "batch answer"],
    t: Float[Tensor, "batch 1"],
) -> Float[Tensor, "batch answer"]:
    """Duo's loss of each token in nats.

    With V the size of the vocabulary, x the clean and z the present token, q(y) = V α [y = x] + 1 − α and
    r(y) = V α p(y) + 1 − α:

        −α' / (V α) · [V / r(z) − V / q(z) + Σ_y q(y) / q(z) · log(q(y) r(z) / (r(y) q(z)))]

    It is not negative, and 0 if p(x) = 1.
    """
    size, alpha = logits.shape[-1], clean_share(t)
    model = size * alpha[..., None] * logits.softmax(dim=-1) + (1 - alpha)[..., None]
    log_model = model.log()
    of_x, of_z = (log_model.gather(-1, ids[..., None]).squeeze(-1) for ids in (clean, noisy))
    base, peak = 1 - alpha, size * alpha + 1 - alpha  # q of all other tokens, and of x
    true = torch.where(clean == noisy, peak, base)
    entropy = (size - 1) * base * base.log() + peak * peak.log()
    cross = base * log_model.sum(dim=-1) + size * alpha * of_x
    ratios = entropy - cross + size * (of_z - true.log())
    return -SLOPE / alpha * ((-of_z).exp() - 1 / true + ratios / (size * true))


def noise_loss(
    model: "PreTrainedModel", recipe: Recipe, ids: Int[Tensor, "batch pos"], prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    """The mean loss per token of the answer: MDLM's, or Duo's for the objective "duo"."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    clean, size = ids[:, prompt_length:], model.config.vocab_size
    noise = draw_noise((len(ids), clean.shape[1]), size, generator)
    uniform = recipe.objective == "duo"
    put = noise.token if uniform else torch.full_like(clean, mask_id)
    noisy = torch.where(noise.replaced, put, clean)
    canvas = torch.cat([ids[:, :prompt_length], noisy], dim=1).to(model.device)
    time = -clean_share(noise.t).log()[:, 0].to(model.device)
    hidden = model.model(input_ids=canvas, time=time).last_hidden_state[:, prompt_length:]
    logits, clean = model.lm_head(hidden).float(), clean.to(model.device)
    if uniform:
        return uniform_bound(logits, clean, canvas[:, prompt_length:], noise.t.to(model.device)).mean()
    return masked_bound(logits, clean, noise, mask_id).mean()
