"""Which tokens of an answer are masked: at random, as the published evaluations draw them, or all masks in turn.

Both random rules estimate the same bound without bias. For an answer x of L tokens, a mask M of k of them and the loss
ℓ(M) = −Σ_{i ∈ M} log p(x_i | x with M masked), it is

    −log p(x) ≤ Σ_M ℓ(M) / (k · C(L, k)) = E_k [ (L / k) · E_{M of size k} ℓ(M) ],   k uniform on 1 … L

*Count* draws k and then M (Nie et al., 2502.09992, eq. 6; LLaDA's eval_llada.py). A batch of b draws shares one random
start: their k are spread over 1 … L in steps of L / b. *Rate* draws t in (0, 1] and masks each token with probability
t, with weight 1 / t; the t of a batch are spread in the same manner (Dream's and SMDM's scripts). Its masks vary more
at the same t.

A draw depends on the seed, the prompt, the number of answer tokens, the block and its own index, and on nothing else:
every condition, and every model with the same tokenizer, gets the same masks, and so do answers of equal length.

Deviation: LLaDA's script rounds k half to even, so where L · i / b ends in ½ (odd L, even b) some numbers of masked
tokens are never drawn and the script's estimate is biased. Here k is rounded half up, which is uniform.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.utils.arguments import Count, Seed, check_arguments

Masking = Literal["count", "rate"]
LEAST_RATE = 1e-3  # of Dream's and SMDM's scripts
MOST_ENUMERATED = 8


@dataclass(frozen=True)
class MaskDraws:
    """Masks of the answer tokens of one block.

    Attributes:
        masked: the masked tokens.
        shares: share of tokens that is masked, or was to be masked under "rate".
        weights: factor of each draw's loss in the bound: its probability divided by its share.
    """

    masked: Bool[Tensor, "draw pos"]
    shares: Float[Tensor, " draw"]
    weights: Float[Tensor, " draw"]


@dataclass(frozen=True)
class DrawRule:
    """How masks are drawn.

    Attributes:
        mc_num: number of draws per pair, and per block of a block-causal model.
        batch: draws that share one random start; it divides `mc_num`. Batches are independent, so standard errors need
            at least two. LLaDA's scripts call it ``batch_size``; passes may have other numbers of rows.
        masking: "count" draws how many tokens are masked, as LLaDA; "rate" the probability of each, as Dream. Families
            with a noise schedule draw times instead.
        exact: enumerate all masks instead, which needs at most 8 answer tokens, or 8 in each block.
        seed: of the draws.

    Raises:
        SettingError: a value is out of range.
    """

    mc_num: Count = 128
    batch: Count = 16
    masking: Masking = "count"
    exact: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.mc_num % self.batch:
            raise SettingError(
                f"mc_num {self.mc_num} is not a multiple of batch {self.batch}, the draws that share one random start; "
                f"pass batch={next(n for n in range(min(self.batch, self.mc_num), 0, -1) if self.mc_num % n == 0)}."
            )

    def draw(self, prompt: Sequence[int], length: int, block: int = 0) -> MaskDraws:
        """The masks of the `length` answer tokens of a block.

        Raises:
            SettingError: `exact`, and the block has too many tokens.
        """
        if self.exact:
            return every_mask(length)
        drawn = by_count if self.masking == "count" else by_rate
        parts = [
            drawn(length, self.batch, generator_of(self.seed, prompt, length, block, number))
            for number in range(self.mc_num // self.batch)
        ]
        masked, shares = (torch.cat(part) for part in zip(*parts, strict=True))
        return MaskDraws(masked, shares, 1 / (shares * self.mc_num))

    def numbers(
        self, prompt: Sequence[int], length: int, block: int = 0
    ) -> tuple[Float[Tensor, " draw"], Float[Tensor, "draw pos"], Float[Tensor, "draw pos"]]:
        """For noise schedules: where each draw's time lies in its interval, and two uniform numbers for each token."""
        parts = []
        for number in range(self.mc_num // self.batch):
            generator = generator_of(self.seed, prompt, length, block, number)
            start = (
                torch.rand(1, generator=generator, dtype=torch.float64) + torch.arange(self.batch) / self.batch
            ) % 1
            parts.append((start, *torch.rand(2, self.batch, length, generator=generator, dtype=torch.float64)))
        start, chance, choice = (torch.cat(part) for part in zip(*parts, strict=True))
        return start, chance, choice


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
    masked = torch.stack([row[torch.randperm(length, generator=generator)] for row in first])
    return masked, counts.double() / length


def by_rate(
    length: int, batch: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "draw pos"], Float[Tensor, " draw"]]:
    """Masks and rates of one batch, as ``_forward_process`` of Dream's and SMDM's scripts draws them."""
    start = torch.rand(1, generator=generator)
    rates = (1 - LEAST_RATE) * ((start + torch.arange(batch) / batch) % 1) + LEAST_RATE
    return torch.rand(batch, length, generator=generator) < rates[:, None], rates.double()


def every_mask(length: int) -> MaskDraws:
    """All 2^L − 1 masks of `length` tokens, each with the weight 1 / (k · C(L, k)).

    Raises:
        SettingError: there are too many.
    """
    if length > MOST_ENUMERATED:
        raise SettingError(
            f"exact=True enumerates every mask, for at most {MOST_ENUMERATED} tokens (255 masks); got {length}. Leave "
            f"it out to draw mc_num masks."
        )
    chosen = [places for count in range(1, length + 1) for places in combinations(range(length), count)]
    masked = torch.zeros(len(chosen), length, dtype=torch.bool)
    for row, places in enumerate(chosen):
        masked[row, list(places)] = True
    counts = masked.sum(dim=1).tolist()
    weights = torch.tensor([1 / (count * comb(length, count)) for count in counts], dtype=torch.float64)
    return MaskDraws(masked, torch.tensor(counts, dtype=torch.float64) / length, weights)
