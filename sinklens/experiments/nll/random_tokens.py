"""Random tokens under a noise schedule: Duo and GIDD; see noise.py."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.experiments.nll.noise import KEPT, CountedTokens, Logits, NoiseNumbers, NoisyTokens, TimedNoise, without
from sinklens.families.gidd import noise_shares


@dataclass(frozen=True)
class UniformNoise(TimedNoise):
    """Duo's random tokens.

    With V tokens, x̄ = V α onehot(x) + 1 − α, x̄_p the same of the predicted probabilities, and z the noisy token, the
    loss is (−α' / (V α)) [Σ_y (x̄(y) / x̄(z)) log(x̄_p(z) x̄(y) / (x̄_p(y) x̄(z))) − V / x̄(z) + V / x̄_p(z)].

    Attributes:
        size: number of tokens in the vocabulary.
    """

    only_masks: ClassVar = False
    size: int = 0

    def share(self, times: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (1 - KEPT) * times

    def noisy(self, answer: Int[Tensor, " pos"], numbers: NoiseNumbers) -> NoisyTokens:
        drawn = numbers.chance < self.share(numbers.times)
        return torch.where(drawn, (numbers.choice * self.size).long(), answer), torch.ones_like(drawn)

    def losses(self, logits: Logits, tokens: CountedTokens) -> Float[Tensor, " token"]:
        clean, noisy, times = tokens
        assert times is not None
        share = self.share(times).to(logits)[:, None]
        size, alpha = logits.shape[-1], 1 - share
        predicted = size * alpha * logits.softmax(dim=-1) + share
        true = share.expand_as(logits).scatter_add(-1, clean[:, None], size * alpha)
        true_here, predicted_here = (one.gather(-1, noisy[:, None]) for one in (true, predicted))
        ratio = true / true_here
        divergence = (ratio * (ratio / (predicted / predicted_here)).log()).sum(dim=-1, keepdim=True)
        part = (1 - KEPT) / (size * alpha)
        return (part * (divergence - size / true_here + size / predicted_here))[:, 0]


@dataclass(frozen=True)
class MixedNoise(TimedNoise):
    """GIDD's masks and random tokens.

    The loss is w(z) (KL(q, p) + q(z) / p(z) − log(q(z) / p(z)) − 1), with q the distribution of the noisy token given
    the clean one and p its prediction; w is 1 / (t (1 − t)) where z is the mask, half of that where it is another wrong
    token, and in between where it is the right one.

    Attributes:
        size: number of tokens in the vocabulary.
        p_uniform: share of random tokens.
    """

    only_masks: ClassVar = False
    size: int = 0
    p_uniform: float = 0.0

    def level(self, times: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        return times

    def share(self, times: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 - noise_shares(times, self.p_uniform).clean

    def noisy(self, answer: Int[Tensor, " pos"], numbers: NoiseNumbers) -> NoisyTokens:
        times, chance, choice = numbers
        shares = noise_shares(times, self.p_uniform)
        token = (choice * (self.size - 1)).long()
        token = token + (token >= self.mask_id)
        drawn = torch.where(chance < shares.mask + shares.random, token, answer)
        return torch.where(chance < shares.mask, self.mask_id, drawn), torch.ones_like(drawn, dtype=torch.bool)

    def losses(self, logits: Logits, tokens: CountedTokens) -> Float[Tensor, " token"]:
        clean, noisy, times = tokens
        assert times is not None
        shares = noise_shares(times.to(logits)[:, None], self.p_uniform)
        each = shares.random / (logits.shape[-1] - 1)
        noise = each.expand_as(logits).index_fill(-1, torch.tensor([self.mask_id], device=logits.device), 0)
        noise = noise.index_add(-1, torch.tensor([self.mask_id], device=logits.device), shares.mask)
        true = noise.scatter_add(-1, clean[:, None], shares.clean)
        predicted = noise + shares.clean * without(logits, self.mask_id).softmax(dim=-1)
        true_here, predicted_here = (one.gather(-1, noisy[:, None])[:, 0] for one in (true, predicted))
        ratio = true_here / predicted_here
        divergence = torch.special.xlogy(true, true / predicted).sum(dim=-1) + ratio - ratio.log() - 1
        change = noise.gather(-1, noisy[:, None])[:, 0] / true_here
        times = times.to(logits)
        return change * torch.where(noisy == self.mask_id, 1.0, 0.5) / (times * (1 - times)) * divergence
