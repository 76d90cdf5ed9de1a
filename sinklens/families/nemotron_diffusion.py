"""Nemotron-Labs-Diffusion's sampler: blocks after the prompt, each denoised and then committed by a causal pass.

Every step is one pass. Step 0 reads the prompt and decides the first token of the first block. The steps of a block
each accept the most confident proposal, and with a `threshold` all others that reach it. When nothing in the block is
masked, or after ``block_length`` steps, a causal pass commits the block and decides the first token of the next one.

Rows do not wait for the end of another row: where the published code ends a block for all rows because one of them has
ended, this sampler fills the others. A proposed mask token stays masked and is tried again.

Pitfall: the block in which a row ends may keep masks after its end token, and its commit reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.mode_steps import BlocksAfterPrompt, ModeSteps
from sinklens.sampling.sampler import require
from sinklens.utils.arguments import Share

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class CompleteBlocks(BlocksAfterPrompt):
    """An answer of complete blocks.

    Attributes:
        gen_length: number of answer positions, a multiple of `block_length`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        length, size = self.gen_length, self.block_length
        below, above = length // size * size, -(-length // size) * size
        fitting = f"{below} or {above}" if below else str(above)
        require(
            length % size == 0,
            f"gen_length {length} is not a multiple of block_length {size}, and only complete blocks are generated; "
            f"choose {fitting}, or another block_length.",
        )

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.gen_length // self.block_length

    def block_ranges(self, prompt_length: int) -> list[range]:
        """The columns of each block."""
        starts = range(prompt_length, prompt_length + self.gen_length, self.block_length)
        return [range(start, start + self.block_length) for start in starts]


@dataclass(frozen=True)
class NemotronDiffusionSettings(CompleteBlocks):
    """Nemotron-Labs-Diffusion's block diffusion (``generate`` of its hub page; greedy).

    Attributes:
        threshold: besides the most confident proposal, accept every one with at least this probability; None accepts
            one per step. The model card uses 0.9.
        causal_context: attention within finished text is causal, and the last of its logits decide the first token of a
            block. False lets the prompt, and each finished block, attend in both directions.
        stop: end a row after the block with its first end-of-sequence token; the tokens after it are no part of the
            answer, and later blocks stay masked.
    """

    name: ClassVar = "nemotron-diffusion"
    threshold: Share | None = None
    causal_context: bool = True
    stop: bool = True

    @property
    def steps(self) -> int:
        """Largest number of steps: the prompt's pass, and those of each block with its commit."""
        return 1 + self.blocks * (self.block_length + 1)

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        run = ModeSteps(state, self, state.eos_ids if self.stop else (), self.causal_context)
        yield from run.read("prefill", range(state.prompt_length), seeds=self.causal_context)
        for block in self.block_ranges(state.prompt_length):
            masked = run.masked(state.canvas, block).sum(dim=1)
            for counts in decisions.even_schedule(masked, self.block_length):
                if not bool(run.masked(state.canvas, block).any()):
                    break
                yield from run.fill("denoise", block, self._chooser(counts))
            yield from run.read("commit", block, seeds=self.causal_context)
            if bool(run.ended(state.canvas).all()):
                return

    def _chooser(self, counts: list[int]) -> Any:
        """What a step accepts: `counts` of each row, or with a threshold the best and all that reach it."""

        def choose(confidence: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
            if self.threshold is None:
                return decisions.most_confident(confidence, counts, None)
            return decisions.most_confident(confidence, [1] * len(counts), self.threshold)

        return choose
