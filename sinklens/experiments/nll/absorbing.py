"""Masks under a noise schedule: MDLM, BD3-LM and SEDD; see noise.py."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklens.experiments.nll.draws import every_mask
from sinklens.experiments.nll.noise import (
    KEPT,
    CountedTokens,
    Logits,
    NoiseNumbers,
    NoisyDraws,
    NoisyTokens,
    TimedNoise,
    without,
)
from sinklens.sampling.decisions import log_linear_sigma

HIGHEST_SIGMA = -math.log(KEPT)  # 6.9078, which BD3-LM's noise levels do not exceed
NODES = 16  # of the Gauss-Legendre rule that integrates masks over time: exact for all answers it is used for


@dataclass(frozen=True)
class Absorbing(TimedNoise):
    """MDLM's and SEDD's masks; BD3-LM's with `kept` 0.

    Attributes:
        kept: share of tokens that is clean at time 1.
    """

    kept: float = KEPT

    def share(self, times: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (1 - self.kept) * times

    def weight(self, times: Float[Tensor, " draw"]) -> Float[Tensor, " draw"]:
        return 1 / times

    def level(self, times: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        return log_linear_sigma(times, self.kept).clamp(max=HIGHEST_SIGMA)

    def noisy(self, answer: Int[Tensor, " pos"], numbers: NoiseNumbers) -> NoisyTokens:
        masked = numbers.chance < self.share(numbers.times)
        return answer.where(~masked, self.mask_id), masked

    def every(self, answer: Int[Tensor, " pos"]) -> NoisyDraws:
        if self.timed:
            return super().every(answer)
        masks, length = every_mask(len(answer)).masked, len(answer)
        counts = masks.sum(dim=1)
        weights = torch.tensor([self._probability(int(count), length) for count in counts], dtype=torch.float64)
        return NoisyDraws(answer.where(~masks, self.mask_id), masks, counts.double() / length, weights)

    def _probability(self, count: int, length: int) -> float:
        """The mean over the times of weight(t) · p(a given mask of `count` of `length` tokens)."""
        least, most = self.interval
        nodes, parts = np.polynomial.legendre.leggauss(NODES)
        times = torch.from_numpy(least + (most - least) * (nodes + 1) / 2)
        share = self.share(times)
        values = self.weight(times) * share**count * (1 - share) ** (length - count)
        return float(values @ torch.from_numpy(parts)) / 2

    def losses(self, logits: Logits, tokens: CountedTokens) -> Float[Tensor, " token"]:
        return cross_entropy(without(logits, self.mask_id), tokens.clean, reduction="none")


@dataclass(frozen=True)
class ScoreEntropy(Absorbing):
    """SEDD's masks and its score entropy.

    Attributes:
        scaled: whether the network's scores are still to be divided by expm1(σ) (V − 1).
    """

    scaled: bool = True

    def losses(self, logits: Logits, tokens: CountedTokens) -> Float[Tensor, " token"]:
        assert tokens.times is not None
        ratio = -math.log(logits.shape[-1] - 1) if self.scaled else self.level(tokens.times).expm1().log()[:, None]
        scores = without(logits + ratio, self.mask_id)
        return scores.exp().sum(dim=-1) - 1 - scores.gather(-1, tokens.clean[:, None])[:, 0]
