"""Settings of the samplers of RND1, Open-dCoder and Fast-dLLM's Dream, whose logits predict the next position.

Pitfall: the published samplers of RND1 and Open-dCoder default to many more steps than these models need answer tokens
(256 and 512); here the default is one step per token.
"""

from dataclasses import dataclass
from typing import ClassVar, get_args

from sinklens.sampling.settings import (
    Algorithm,
    Closing,
    ConfidenceSettings,
    DrawSettings,
    EqualBlocks,
    check_threshold,
    check_truncation,
    is_finite,
    require,
    require_integer,
    require_nonnegative,
)


@dataclass(frozen=True)
class Rnd1Settings(DrawSettings):
    """RND1's sampler (RadicalNumerics/RND1, rnd/sampling.py).

    Attributes:
        gen_length: number of answer positions, all masked at the start; `closing` comes after them.
        steps: denoising steps; default `gen_length`. After step i of N, ⌊m·(N − 1 − i)/N⌋ of the m masks remain,
            where the quotient is rounded to float32 as in the published code.
        temperature: divides the logits, including those that determine the order of commits; above 0.
        greedy: take the most likely token instead of a random one.
        top_p: propose from the smallest set of tokens with this total probability, among those that `top_k` keeps; None
            turns it off.
        top_k: propose from this many most likely tokens; None turns it off.
        eb_gamma: in every step but the last, commit tokens in order of falling probability while the sum of their
            entropies, minus the largest, is at most this (in nats), and at least one. None commits the tokens of lowest
            entropy by the schedule.
        closing: the token that follows the answer: "pad" as in the published code, "eos", or "none".
    """

    gen_length: int = 128
    steps: int = 0
    temperature: float = 1.0
    greedy: bool = True
    top_p: float | None = None
    top_k: int | None = None
    eb_gamma: float | None = None
    closing: Closing = "pad"

    def __post_init__(self) -> None:
        require_integer("gen_length", self.gen_length)
        object.__setattr__(self, "steps", self.steps or self.gen_length)
        require_integer("steps", self.steps)
        check_truncation(self.temperature, self.top_p, self.top_k)
        require(self.temperature > 0, "temperature must be above 0; pass greedy=True for the most likely tokens.")
        if self.eb_gamma is not None:
            require_nonnegative("eb_gamma", self.eb_gamma)
        allowed = get_args(Closing)
        require(self.closing in allowed, f"closing must be one of {', '.join(allowed)}; got {self.closing!r}.")


@dataclass(frozen=True)
class OpenDcoderSettings(ConfidenceSettings):
    """Open-dCoder's sampler (pengzhangzhi/Open-dLLM, `_mdm_sample`).

    `top_p` is applied to all tokens, then `top_k` to those that are left.

    Attributes:
        gen_length: number of answer positions, all masked at the start.
        steps: denoising steps; default `gen_length`. A run ends early when no position is masked.
        alg: "entropy", "maskgit_plus" and "topk_margin" commit the most confident masks, by negative entropy,
            probability or margin over the second most likely token. "p2" judges every answer position again at each
            step and masks the least probable ones, also tokens that were committed (path planning; 2502.03540).
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: propose from the smallest set of tokens with this total probability; None turns it off.
        top_k: propose from this many most likely tokens; None turns it off.
        alg_temp: temperature for choosing positions; None or 0 takes the most confident. Not with "p2".
        eps: time at the end of the schedule, above 0. "p2" does not use it.
    """

    ALGS: ClassVar = ("entropy", "maskgit_plus", "topk_margin", "p2")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.alg != "p2" or not self.alg_temp,
            "alg 'p2' chooses positions by probability alone; leave alg_temp out or choose another alg.",
        )


@dataclass(frozen=True)
class DreamBlockSettings(EqualBlocks, DrawSettings):
    """Fast-dLLM's sampler for Dream (NVlabs/Fast-dLLM, v1/dream), for use with or without a cache policy.

    `top_p` is applied to all tokens, then `top_k` to those that are left.

    Attributes:
        gen_length: number of answer positions, all masked at the start.
        steps: denoising steps of the complete generation, summed over blocks; default `gen_length`. With a threshold a
            block ends as soon as it is filled. The first step of a block decides its first token alone, so with one
            step per block the other positions stay masked, as in Fast-dLLM.
        block_length: blocks of this length are decoded from left to right; default 32, or `gen_length` if 32 does not
            divide it.
        alg: the confidence that orders commits: "entropy" (negative entropy), "maskgit_plus" (probability), or
            "topk_margin" (margin over the second most likely token).
        threshold: commit every proposal of the block of at least this confidence, in the unit of `alg`, and at least
            the most confident one, instead of the schedule's share; None follows the schedule. Fast-dLLM's
            "confidence_threshold" is `alg` "maskgit_plus" with a threshold.
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: propose from the smallest set of tokens with this total probability; None turns it off.
        top_k: propose from this many most likely tokens; None turns it off.
        eps: time at the end of a block's schedule, above 0.
    """

    TOP_P_FIRST: ClassVar = True
    TRUNCATES_GREEDY: ClassVar = True
    gen_length: int = 128
    steps: int = 0
    block_length: int = 0
    alg: Algorithm = "entropy"
    threshold: float | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    eps: float = 1e-3

    def __post_init__(self) -> None:
        self._divide()
        require(
            self.threshold is None or self.steps == self.gen_length,
            "with a threshold, blocks end when they are filled; leave steps out.",
        )
        allowed = ("entropy", "maskgit_plus", "topk_margin")
        require(self.alg in allowed, f"alg must be one of {', '.join(allowed)}; got {self.alg!r}.")
        check_threshold(self.alg, self.threshold)
        require(is_finite(self.eps) and 0 < self.eps < 1, f"eps must be between 0 and 1; got {self.eps}.")
        check_truncation(self.temperature, self.top_p, self.top_k)
