"""Settings of the samplers that decode block by block under block-causal attention.

Pitfall: the block length is the model's, not the run's, because attention depends on it. It is a setting only so that a
run records it; a value other than the model's is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, get_args

from sinklens.sampling.settings import (
    SHARE,
    ConfidenceOf,
    DrawSettings,
    Remasking,
    SamplerSettings,
    Strategy,
    check_guided,
    check_truncation,
    divisors,
    is_finite,
    require,
    require_integer,
)


class BlockSettings(SamplerSettings):
    """Base class of settings with `blocks`, the number of blocks of the row that has most."""

    if TYPE_CHECKING:  # fields of the subclasses
        block_length: int
        blocks: int

    def _check_blocks(self) -> None:
        require_integer("gen_length", self.gen_length)
        require_integer("block_length", self.block_length)
        object.__setattr__(self, "blocks", self.blocks or -(-self.gen_length // self.block_length))

    def fitted(self, prompt_lengths: Sequence[int]) -> "BlockSettings":
        """With the number of blocks of the row that has most."""
        size = self.block_length
        blocks = max(-(-(n + self.gen_length) // size) - n // size for n in prompt_lengths)
        return replace(self, blocks=blocks)  # type: ignore[call-arg]


class WholeBlocks(BlockSettings):
    """Base class of settings whose last block is always complete."""

    def spare(self, prompt_length: int) -> int:
        """The positions that complete the last block."""
        return -(prompt_length + self.gen_length) % self.block_length


@dataclass(frozen=True)
class SdarSettings(WholeBlocks, DrawSettings):
    """SDAR's sampler (Cheng et al., 2510.06303), which has three published implementations.

    Blocks are decoded from left to right. The first one may begin with prompt tokens; the last one is always complete,
    so up to ``block_length - 1`` positions after the answer are decided too: they are part of ``run.tokens``, not of
    the answer.

    Attributes:
        gen_length: number of answer positions.
        block_length: positions per block; always the model's.
        denoising_steps: most passes per block; default `block_length`. Each decides its share of a block's positions.
        remasking_strategy: which proposals a pass accepts: "sequential", the leftmost; "low_confidence_static", the
            most confident; "low_confidence_dynamic", all above `threshold` if these are at least the share;
            "entropy_bounded", those of lowest entropy whose sum stays below `eb_threshold`, at least one.
        threshold: confidence of "low_confidence_dynamic".
        eb_threshold: entropy of "entropy_bounded", in nats.
        confidence_of: the confidence of a proposal is its probability in the distribution it was drawn from, "draw"
            (generate.py, JetEngine), or without temperature, `top_p` and `top_k`, "model" (OpenCompass).
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: propose from the smallest set of tokens with this total probability, among those that `top_k` keeps; None
            turns it off.
        top_k: propose from this many most likely tokens; None turns it off.
        stop: end a row after the block in which an end-of-sequence token appears; later blocks stay masked.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
        blocks: number of blocks of the run; set by the run.
    """

    TRUNCATES_GREEDY: ClassVar = True
    gen_length: int = 128
    block_length: int = 4
    denoising_steps: int = 0
    remasking_strategy: Strategy = "low_confidence_dynamic"
    threshold: float = field(default=0.85, metadata=SHARE)
    eb_threshold: float = 0.35
    confidence_of: ConfidenceOf = "draw"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop: bool = True
    use_cache: bool = False
    blocks: int = field(default=0, metadata={"setting": False})

    def __post_init__(self) -> None:
        self._check_blocks()
        object.__setattr__(self, "denoising_steps", self.denoising_steps or self.block_length)
        require_integer("denoising_steps", self.denoising_steps)
        require(
            self.denoising_steps <= self.block_length,
            f"denoising_steps {self.denoising_steps} is more than block_length {self.block_length}: each pass decides "
            f"at least one position; give at most {self.block_length}.",
        )
        for name, allowed in (("remasking_strategy", get_args(Strategy)), ("confidence_of", get_args(ConfidenceOf))):
            value = getattr(self, name)
            require(value in allowed, f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
        self.check_ranges()
        require(
            is_finite(self.eb_threshold) and self.eb_threshold > 0,
            f"eb_threshold must be a finite number above 0; got {self.eb_threshold!r}.",
        )
        check_truncation(self.temperature, self.top_p, self.top_k)

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * self.denoising_steps


@dataclass(frozen=True)
class Bd3lmSettings(SamplerSettings):
    """The sampler of dLLM for block diffusion (BD3LM; Arriola et al., 2503.09573, and dLLM's code).

    Attributes:
        gen_length: number of answer positions; the last block may be shorter than the others.
        steps: denoising steps of the complete generation; default `gen_length`. Rounded up so that every block has as
            many; steps that would decide no position are left out.
        block_length: positions per block; always the model's.
        temperature: randomness of the proposed tokens (Gumbel noise in float64); 0 takes the most likely.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 turns it off.
        remasking: which proposals stay masked: the least confident, or random ones.
        right_shift_logits: logits at i predict the token at i + 1, for models trained to do so.
        stop: end a row after the block in which an end-of-sequence token appears; later blocks stay masked.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
    """

    gen_length: int = 128
    steps: int = 0
    block_length: int = 32
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    right_shift_logits: bool = False
    stop: bool = True
    use_cache: bool = False

    def __post_init__(self) -> None:
        require_integer("gen_length", self.gen_length)
        require_integer("block_length", self.block_length)
        object.__setattr__(self, "steps", self.steps or self.gen_length)
        require_integer("steps", self.steps)
        blocks = -(-self.gen_length // self.block_length)
        object.__setattr__(self, "steps", blocks * -(-self.steps // blocks))
        check_guided(self.temperature, self.cfg_scale, self.remasking)

    @property
    def steps_per_block(self) -> int:
        """Denoising steps of a block, before those that decide no position are left out."""
        return self.steps // -(-self.gen_length // self.block_length)

    def lead(self, columns: int) -> int:
        """The columns that complete the prompts' first block."""
        return -columns % self.block_length


@dataclass(frozen=True)
class Bd3lmCardSettings(BlockSettings):
    """The sampler in the model card of dLLM's BD3LM checkpoints, which differs from dLLM's own.

    The first block completes the prompt's last one; the last block may be shorter than the others.

    Attributes:
        gen_length: number of answer positions.
        block_length: positions per block; always the model's.
        denoising_steps: most passes per block, the published ``steps`` divided among the blocks of `gen_length`;
            default `block_length`. Each decides its share of the block's masked positions.
        temperature: randomness of the proposed tokens (Gumbel noise in float64); 0 takes the most likely.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 turns it off. The unconditional rows
            have masks in place of the prompt and of finished blocks.
        remasking: which proposals stay masked: the least confident, or random ones.
        stop: end a row in the step that decides an end-of-sequence token; positions may stay masked, also before it.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
        blocks: number of blocks of the run; set by the run.
    """

    gen_length: int = 128
    block_length: int = 32
    denoising_steps: int = 0
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    stop: bool = True
    use_cache: bool = False
    blocks: int = field(default=0, metadata={"setting": False})

    def __post_init__(self) -> None:
        self._check_blocks()
        object.__setattr__(self, "denoising_steps", self.denoising_steps or self.block_length)
        require_integer("denoising_steps", self.denoising_steps)
        check_guided(self.temperature, self.cfg_scale, self.remasking)

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * min(self.denoising_steps, self.block_length)


@dataclass(frozen=True)
class FastDllmV2Settings(DrawSettings):
    """Fast-dLLM v2's sampler (Wu et al., 2509.26328, and its reference code).

    The last block is always complete, as in the reference, unless only its first position is part of the answer: up to
    ``block_length - 2`` positions after the answer are decided too. The reference's ``max_new_tokens`` counts blocks,
    the first of which holds prompt tokens: for its result, choose `gen_length` so that prompt and answer fill whole
    blocks and one position.

    Attributes:
        gen_length: number of answer positions.
        block_length: positions per block; always the model's.
        small_block_size: positions per sub-block; default 8, or the block if 8 does not divide it.
        threshold: besides the most confident proposal, accept all with more confidence than this; 1 accepts one per
            step.
        temperature: randomness of the proposed tokens, except the first one of a block; 0 takes the most likely.
        top_p: at a temperature above 0, propose from the smallest set of tokens with this total probability.
        stop: end a row at its first end-of-sequence token; later positions stay masked.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
        use_block_cache: also compute only the current sub-block where possible, and reuse the keys of the other ones in
            its block, as they were in the block's last complete pass. This changes results.
        positions: number of positions that the run decides; set by the run.
    """

    gen_length: int = 128
    block_length: int = 32
    small_block_size: int = 0
    threshold: float = field(default=1.0, metadata=SHARE)
    temperature: float = 0.0
    top_p: float | None = 0.95
    stop: bool = True
    use_cache: bool = False
    use_block_cache: bool = False
    positions: int = field(default=0, metadata={"setting": False})

    def __post_init__(self) -> None:
        require_integer("gen_length", self.gen_length)
        require_integer("block_length", self.block_length)
        default = 8 if self.block_length % 8 == 0 else self.block_length
        object.__setattr__(self, "small_block_size", self.small_block_size or default)
        require_integer("small_block_size", self.small_block_size)
        require(
            self.block_length % self.small_block_size == 0,
            f"small_block_size {self.small_block_size} does not divide block_length {self.block_length}; choose one of "
            f"{divisors(self.block_length)}.",
        )
        require(
            not (self.use_cache and self.use_block_cache),
            "use_block_cache caches finished blocks too; leave use_cache out.",
        )
        object.__setattr__(self, "positions", self.positions or self.gen_length)
        self.check_ranges()
        check_truncation(self.temperature, self.top_p, None)

    @property
    def steps(self) -> int:
        """Largest number of steps: each decides at least one position."""
        return self.positions

    @property
    def reuses_keys(self) -> bool:
        """Whether a step computes a single sub-block."""
        return self.use_block_cache

    def fitted(self, prompt_lengths: Sequence[int]) -> "FastDllmV2Settings":
        """With the number of positions of the row that has most."""
        return replace(self, positions=self.gen_length + max(map(self.spare, prompt_lengths)))

    def spare(self, prompt_length: int) -> int:
        """The positions that complete the last block."""
        beyond = -(prompt_length + self.gen_length) % self.block_length
        return 0 if beyond == self.block_length - 1 else beyond
