"""Settings of the samplers of LLaDA2.0 and LLaDA2.1, which fill blocks of the model's length.

Pitfall: config.json does not say which of the two versions a checkpoint is. The family's sampler is that of 2.0;
``sampler="llada2.1"`` chooses the other.
"""

from dataclasses import dataclass, field

from sinklens.sampling.settings import SHARE, DrawSettings, check_truncation, require, require_integer
from sinklens.sampling.settings_blocks import WholeBlocks


@dataclass(frozen=True)
class Llada2Settings(WholeBlocks, DrawSettings):
    """LLaDA2.0's sampler (2512.15745, and the published `generate`).

    Blocks are decoded from left to right, each in at most `denoising_steps` passes. A pass accepts all proposals above
    `threshold` if these are at least its share of the block, else the share's most confident ones. The last block is
    always complete: up to ``block_length - 1`` positions after the answer are decided too.

    Attributes:
        gen_length: number of answer positions.
        block_length: positions per block; always the model's.
        denoising_steps: most passes per block, the published ``steps``; default `block_length`.
        minimal_topk: a block has at most ``gen_length // minimal_topk`` passes.
        threshold: besides the share of the pass, accept all proposals of more confidence.
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: at a temperature above 0, propose from the smallest set of tokens with this total probability, among
            those that `top_k` keeps; None turns it off.
        top_k: at a temperature above 0, propose from this many most likely tokens; None turns it off.
        stop: end a row after the block in which an end-of-sequence token appears; later blocks stay masked.
        eos_early_stop: also end a row in the step that decides an end-of-sequence token, if no masked position
            precedes it.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
        blocks: number of blocks of the run; set by the run.
    """

    gen_length: int = 128
    block_length: int = 32
    denoising_steps: int = 0
    minimal_topk: int = 1
    threshold: float = field(default=0.95, metadata=SHARE)
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop: bool = True
    eos_early_stop: bool = False
    use_cache: bool = False
    blocks: int = field(default=0, metadata={"setting": False})

    def __post_init__(self) -> None:
        self._check_blocks()
        require_integer("minimal_topk", self.minimal_topk)
        passes = self.gen_length // self.minimal_topk
        require(
            passes >= 1,
            f"minimal_topk {self.minimal_topk} is more than gen_length {self.gen_length}, so a block would have no "
            f"pass; give at most {self.gen_length}.",
        )
        given = self.denoising_steps or self.block_length
        require_integer("denoising_steps", given)
        object.__setattr__(self, "denoising_steps", min(given, self.block_length, passes))
        self.check_ranges()
        require(
            self.stop or not self.eos_early_stop,
            "eos_early_stop=True ends rows at an end-of-sequence token, which stop=False forbids; leave one of them "
            "out.",
        )
        check_truncation(self.temperature, self.top_p, self.top_k)

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * self.denoising_steps


@dataclass(frozen=True)
class Llada21Settings(WholeBlocks, DrawSettings):
    """LLaDA2.1's sampler (2602.08676, and the published `generate`), which edits decided tokens.

    Every pass proposes a token at each answer position of the current block. Masked positions are decided as in
    LLaDA2.0. A decided token is replaced by another proposal of more confidence than `editing_threshold`. A block
    without masked positions gets up to `max_post_steps` more passes and ends when one of them edits nothing.

    The model card's quality mode is ``threshold=0.7, editing_threshold=0.5``; its speed mode is ``threshold=0.5,
    editing_threshold=0.0``.

    Attributes:
        gen_length: number of answer positions.
        block_length: positions per block; always the model's.
        num_to_transfer: a pass decides at least this many masked positions.
        threshold: decide all masked positions whose proposal has more confidence, if these are enough.
        editing_threshold: confidence above which a proposal replaces a decided token; 0 replaces every one that
            differs, 1 turns editing off.
        max_post_steps: most passes over a block without masked positions.
        temperature: randomness of the proposed tokens; 0 takes the most likely.
        top_p: at a temperature above 0, propose from the smallest set of tokens with this total probability, among
            those that `top_k` keeps; None turns it off.
        top_k: at a temperature above 0, propose from this many most likely tokens; None turns it off.
        stop: end a row after the block in which an end-of-sequence token appears, as the published ``eos_early_stop``;
            the answer, which ends there, is the same.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
        blocks: number of blocks of the run; set by the run.
    """

    gen_length: int = 128
    block_length: int = 32
    num_to_transfer: int = 1
    threshold: float = field(default=0.7, metadata=SHARE)
    editing_threshold: float = field(default=0.5, metadata=SHARE)
    max_post_steps: int = 16
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    stop: bool = True
    use_cache: bool = False
    blocks: int = field(default=0, metadata={"setting": False})

    def __post_init__(self) -> None:
        self._check_blocks()
        require_integer("num_to_transfer", self.num_to_transfer)
        self.check_ranges()
        posts = self.max_post_steps
        valid = isinstance(posts, int) and not isinstance(posts, bool) and posts >= 0
        require(valid, f"max_post_steps must be an integer of at least 0; got {posts!r}.")
        check_truncation(self.temperature, self.top_p, self.top_k)

    @property
    def passes_with_masks(self) -> int:
        """Most passes over a block while it has masked positions."""
        return -(-self.block_length // self.num_to_transfer)

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * (self.passes_with_masks + self.max_post_steps)
