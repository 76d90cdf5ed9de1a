"""Sampler settings: one frozen dataclass per sampler, validated on creation.

A setting that is left out takes the checkpoint's default, or else the sampler's. A setting that the model's sampler
does not have is an error and never ignored: otherwise ``alg`` given to LLaDA would seem to have had an effect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict, get_args

from sinklens.errors import SettingError

Remasking = Literal["low_confidence", "random"]
Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "p2"]
Closing = Literal["pad", "eos", "none"]
Strategy = Literal["sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"]
ConfidenceOf = Literal["draw", "model"]

SHARE = {"range": (0, 1)}  # metadata of a setting that is a probability


class Settings(TypedDict, total=False):
    """All sampler settings, for type checkers; which ones apply depends on the sampler."""

    gen_length: int
    steps: int
    block_length: int
    temperature: float
    cfg_scale: float
    remasking: Remasking
    threshold: float
    factor: float
    by_quota: bool
    tokens_per_step: int
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    stop_at_eos: bool
    alg: Algorithm
    alg_temp: float
    top_p: float
    top_k: int
    eps: float
    use_cache: bool
    denoising_steps: int
    remasking_strategy: Strategy
    eb_threshold: float
    confidence_of: ConfidenceOf
    stop: bool
    right_shift_logits: bool
    small_block_size: int
    use_block_cache: bool
    minimal_topk: int
    eos_early_stop: bool
    editing_threshold: float
    max_post_steps: int
    num_to_transfer: int
    greedy: bool
    eb_gamma: float
    closing: Closing
    canvas_length: int
    max_denoising_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float
    pad_token_id: int


class RunSettings(Settings, total=False):
    """The settings of a run: those of its sampler, those that only Python can give, and the sampler."""

    sampler: str
    start_canvas: Any


@dataclass(frozen=True)
class SamplerSettings:
    """Base class of the settings of a sampler: a frozen dataclass that is validated on creation.

    Attributes:
        gen_length: number of answer positions.
        steps: largest number of steps of a run.
    """

    if TYPE_CHECKING:  # fields or properties of the subclasses

        @property
        def gen_length(self) -> int: ...
        @property
        def steps(self) -> int: ...

    def check_ranges(self) -> None:
        """Check every setting whose field declares a range, as `SHARE` does; None is allowed.

        Raises:
            SettingError: a value is outside its range, or not a number.
        """
        for entry in fields(self):
            value, limits = getattr(self, entry.name), entry.metadata.get("range")
            if limits is not None and value is not None:
                low, high = limits
                valid = is_finite(value) and low <= value <= high
                require(valid, f"{entry.name} must be a number from {low} to {high}; got {value!r}.")

    @property
    def reuses_keys(self) -> bool:
        """Whether the sampler itself computes some positions of a step and reads the keys of others as they were."""
        return False

    def fitted(self, prompt_lengths: Sequence[int]) -> "SamplerSettings":
        """The settings of a run of these prompts, for samplers whose number of steps depends on them."""
        return self

    def lead(self, columns: int) -> int:
        """Columns of padding to add before prompts of `columns` columns."""
        return 0

    def spare(self, prompt_length: int) -> int:
        """Positions after the answer that the sampler also decides, to fill the last block."""
        return 0


def require(condition: bool, text: str) -> None:
    if not condition:
        raise SettingError(text)


def require_integer(name: str, value: object) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(valid, f"{name} must be an integer of at least 1; got {value!r}.")


def is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def require_nonnegative(name: str, value: float) -> None:
    require(is_finite(value) and value >= 0, f"{name} must be a finite number of at least 0; got {value!r}.")


def divisors(number: int) -> str:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ", ".join(map(str, sorted({*small, *(number // d for d in small)})))


def check_truncation(temperature: float, top_p: float | None, top_k: int | None) -> None:
    require_nonnegative("temperature", temperature)
    require(top_p is None or (is_finite(top_p) and 0 < top_p <= 1), f"top_p must be in (0, 1]; got {top_p!r}.")
    if top_k is not None:
        require_integer("top_k", top_k)


def check_threshold(alg: str, threshold: float | None) -> None:
    """Check a threshold in the unit of Dream's confidence `alg`."""
    if threshold is None:
        return
    require(is_finite(threshold), f"threshold must be a finite number, in the unit of alg; got {threshold!r}.")
    require(
        alg != "entropy" or threshold <= 0,
        f"alg 'entropy' compares negative entropies, at most 0, so no proposal reaches threshold {threshold}; "
        f"choose alg='maskgit_plus' for a threshold on the probability, or give one in nats, such as -0.1.",
    )


def check_guided(temperature: float, cfg_scale: float, remasking: str) -> None:
    require_nonnegative("temperature", temperature)
    require_nonnegative("cfg_scale", cfg_scale)
    allowed = get_args(Remasking)
    require(remasking in allowed, f"remasking must be one of {', '.join(allowed)}; got {remasking!r}.")


class Truncation(NamedTuple):
    """How logits become the distribution that tokens are drawn from.

    Attributes:
        temperature: divides the logits; 0 draws the most likely token.
        top_p: keep the smallest set of tokens with this total probability; None keeps all.
        top_k: keep this many most likely tokens; None keeps all.
        top_p_first: apply `top_p` to all tokens, then `top_k`; otherwise `top_p` to those that `top_k` keeps.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    top_p_first: bool = False


class DrawSettings(SamplerSettings):
    """Base class of settings that truncate the distribution of a token.

    Attributes:
        TOP_P_FIRST: the order of `top_p` and `top_k` in the published sampler; see `Truncation`.
        TRUNCATES_GREEDY: whether the published sampler truncates at temperature 0 too, where this changes confidences
            but no token.
        temperature, top_p, top_k: fields of the subclasses; one that is left out is not a setting.
    """

    TOP_P_FIRST: ClassVar[bool] = False
    TRUNCATES_GREEDY: ClassVar[bool] = False
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None

    @property
    def truncation(self) -> Truncation:
        """What a step applies to its logits."""
        if self.temperature == 0 and not self.TRUNCATES_GREEDY:
            return Truncation()
        return Truncation(self.temperature, self.top_p, self.top_k, self.TOP_P_FIRST)


class EqualBlocks(SamplerSettings):
    """Base class of settings that divide the answer into blocks of equal length and equally many steps."""

    if TYPE_CHECKING:  # a field of the subclasses
        block_length: int

    def _divide(self) -> None:
        """Fill in ``block_length`` and ``steps``, and check that they divide the answer."""
        length = self.gen_length
        require_integer("gen_length", length)
        size, steps = self.block_length or (32 if length % 32 == 0 else length), self.steps or length
        require_integer("block_length", size)
        require_integer("steps", steps)
        object.__setattr__(self, "block_length", size)
        object.__setattr__(self, "steps", steps)
        require(
            length % size == 0,
            f"block_length {size} does not divide gen_length {length}; choose one of {divisors(length)}.",
        )
        blocks = length // size
        require(
            steps % blocks == 0,
            f"steps {steps} cannot be divided among {blocks} blocks (gen_length {length} / block_length {size}); give "
            f"a multiple of {blocks}.",
        )


@dataclass(frozen=True)
class LladaSettings(EqualBlocks):
    """LLaDA's sampler (Nie et al., 2502.09992, and its reference code).

    Attributes:
        gen_length: number of answer positions; in a diffusion model all are masked at the start.
        steps: denoising steps of the complete generation, summed over blocks; default `gen_length`.
        block_length: blocks of this length are decoded from left to right; default 32, or `gen_length` if 32 does not
            divide it.
        temperature: randomness of the proposed tokens (for LLaDA, Gumbel noise in float64); 0 takes the most likely.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 turns it off.
        remasking: which proposals stay masked: the least confident, or random ones.
        threshold: also commit every proposal of at least this confidence, which can end a block early; None turns it
            off. Not allowed with "random", which has no confidences to compare.
        factor: commit by Fast-dLLM's factor rule instead of the schedule: of the proposals by falling confidence, rank
            r = 1, 2, … must have at least 1 − factor / (r + 1), and the first rank always passes; None turns it off.
        by_quota: commit at least the step's share of the block. False commits the most confident proposal and what
            `threshold` or `factor` adds; masks may then be left when the block's steps are used up, as in Fast-dLLM.
        logits_eos_inf: never propose an end-of-sequence token.
        confidence_eos_eot_inf: treat end-of-sequence and end-of-turn proposals as having no confidence. The reference
            code does so at temperature 0; above it, only for end-of-turn.
        stop_at_eos: end a row when its answer holds an end-of-text token and everything before it is decided; masks
            after it become that token. The reference code decides them too.
    """

    gen_length: int = 128
    steps: int = 0
    block_length: int = 0
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    threshold: float | None = field(default=None, metadata=SHARE)
    factor: float | None = None
    by_quota: bool = True
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    stop_at_eos: bool = False

    def __post_init__(self) -> None:
        self._divide()
        require(
            self.steps <= self.gen_length,
            f"steps {self.steps} is more than gen_length {self.gen_length}: each step commits at least one token.",
        )
        check_guided(self.temperature, self.cfg_scale, self.remasking)
        require(
            self.remasking != "random" or self.threshold is None,
            "remasking 'random' does not use confidences; leave threshold out or choose remasking 'low_confidence'.",
        )
        self.check_ranges()
        self._check_parallel()

    def _check_parallel(self) -> None:
        """Check the settings that can commit more or fewer tokens than the schedule."""
        if self.factor is not None:
            require_nonnegative("factor", self.factor)
        require(
            self.factor is None or (self.threshold is None and self.remasking == "low_confidence"),
            "factor replaces threshold and needs confidences; leave threshold and remasking out.",
        )
        require(
            self.by_quota or self.threshold is not None or self.factor is not None,
            "by_quota=False commits by threshold or factor alone; set one of them.",
        )
        require(
            not (self.stop_at_eos and self.logits_eos_inf),
            "logits_eos_inf never proposes the token that stop_at_eos waits for; choose one of them.",
        )


@dataclass(frozen=True)
class ConfidenceSettings(DrawSettings):
    """What the settings of Dream's and Open-dCoder's samplers share: both decide the positions of highest confidence.

    Attributes:
        ALGS: the accepted values of `alg`.
        gen_length, steps, alg, temperature, top_p, top_k, alg_temp, eps: see `DreamSettings`.
    """

    ALGS: ClassVar[tuple[Algorithm, ...]]
    TOP_P_FIRST: ClassVar = True
    TRUNCATES_GREEDY: ClassVar = True
    gen_length: int = 128
    steps: int = 0
    alg: Algorithm = "entropy"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3

    def __post_init__(self) -> None:
        require_integer("gen_length", self.gen_length)
        object.__setattr__(self, "steps", self.steps or self.gen_length)
        require_integer("steps", self.steps)
        require(self.alg in self.ALGS, f"alg must be one of {', '.join(self.ALGS)}; got {self.alg!r}.")
        require(is_finite(self.eps) and 0 < self.eps < 1, f"eps must be between 0 and 1; got {self.eps}.")
        if self.alg_temp is not None:
            require_nonnegative("alg_temp", self.alg_temp)
        check_truncation(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class DreamSettings(ConfidenceSettings):
    """Dream's sampler (Ye et al., 2508.15487, and its reference code).

    `top_p` is applied to all tokens, then `top_k` to those that are left.

    Attributes:
        gen_length: number of answer positions, all masked at the start.
        steps: denoising steps; default `gen_length`.
        alg: the confidence that orders commits: "origin" commits at random, "maskgit_plus" by probability,
            "topk_margin" by the margin over the second most likely token, "entropy" by negative entropy.
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: propose from the smallest set of tokens with this total probability; None turns it off.
        top_k: propose from this many most likely tokens; None turns it off.
        alg_temp: temperature for choosing positions; None or 0 takes the most confident.
        eps: time at the end of the schedule, above 0.
        threshold: also commit every proposal of at least this confidence, in the unit of `alg` (for "entropy" at most
            0); None turns it off.
        tokens_per_step: commit by `threshold` alone, the most confident proposal in any case, but in the first i steps
            at most i times this many tokens; None follows the schedule. With `alg` "maskgit_plus" this is Fast-dLLM's
            "confidence_threshold" without a cache, whose own `steps` are `gen_length` / `tokens_per_step`.
        stop_at_eos: end a row when its answer holds an end-of-text token and everything before it is decided; masks
            after it become that token. The reference code decides them too.
    """

    ALGS: ClassVar = ("origin", "maskgit_plus", "topk_margin", "entropy")
    threshold: float | None = None
    tokens_per_step: int | None = None
    stop_at_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.alg != "origin" or self.threshold is None,
            "alg 'origin' does not use confidences; leave threshold out or choose another alg.",
        )
        check_threshold(self.alg, self.threshold)
        if self.tokens_per_step is not None:
            self._check_ceiling(self.tokens_per_step)

    def _check_ceiling(self, tokens_per_step: int) -> None:
        require_integer("tokens_per_step", tokens_per_step)
        require(
            self.threshold is not None and not self.alg_temp,
            "tokens_per_step limits what threshold commits; set threshold, and leave alg_temp out.",
        )
        require(
            self.gen_length % tokens_per_step == 0,
            f"tokens_per_step {tokens_per_step} does not divide gen_length {self.gen_length}; choose one of "
            f"{divisors(self.gen_length)}.",
        )
        require(
            self.steps == self.gen_length,
            "with tokens_per_step, a run ends when no position is masked; leave steps out.",
        )


@dataclass(frozen=True)
class AutoregressiveSettings(DrawSettings):
    """Left-to-right decoding; a step decodes one token.

    Attributes:
        gen_length: maximum number of tokens; a row ends at its end-of-sequence token.
        temperature: randomness of the sampled token; 0 takes the most likely.
        top_p: at a temperature above 0, sample from the smallest set of tokens with this total probability, among those
            that `top_k` keeps, as transformers does; None turns it off.
        top_k: at a temperature above 0, sample from this many most likely tokens; None turns it off.
        use_cache: cache keys and values, so that a step computes only new positions: one, or the current block.
    """

    gen_length: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        require_integer("gen_length", self.gen_length)
        check_truncation(self.temperature, self.top_p, self.top_k)

    @property
    def steps(self) -> int:
        """Number of steps: one per token."""
        return self.gen_length
