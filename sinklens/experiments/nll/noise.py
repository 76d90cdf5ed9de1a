"""How each family makes an answer noisy, and what every token of the noisy answer adds to the bound.

For a clean answer x, a time t and the noisy answer z, every bound has the form

    −log p(x) ≤ E_t E_z [ Σ_i weight(t) · loss_i(x, z, t) ]

Masked models without a noise schedule count masks instead of times (`MaskNoise`; draws.py). The others draw t uniformly
between two times, as their authors' evaluations do, and read it or a noise level σ:

- *subs* (MDLM, Sahoo et al., 2406.07524; BD3-LM, Arriola et al., 2503.09573): tokens are masked with probability
  1 − e^−σ; the loss of a masked token is −log p(x_i) without the mask's own probability, and the weight is 1 / t.
- *score entropy* (SEDD, Lou et al., 2310.16834): masks as MDLM's. With s the scores times expm1(σ), the loss is
  −log s(x_i) + Σ_y s(y) − 1, which is −log s(x_i) where the scores sum to 1, and the weight is 1 / t.
- *uniform* (Duo, Sahoo et al., 2506.10892): a token is drawn from the vocabulary with probability 1 − α(t).
- *mixture* (GIDD, von Rütte et al., 2503.04482): masks and random tokens; a divergence weighted by what z holds.

In uniform and mixture every token counts, changed or not, and the weight is part of the loss.

The published evaluations know no prompts: they score complete texts. Here a prompt stays as it is, and the time is that
of the answer alone, as in SEDD's sampler with fixed tokens. An empty prompt gives the published bound of a text.

Times of a batch are spread from one random start, as in GIDD's code. MDLM, BD3-LM and Duo draw one time per stratum and
SEDD independent ones, which have the same mean.

Pitfall: a mean over the published interval stands for the integral from 0 to 1. GIDD's random tokens vanish only as
√t, so what its interval leaves out can matter: 2 % of the bound of a text of two tokens in the tests.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklens.errors import SettingError
from sinklens.experiments.nll.draws import DrawRule, every_mask
from sinklens.families.gidd import noise_shares
from sinklens.model import Model
from sinklens.sampling.decisions import log_linear_sigma

LEAST_TIME = 1e-3  # of MDLM's, BD3-LM's, SEDD's and Duo's evaluations
KEPT = 1e-3  # share of tokens that is clean at time 1
HIGHEST_SIGMA = -math.log(KEPT)  # 6.9078, which BD3-LM's noise levels do not exceed
NODES = 16  # of the Gauss-Legendre rule that integrates masks over time: exact for all answers it is used for
Logits = Float[Tensor, "token vocab"]
NoisyTokens = tuple[Int[Tensor, "draw pos"], Bool[Tensor, "draw pos"]]


@dataclass(frozen=True)
class NoisyDraws:
    """Noisy forms of the answer tokens of one block.

    Attributes:
        tokens: the noisy tokens.
        counted: tokens whose loss counts.
        shares: share of tokens that is noise, or was to be.
        weights: factor of each draw's loss in the bound, its probability included.
        times: time of each draw; None without a noise schedule.
    """

    tokens: Int[Tensor, "draw pos"]
    counted: Bool[Tensor, "draw pos"]
    shares: Float[Tensor, " draw"]
    weights: Float[Tensor, " draw"]
    times: Float[Tensor, " draw"] | None = None


class CountedTokens(NamedTuple):
    """The tokens of some noisy answers whose loss counts.

    Attributes:
        clean: the tokens of the answers.
        noisy: what stands in their places.
        times: the time of each; None if the losses do not depend on it.
    """

    clean: Int[Tensor, " token"]
    noisy: Int[Tensor, " token"]
    times: Float[Tensor, " token"] | None


class NoiseNumbers(NamedTuple):
    """The numbers that decide how each draw makes an answer noisy.

    Attributes:
        times: the time of each draw.
        chance: uniform numbers that decide whether a token changes.
        choice: uniform numbers that decide which token it becomes.
    """

    times: Float[Tensor, "draw 1"]
    chance: Float[Tensor, "draw pos"]
    choice: Float[Tensor, "draw pos"]


@dataclass(frozen=True)
class Noise(ABC):
    """The noise of a family, and its loss.

    Attributes:
        mask_id: the mask token; -1 if there is none.
    """

    mask_id: int
    only_masks: ClassVar[bool] = True
    """Whether the counted tokens are those that are masked."""

    @abstractmethod
    def draw(self, rule: DrawRule, prompt: tuple[int, ...], answer: Int[Tensor, " pos"], block: int) -> NoisyDraws:
        """Noisy forms of the tokens of a block.

        Raises:
            SettingError: the rule cannot be followed.
        """

    def read(self, draws: NoisyDraws) -> Float[Tensor, " draw"] | None:
        """The times of draws whose losses depend on them; None otherwise."""
        return draws.times

    def level(self, times: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        """What the network reads of the time."""
        return log_linear_sigma(times, KEPT)

    @abstractmethod
    def losses(self, logits: Logits, tokens: CountedTokens) -> Float[Tensor, " token"]:
        """The loss of each counted token."""


@dataclass(frozen=True)
class MaskNoise(Noise):
    """Masks of a model without a noise schedule."""

    def draw(self, rule: DrawRule, prompt: tuple[int, ...], answer: Int[Tensor, " pos"], block: int) -> NoisyDraws:
        masks = rule.draw(prompt, len(answer), block)
        tokens = answer.where(~masks.masked, self.mask_id)
        return NoisyDraws(tokens, masks.masked, masks.shares, masks.weights)

    def losses(self, logits: Logits, tokens: CountedTokens) -> Float[Tensor, " token"]:
        return cross_entropy(logits, tokens.clean, reduction="none")


@dataclass(frozen=True)
class TimedNoise(Noise):
    """Noise that grows with time.

    Attributes:
        timed: whether the network reads the time.
        interval: the first and the last time.
    """

    timed: bool
    interval: tuple[float, float] = (LEAST_TIME, 1.0)

    def draw(self, rule: DrawRule, prompt: tuple[int, ...], answer: Int[Tensor, " pos"], block: int) -> NoisyDraws:
        if rule.exact:
            return self.every(answer)
        start, chance, choice = rule.numbers(prompt, len(answer), block)
        least, most = self.interval
        times = least + (most - least) * start
        tokens, counted = self.noisy(answer, NoiseNumbers(times[:, None], chance, choice))
        return NoisyDraws(tokens, counted, self.share(times), self.weight(times) / rule.mc_num, times)

    def read(self, draws: NoisyDraws) -> Float[Tensor, " draw"] | None:
        return draws.times if self.timed else None

    def every(self, answer: Int[Tensor, " pos"]) -> NoisyDraws:
        """All noisy forms of a block, weighted by their probability.

        Raises:
            SettingError: there are too many.
        """
        raise SettingError(
            "exact=True enumerates the masks of networks that do not read a noise level; this one's losses change with "
            "the time, or its noise is random tokens. Leave exact out and raise mc_num."
        )

    @abstractmethod
    def share(self, times: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Share of tokens that is noise."""

    def weight(self, times: Float[Tensor, " draw"]) -> Float[Tensor, " draw"]:
        """Factor of the losses at each time; 1 if it is part of them."""
        return torch.ones_like(times)

    @abstractmethod
    def noisy(self, answer: Int[Tensor, " pos"], numbers: NoiseNumbers) -> NoisyTokens:
        """The noisy tokens, and those that count."""


def without(logits: Logits, mask_id: int) -> Logits:
    """`logits` with the mask excluded."""
    return logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -torch.inf)


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


def noise_of(model: Model) -> Noise:
    """The noise of the model's family, by `Family.bound`.

    Raises:
        SettingError: its family has no published bound.
    """
    mask_id, config = -1 if model.mask_token_id is None else model.mask_token_id, model.tree.hf.config
    match model.family_record.bound:
        case "masks":
            return MaskNoise(mask_id)
        case "subs":
            return Absorbing(mask_id, config.time_conditioning, kept=KEPT if model.checkpoint.blocks is None else 0.0)
        case "score entropy":
            return ScoreEntropy(mask_id, True, scaled=config.scale_by_sigma)
        case "uniform":
            return UniformNoise(mask_id, True, size=model.cfg.d_vocab)
        case "mixture":
            interval = (config.t_eps, 1 - config.t_eps)
            return MixedNoise(mask_id, True, interval, size=model.cfg.d_vocab, p_uniform=config.p_uniform)
    raise SettingError(
        f"{model.family} models have no likelihood here: their canvas holds random tokens instead of masks, each "
        f"pass depends on the logits of the one before, and neither a noise schedule nor a bound has been "
        f"published. Compare answers with sinklens evaluate."
    )
