"""What makes an answer noisy, and what every token of the noisy answer adds to the bound.

*Masks.* Models without a noise schedule count masks. Both random rules estimate the same bound without bias. For an
answer x of L tokens, a mask M of k of them and the loss ℓ(M) = −Σ_{i ∈ M} log p(x_i | x with M masked), the bound is

    −log p(x) ≤ Σ_M ℓ(M) / (k · C(L, k)) = E_k [ (L / k) · E_{M of size k} ℓ(M) ],   k uniform on 1 … L

*Count* draws k and then M (Nie et al., 2502.09992, eq. 6; LLaDA's eval_llada.py). A batch of b draws shares one random
start: their k are spread over 1 … L in steps of L / b. *Rate* draws t in (0, 1] and masks each token with probability
t, with weight 1 / t; the t of a batch are spread in the same manner (Dream's and SMDM's scripts). The number of
masks varies even at the same t.

A draw depends on the seed, the prompt, the number of answer tokens, the block and its own index, and on nothing else:
every condition, and every model with the same tokenizer, gets the same masks, and so do answers of equal length.

Deviation: LLaDA's script rounds k half to even, so where L · i / b ends in ½ (odd L, even b) some numbers of masked
tokens are never drawn and the script's estimate is biased. Here k is rounded half up, which is uniform.

*Times.* With a noise schedule, a clean answer x, a time t and the noisy answer z, a bound has the form

    −log p(x) ≤ E_t E_z [ Σ_i weight(t) · loss_i(x, z, t) ]

Times are drawn uniformly between two times, as the authors' evaluations do. The network may read t or a noise level σ:

- *subs* (MDLM, Sahoo et al., 2406.07524; BD3-LM, Arriola et al., 2503.09573): tokens are masked with probability 1 −
  e^−σ; the loss of a masked token is −log p(x_i) with the mask excluded from p, and the weight is 1 / t.
- *score entropy* (SEDD, Lou et al., 2310.16834): masks as MDLM's. With s the scores times expm1(σ), the loss is
  −log s(x_i) + Σ_y s(y) − 1, which is −log s(x_i) where the scores sum to 1, and the weight is 1 / t.
- *uniform* (Duo, Sahoo et al., 2506.10892): a token is drawn from the vocabulary with probability 1 − α(t).
- *mixture* (GIDD, von Rütte et al., 2503.04482): masks and random tokens; a divergence weighted by what z holds.

With *uniform* and *mixture*, every token counts, changed or not, and the weight is part of the loss.

The published evaluations score complete texts, without prompts. Here a prompt stays as it is, and the time is that of
the answer alone, as in SEDD's sampler with fixed tokens. An empty prompt gives the published bound of a text.

Times of a batch are spread from one random start, as in GIDD's code. MDLM, BD3-LM and Duo draw one time per stratum and
SEDD independent ones, which have the same mean.

Pitfall: a mean over the published interval stands for the integral from 0 to 1. GIDD's random tokens vanish only as
√t, so what its interval leaves out can matter: 2 % of the bound of a text of two tokens in the tests.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklens.errors import SettingError, require
from sinklens.families.gidd import noise_shares
from sinklens.model import Model
from sinklens.sampling.decisions import log_linear_sigma
from sinklens.utils.arguments import Count, Seed, check_arguments

Masking = Literal["count", "rate"]
LEAST_RATE = 1e-3  # of Dream's and SMDM's scripts
MOST_ENUMERATED = 8
LEAST_TIME = 1e-3  # of MDLM's, BD3-LM's, SEDD's and Duo's evaluations
KEPT = 1e-3  # share of tokens that is clean at time 1
HIGHEST_SIGMA = -math.log(KEPT)  # 6.9078, which BD3-LM's noise levels do not exceed
Masks = tuple[Bool[Tensor, "draw pos"], Float[Tensor, " draw"], Float[Tensor, " draw"]]
"""Masked tokens; the share of them, or what it was to be under "rate"; and the factor of each draw's loss."""
Logits = Float[Tensor, "token vocab"]
Tokens = Int[Tensor, " token"]
TokenTimes = Float[Tensor, " token"] | None


@dataclass(frozen=True)
class DrawRule:
    """How masks are drawn.

    Attributes:
        mc_num: number of draws per pair, and per block of a block-causal model.
        draws_per_start: draws that share one random start; it divides `mc_num`. Starts are independent, so standard
            errors need at least two. LLaDA's scripts call it ``batch_size``; passes may have other numbers of rows.
        masking: "count" draws how many tokens are masked, as LLaDA does; "rate" draws the probability that each is
            masked, as Dream does. Families with a noise schedule draw times instead.
        exact: enumerate all masks instead, which needs at most 8 answer tokens, or 8 in each block.
        seed: of the draws.

    Raises:
        SettingError: a value is out of range.
    """

    mc_num: Count = 128
    draws_per_start: Count = 16
    masking: Masking = "count"
    exact: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_arguments(self)
        mc_num, draws = self.mc_num, self.draws_per_start
        fitting = (n for n in range(min(draws, mc_num // 2), 0, -1) if mc_num % n == 0)
        require(
            not mc_num % draws,
            f"mc_num {mc_num} is not a multiple of draws_per_start {draws}, the draws that share one random "
            f"start; pass draws_per_start={next(fitting, 1)}.",
        )

    def masks(self, prompt: Sequence[int], length: int, block: int = 0) -> Masks:
        """The masks of the `length` answer tokens of a block.

        Raises:
            SettingError: `exact`, and the block has too many tokens.
        """
        if self.exact:
            return every_mask(length)
        drawn = by_count if self.masking == "count" else by_rate
        parts = [drawn(length, self.draws_per_start, generator) for generator in self.generators(prompt, length, block)]
        masked, shares = (torch.cat(part) for part in zip(*parts, strict=True))
        return masked, shares, 1 / (shares * self.mc_num)

    def generators(self, prompt: Sequence[int], length: int, block: int) -> list[torch.Generator]:
        """The random numbers of each batch of draws."""
        numbers = range(self.mc_num // self.draws_per_start)
        return [generator_of(self.seed, prompt, length, block, number) for number in numbers]


def generator_of(seed: int, prompt: Sequence[int], length: int, block: int, batch: int) -> torch.Generator:
    """The random numbers of one batch of draws."""
    digest = hashlib.sha256(repr((seed, tuple(prompt), length, block, batch)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def by_count(
    length: int, batch: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "draw pos"], Float[Tensor, " draw"]]:
    """Masks and masked shares of one batch, as ``_forward_process`` of LLaDA's eval_llada.py draws them."""
    start = int(torch.randint(1, length + 1, (), generator=generator))
    spread = start + torch.arange(batch, dtype=torch.float64) * length / batch
    counts = ((spread + 0.5).floor().long() - 1) % length + 1
    first = torch.arange(length) < counts[:, None]
    return torch.stack([row[torch.randperm(length, generator=generator)] for row in first]), counts.double() / length


def by_rate(
    length: int, batch: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "draw pos"], Float[Tensor, " draw"]]:
    """Masks and rates of one batch, as ``_forward_process`` of Dream's and SMDM's scripts draws them."""
    rates = (1 - LEAST_RATE) * ((torch.rand(1, generator=generator) + torch.arange(batch) / batch) % 1) + LEAST_RATE
    return torch.rand(batch, length, generator=generator) < rates[:, None], rates.double()


def every_mask(length: int) -> Masks:
    """All 2^L − 1 masks of `length` tokens, each with the weight 1 / (k · C(L, k)).

    Raises:
        SettingError: there are too many.
    """
    require(
        length <= MOST_ENUMERATED,
        f"exact=True enumerates every mask, for at most {MOST_ENUMERATED} tokens (255 masks); got {length}. Leave "
        f"it out to draw mc_num masks.",
    )
    chosen = [places for count in range(1, length + 1) for places in combinations(range(length), count)]
    masked = torch.zeros(len(chosen), length, dtype=torch.bool)
    for row, places in enumerate(chosen):
        masked[row, list(places)] = True
    counts = masked.sum(dim=1).tolist()
    weights = torch.tensor([1 / (count * math.comb(length, count)) for count in counts], dtype=torch.float64)
    return masked, torch.tensor(counts, dtype=torch.float64) / length, weights


class NoisyDraws(NamedTuple):
    """Noisy forms of the answer tokens of one block.

    Attributes:
        tokens: the noisy tokens.
        counted: tokens whose loss counts.
        shares: share of tokens that are noise, or were meant to be.
        weights: factor of each draw's loss in the bound, its probability included.
        times: time of each draw; None without a noise schedule.
    """

    tokens: Int[Tensor, "draw pos"]
    counted: Bool[Tensor, "draw pos"]
    shares: Float[Tensor, " draw"]
    weights: Float[Tensor, " draw"]
    times: Float[Tensor, " draw"] | None = None


@dataclass(frozen=True)
class MaskNoise:
    """Masks of a model without a noise schedule.

    Attributes:
        mask_id: the mask token; -1 if there is none.
        timed: whether the losses depend on the time of a draw, and the network reads it.
    """

    mask_id: int
    timed: bool = False

    def draw(self, rule: DrawRule, prompt: tuple[int, ...], answer: Int[Tensor, " pos"], block: int) -> NoisyDraws:
        """Noisy forms of the tokens of a block.

        Raises:
            SettingError: the rule cannot be followed.
        """
        masked, shares, weights = rule.masks(prompt, len(answer), block)
        return NoisyDraws(answer.where(~masked, self.mask_id), masked, shares, weights)

    def losses(self, logits: Logits, clean: Tokens, noisy: Tokens, times: TokenTimes) -> Float[Tensor, " token"]:
        """The loss of each counted token of `clean`, of which the network sees `noisy`."""
        return cross_entropy(logits, clean, reduction="none")


@dataclass(frozen=True)
class TimedNoise(MaskNoise, ABC):
    """Noise that grows with time.

    Attributes:
        interval: the first and the last time.
        kept: share of tokens that is clean at time 1.
    """

    interval: tuple[float, float] = (LEAST_TIME, 1.0)
    kept: float = KEPT

    def draw(self, rule: DrawRule, prompt: tuple[int, ...], answer: Int[Tensor, " pos"], block: int) -> NoisyDraws:
        require(
            not rule.exact,
            "exact=True enumerates the masks of models without a noise schedule. Leave exact out and raise mc_num.",
        )
        spread, parts = torch.arange(rule.draws_per_start) / rule.draws_per_start, []
        for generator in rule.generators(prompt, len(answer), block):
            start = (torch.rand(1, generator=generator, dtype=torch.float64) + spread) % 1
            parts.append(
                (start, *torch.rand((2, rule.draws_per_start, len(answer)), generator=generator, dtype=torch.float64))
            )
        start, chance, choice = (torch.cat(part) for part in zip(*parts, strict=True))
        least, most = self.interval
        times = least + (most - least) * start
        tokens, counted = self.noisy(answer, times[:, None], chance, choice)
        return NoisyDraws(tokens, counted, self.share(times), self.weight(times) / rule.mc_num, times)

    def share(self, times: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Share of tokens that is noise."""
        return (1 - self.kept) * times

    @abstractmethod
    def noisy(
        self,
        answer: Int[Tensor, " pos"],
        times: Float[Tensor, "draw 1"],
        chance: Float[Tensor, "draw pos"],
        choice: Float[Tensor, "draw pos"],
    ) -> tuple[Int[Tensor, "draw pos"], Bool[Tensor, "draw pos"]]:
        """The noisy tokens, and which of them count.

        Args:
            answer: the clean tokens.
            times: the time of each draw.
            chance: uniform numbers that decide whether a token changes.
            choice: uniform numbers that decide which token it becomes.
        """

    def weight(self, times: Float[Tensor, " draw"]) -> Float[Tensor, " draw"]:
        """Factor of the losses at each time; 1 if it is part of them."""
        return torch.ones_like(times)

    def level(self, times: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The time as the network reads it."""
        return log_linear_sigma(times, self.kept).clamp(max=HIGHEST_SIGMA)


def without(logits: Logits, mask_id: int) -> Logits:
    """`logits` with the mask excluded."""
    return logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -torch.inf)


@dataclass(frozen=True)
class Absorbing(TimedNoise):
    """MDLM's and SEDD's masks; BD3-LM's with `kept` 0."""

    def weight(self, times: Float[Tensor, " draw"]) -> Float[Tensor, " draw"]:
        return 1 / times

    def noisy(
        self,
        answer: Int[Tensor, " pos"],
        times: Float[Tensor, "draw 1"],
        chance: Float[Tensor, "draw pos"],
        choice: Float[Tensor, "draw pos"],
    ) -> tuple[Int[Tensor, "draw pos"], Bool[Tensor, "draw pos"]]:
        masked = chance < self.share(times)
        return answer.where(~masked, self.mask_id), masked

    def losses(self, logits: Logits, clean: Tokens, noisy: Tokens, times: TokenTimes) -> Float[Tensor, " token"]:
        return cross_entropy(without(logits, self.mask_id), clean, reduction="none")


@dataclass(frozen=True)
class ScoreEntropy(Absorbing):
    """SEDD's masks and its score entropy.

    Attributes:
        scaled: whether the network's scores are still to be divided by expm1(σ) (V − 1).
    """

    scaled: bool = True

    def losses(self, logits: Logits, clean: Tokens, noisy: Tokens, times: TokenTimes) -> Float[Tensor, " token"]:
        assert times is not None
        ratio = -math.log(logits.shape[-1] - 1) if self.scaled else self.level(times).expm1().log()[:, None]
        scores = without(logits + ratio, self.mask_id)
        return scores.exp().sum(dim=-1) - 1 - scores.gather(-1, clean[:, None])[:, 0]


@dataclass(frozen=True)
class UniformNoise(TimedNoise):
    """Duo's random tokens.

    With V tokens, x̄ = V α onehot(x) + 1 − α, x̄_p the same of the predicted probabilities, and z the noisy token, the
    loss is (−α' / (V α)) [Σ_y (x̄(y) / x̄(z)) log(x̄_p(z) x̄(y) / (x̄_p(y) x̄(z))) − V / x̄(z) + V / x̄_p(z)].

    Attributes:
        size: number of tokens in the vocabulary.
    """

    size: int = 0

    def noisy(
        self,
        answer: Int[Tensor, " pos"],
        times: Float[Tensor, "draw 1"],
        chance: Float[Tensor, "draw pos"],
        choice: Float[Tensor, "draw pos"],
    ) -> tuple[Int[Tensor, "draw pos"], Bool[Tensor, "draw pos"]]:
        drawn = chance < self.share(times)
        return torch.where(drawn, (choice * self.size).long(), answer), torch.ones_like(drawn)

    def losses(self, logits: Logits, clean: Tokens, noisy: Tokens, times: TokenTimes) -> Float[Tensor, " token"]:
        assert times is not None
        share = self.share(times).to(logits)[:, None]
        size, alpha = logits.shape[-1], 1 - share
        predicted = size * alpha * logits.softmax(dim=-1) + share
        true = share.expand_as(logits).scatter_add(-1, clean[:, None], size * alpha)
        true_here, predicted_here = (one.gather(-1, noisy[:, None]) for one in (true, predicted))
        ratio = true / true_here
        divergence = (ratio * (ratio / (predicted / predicted_here)).log()).sum(dim=-1, keepdim=True)
        part = (1 - self.kept) / (size * alpha)
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

    size: int = 0
    p_uniform: float = 0.0

    def level(self, times: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
        return times

    def share(self, times: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 - noise_shares(times, self.p_uniform).clean

    def noisy(
        self,
        answer: Int[Tensor, " pos"],
        times: Float[Tensor, "draw 1"],
        chance: Float[Tensor, "draw pos"],
        choice: Float[Tensor, "draw pos"],
    ) -> tuple[Int[Tensor, "draw pos"], Bool[Tensor, "draw pos"]]:
        shares = noise_shares(times, self.p_uniform)
        token = (choice * (self.size - 1)).long()
        token = token + (token >= self.mask_id)
        drawn = torch.where(chance < shares.mask + shares.random, token, answer)
        return torch.where(chance < shares.mask, self.mask_id, drawn), torch.ones_like(drawn, dtype=torch.bool)

    def losses(self, logits: Logits, clean: Tokens, noisy: Tokens, times: TokenTimes) -> Float[Tensor, " token"]:
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


def noise_of(model: Model) -> MaskNoise:
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
            return MixedNoise(
                mask_id, True, (config.t_eps, 1 - config.t_eps), size=model.cfg.d_vocab, p_uniform=config.p_uniform
            )
    raise SettingError(
        f"{model.family} models have no likelihood here: their canvas holds random tokens instead of masks, each "
        f"pass depends on the logits of the one before, and neither a noise schedule nor a bound has been "
        f"published. Compare answers with sinklens evaluate."
    )
