"""How each family makes an answer noisy, and what every token of the noisy answer adds to the bound.

For a clean answer x, a time t and the noisy answer z, every bound has the form

    −log p(x) ≤ E_t E_z [ Σ_i weight(t) · loss_i(x, z, t) ]

Masked models without a noise schedule count masks instead of times (`MaskNoise`; draws.py). The others (absorbing.py,
random_tokens.py) draw t uniformly between two times, as their authors' evaluations do, and read it or a noise level σ:

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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklens.errors import SettingError
from sinklens.experiments.nll.draws import DrawRule
from sinklens.sampling.decisions import log_linear_sigma

LEAST_TIME = 1e-3  # of MDLM's, BD3-LM's, SEDD's and Duo's evaluations
KEPT = 1e-3  # share of tokens that is clean at time 1
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
