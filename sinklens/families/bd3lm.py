"""dLLM's sampler for models trained with block diffusion (BD3LM): blocks from left to right, a float32 schedule.

Prompts are padded on the left to a whole number of blocks, so a block never holds prompt and answer; the last block may
be shorter. Within a block, the sampler is LLaDA's with another schedule (`decisions.linear_schedule`).

Where the published implementation depends on the batch or on accidental tokens, this sampler does not: a row whose
finished block contains an end token ends there (the reference continues it until all rows have ended), and a generated
padding token is an ordinary token (the reference hides it from the next block on).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sinklens.sampling import decisions
from sinklens.sampling.blocks import Blockwise
from sinklens.sampling.parts import Guided, Steps

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class Bd3lmSettings(Guided, Blockwise, Steps):
    """The sampler of dLLM for block diffusion (BD3LM; Arriola et al., 2503.09573, and dLLM's code).

    Attributes:
        gen_length: number of answer positions; the last block may be shorter than the others.
        steps: denoising steps of the complete generation; default `gen_length`. Rounded up so that every block has as
            many; steps that would decide no position are left out.
        right_shift_logits: logits at i predict the token at i + 1, for models trained to do so.
    """

    name: ClassVar = "bd3lm"
    right_shift_logits: bool = False

    def derived(self) -> dict[str, Any]:
        """See `Sampler.derived`."""
        found, blocks = super().derived(), -(-self.gen_length // self.block_length)
        return found | {"steps": blocks * -(-found["steps"] // blocks)}

    @property
    def steps_per_block(self) -> int:
        """Denoising steps of a block, before those that decide no position are left out."""
        return self.steps // -(-self.gen_length // self.block_length)

    def lead(self, columns: int) -> int:
        """The columns that complete the prompts' first block."""
        return -columns % self.block_length

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        state.shift = state.shift or self.right_shift_logits
        progress = self.begin(state, partial(decisions.linear_schedule, steps=self.steps_per_block))
        while progress.advance(state.canvas):
            yield
            canvas, counts = state.begin_step(progress.window()), progress.take_counts()
            where = (canvas == state.mask_id) & progress.current()
            logits = state.logits(canvas, where, self.cfg_scale)
            proposed, confidence = self.propose(state, canvas, where, logits)
            state.commit(decisions.most_confident(confidence, counts, None), proposed)
