"""Parts that samplers share, each with its settings: steps, equal blocks, guidance, truncated draws, the end of a row.

A part is a base class of samplers. It declares its settings once, and holds what a step does with them.

Pitfall: a canvas of proposals keeps its own tokens where nothing is proposed; only `where` says which are proposals.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Gt, Le, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.sampling import decisions
from sinklens.sampling.decisions import Truncation
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, NonNegative


@dataclass(frozen=True)
class Steps(Sampler):
    """A number of steps that the user chooses.

    Attributes:
        steps: denoising steps of the complete generation; default `gen_length`.
    """

    steps: Count = 0

    def derived(self) -> dict[str, Any]:
        return super().derived() | {"steps": self.steps or self.gen_length}


@dataclass(frozen=True)
class EqualBlocks(Steps):
    """Blocks of equal length, decoded from left to right with equally many steps each.

    Attributes:
        block_length: blocks of this length are decoded from left to right; default 32, or `gen_length` if 32 does not
            divide it.
    """

    block_length: Count = 0

    def derived(self) -> dict[str, Any]:
        default = 32 if self.gen_length % 32 == 0 else self.gen_length
        return super().derived() | {"block_length": self.block_length or default}

    def __post_init__(self) -> None:
        super().__post_init__()
        length, size = self.gen_length, self.block_length
        require(
            length % size == 0,
            f"block_length {size} does not divide gen_length {length}; choose one of {divisors(length)}.",
        )
        blocks = length // size
        require(
            self.steps % blocks == 0,
            f"steps {self.steps} cannot be divided among {blocks} blocks (gen_length {length} / block_length {size}); "
            f"give a multiple of {blocks}.",
        )

    @property
    def positions_per_block(self) -> int:
        return self.block_length

    @property
    def steps_per_block(self) -> int:
        """Steps of each block."""
        return self.steps * self.block_length // self.gen_length


@dataclass(frozen=True)
class StopAtEnd(Sampler):
    """Rows that end at their end-of-text token.

    Attributes:
        stop_at_eos: end a row when its answer holds an end-of-text token and everything before it is decided; masks
            after it become that token. The reference code decides them too.
    """

    stop_at_eos: bool = False


@dataclass(frozen=True)
class ByConfidence(Sampler):
    """Proposals that are chosen by their confidence.

    Attributes:
        confidence_dtype: precision of probabilities, of the confidences that follow from them, and of comparisons with
            thresholds: "float64", "float32", or "model", that of the model's logits. Most published scripts use
            "model"; in bfloat16 it makes many confidences equal.
    """

    confidence_dtype: Literal["float64", "float32", "model"] = "float64"

    def cast(self, state: State, logits: Float[Tensor, "masked *vocab"]) -> Float[Tensor, "masked *vocab"]:
        """`logits` in the dtype in which they are divided and truncated: float32, or the model's."""
        return logits.to(state.logits_dtype) if self.confidence_dtype == "model" else logits

    def softmax(self, logits: Float[Tensor, "masked vocab"]) -> Float[Tensor, "masked vocab"]:
        """The distribution of `cast` logits, in `confidence_dtype`."""
        return logits.softmax(dim=-1, dtype=self.dtype)

    def probability(
        self, logits: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        """The candidates' probabilities in the distribution of `cast` logits."""
        return decisions.probability_by_slices(logits, candidates, self.dtype)

    @property
    def dtype(self) -> torch.dtype | None:
        """The precision of probabilities; None for that of the logits."""
        return None if self.confidence_dtype == "model" else getattr(torch, self.confidence_dtype)


@dataclass(frozen=True)
class Guided(ByConfidence):
    """Tokens drawn by Gumbel noise under classifier-free guidance; the most confident, or random ones, are kept.

    Attributes:
        temperature: randomness of the proposed tokens; 0 takes the most likely. It scales Gumbel noise in float64.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 turns it off.
        remasking: which proposals stay masked: the least confident, or random ones.
    """

    temperature: NonNegative = 0.0
    cfg_scale: NonNegative = 0.0
    remasking: Literal["low_confidence", "random"] = "low_confidence"

    @property
    def guided(self) -> bool:
        return self.cfg_scale > 0

    def rehearse(self, logits: Float[Tensor, "masked vocab"]) -> None:
        noise = torch.empty_like(logits, dtype=torch.float64) if self.temperature > 0 else None
        candidates = decisions.gumbel_candidates(logits, self.temperature, noise)
        if self.remasking != "random":
            self.probability(logits, candidates)

    def propose(
        self,
        state: State,
        canvas: Int[Tensor, "batch pos"],
        where: Bool[Tensor, "batch pos"],
        logits: Float[Tensor, "masked vocab"],
    ) -> tuple[Int[Tensor, "batch pos"], Float[Tensor, "batch pos"]]:
        """The canvas with a token drawn at every True of `where`, and the confidence of each."""
        noise = state.noise.uniform(where, logits.shape[-1], dtype=torch.float64) if self.temperature > 0 else None
        candidates = decisions.gumbel_candidates(logits, self.temperature, noise)
        proposed, candidates = state.propose(where, candidates, canvas)
        if self.remasking == "random":
            confidence = state.noise.uniform(where, dtype=torch.float32).double()
        else:
            confidence = self.confidence(state, logits, candidates)
        return proposed, state.spread_confidence(where, confidence)

    def confidence(
        self, state: State, logits: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        """The confidence of proposed tokens: their probability."""
        return self.probability(self.cast(state, logits), candidates)


@dataclass(frozen=True)
class Nucleus(Sampler):
    """Tokens drawn from the nucleus of a distribution.

    Attributes:
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: propose from the smallest set of tokens with this total probability; None turns it off.
    """

    TOP_P_FIRST: ClassVar[bool] = False
    """Whether `top_p` applies to all tokens and then `top_k`; otherwise `top_p` to those that `top_k` keeps."""

    TRUNCATES_GREEDY: ClassVar[bool] = False
    """Whether the published sampler truncates at temperature 0 too, where this changes confidences but no token."""

    temperature: NonNegative = 0.0
    top_p: Annotated[float, Gt(0), Le(1)] | None = None

    @property
    def truncation(self) -> Truncation:
        """What a step applies to its logits."""
        if self.temperature == 0 and not self.TRUNCATES_GREEDY:
            return Truncation()
        return Truncation(self.temperature, self.top_p, self.most_likely, self.TOP_P_FIRST)

    @property
    def most_likely(self) -> int | None:
        """How many of the most likely tokens are kept; None for all."""
        return None


@dataclass(frozen=True)
class Truncated(Nucleus):
    """Tokens drawn from a distribution truncated by `top_p` and `top_k`; by `top_k` first, unless the sampler says so.

    Attributes:
        top_k: propose from this many most likely tokens; None turns it off.
    """

    top_k: Count | None = None

    @property
    def most_likely(self) -> int | None:
        return self.top_k


@dataclass(frozen=True)
class Drawn(Nucleus, ByConfidence):
    """Proposals drawn from a truncated distribution."""

    def rehearse(self, logits: Float[Tensor, "masked vocab"]) -> None:
        self._rehearsed(logits)

    def _rehearsed(self, logits: Float[Tensor, "masked vocab"]) -> tuple[Tensor, Tensor]:
        """Probabilities and tokens, as `draw` computes them."""
        probs = self.softmax(decisions.truncate(logits, self.truncation))
        noise = logits.new_empty(len(logits), dtype=torch.float64) if self.temperature > 0 else None
        return probs, decisions.categorical_candidates(probs, noise)

    def draw(
        self,
        state: State,
        canvas: Int[Tensor, "batch pos"],
        where: Bool[Tensor, "batch pos"],
        greedy: Bool[Tensor, "batch pos"] | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Float[Tensor, "batch pos"]]:
        """The canvas with a token drawn at every True of `where`, and the confidence of each; see `confidence`.

        At temperature 0 the tokens are the most likely ones. The values pass ``denoise.hook_logits``,
        ``denoise.hook_candidates`` and ``denoise.hook_confidence``.

        Args:
            greedy: positions that get the most likely token of the model's own distribution whatever the temperature.
        """
        logits = self.cast(state, state.logits(canvas, where))
        probs = self.softmax(decisions.truncate(logits, self.truncation))
        noise = state.noise.uniform(where, dtype=torch.float64) if self.temperature > 0 else None
        drawn = decisions.categorical_candidates(probs, noise)
        if greedy is not None:
            best = greedy[where]
            probs[best] = self.softmax(logits[best])
            drawn[best] = logits[best].argmax(dim=-1)
        proposed, candidates = state.propose(where, drawn, canvas)
        return proposed, state.spread_confidence(where, self.confidence(state, logits, probs, candidates))

    def confidence(
        self,
        state: State,
        logits: Float[Tensor, "masked vocab"],
        probs: Float[Tensor, "masked vocab"],
        candidates: Int[Tensor, " masked"],
    ) -> Float[Tensor, " masked"]:
        """The confidence of drawn tokens: by default their probability.

        Args:
            logits: before temperature and truncation.
            probs: the distribution that the tokens were drawn from, in `confidence_dtype`.
            candidates: the tokens.
        """
        return decisions.probability(probs, candidates)


@dataclass(frozen=True)
class DreamRule(Drawn, Truncated, Steps):
    """What Dream's samplers share: a confidence that orders commits, and a time that falls from 1 to `eps`.

    Attributes:
        alg: the confidence that orders commits: "origin" commits at random, "maskgit_plus" by probability,
            "topk_margin" by the margin over the second most likely token, "entropy" by negative entropy.
        eps: time at the end of the schedule, above 0.
    """

    TOP_P_FIRST: ClassVar = True
    TRUNCATES_GREEDY: ClassVar = True
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy", "p2"] = "entropy"
    eps: Annotated[float, Gt(0), Lt(1)] = 1e-3

    def rehearse(self, logits: Float[Tensor, "masked vocab"]) -> None:
        decisions.dream_confidence(self.alg, *self._rehearsed(logits))

    def confidence(self, state: State, logits: Tensor, probs: Tensor, candidates: Tensor) -> Float[Tensor, " masked"]:
        """The confidence by `alg`."""
        return decisions.dream_confidence(self.alg, probs, candidates)

    def times(self, steps: int) -> Float[Tensor, " time"]:
        """`steps` + 1 times from 1 down to `eps`, in float32 as in the reference."""
        return torch.linspace(1, self.eps, steps + 1)


def check_threshold(alg: str, threshold: float | None) -> None:
    """Check that a threshold in the unit of Dream's confidence `alg` can be reached."""
    require(
        threshold is None or alg != "entropy" or threshold <= 0,
        f"alg 'entropy' compares negative entropies, at most 0, so no proposal reaches threshold {threshold}; "
        f"choose alg='maskgit_plus' for a threshold on the probability, or give one in nats, such as -0.1.",
    )


def multiples(number: int, size: int) -> str:
    """The multiples of `size` next to a number, in words; 0 is none."""
    below, above = number // size * size, -(-number // size) * size
    return f"{below} or {above}" if below else str(above)


def divisors(number: int) -> str:
    """The divisors of a number, in words."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ", ".join(map(str, sorted({*small, *(number // d for d in small)})))
