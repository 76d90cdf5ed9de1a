"""The sampler in the model card of dLLM's BD3LM checkpoints: blocks that begin inside the prompt's last block.

Blocks are counted from a row's first token, so the first one completes the prompt's last block. While it is decoded,
the prompt tokens in it do not see the answer (`Blocks.sealed`), because the model card's code computes their keys
before it and keeps them; once the block is finished, they do. Each block's positions are divided evenly among its
passes, earlier passes taking the remainder. A row ends in the step in which an end token appears.

Rows are independent, and prompts are padded on the left. The model card's code pads on the right and counts blocks by
columns, so there a shorter row depends on the longest one; and it continues rows that have ended until all have.

Limitation: a single pass of the model over a canvas of the first block lets the prompt see the answer, so its logits
differ from those of the run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from sinklens.hooks.attention.blocks import Blocks, ruled_by
from sinklens.sampling import decisions
from sinklens.sampling.blocks import Passes
from sinklens.sampling.parts import Guided

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class Bd3lmCardSettings(Guided, Passes):
    """The sampler in the model card of dLLM's BD3LM checkpoints, which differs from dLLM's own.

    The first block completes the prompt's last one; the last block may be shorter than the others.

    Attributes:
        denoising_steps: most passes per block, the published ``steps`` divided among the blocks of `gen_length`;
            default `block_length`. Each decides its share of the block's masked positions.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 turns it off. The unconditional rows
            have masks in place of the prompt and of finished blocks.
        stop: end a row in the step that decides an end-of-sequence token; positions may stay masked, also before it.
    """

    name: ClassVar = "bd3lm-card"

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        blocks, start = Blocks(self.block_length, "token"), state.prompt_length

        def shares(masked: int) -> list[int]:
            return [count for count in self.even_shares(masked) if count]

        progress = self.begin(state, shares, blocks=blocks)
        while progress.advance(state.canvas):
            yield
            block, counts = progress.current(), progress.take_counts()
            sealed = replace(blocks, sealed=tuple(start if here else 0 for here in block[:, start].tolist()))
            with ruled_by(state.tree.hf.config, sealed):  # a hook on the canvas may run another pass
                canvas = state.begin_step(progress.window())
                where = (canvas == state.mask_id) & block
                given = ~block & (canvas != state.mask_id)
                logits = state.logits(canvas, where, self.cfg_scale, given=given)
            proposed, confidence = self.propose(state, canvas, where, logits)
            state.commit(decisions.most_confident(confidence, counts, None), proposed)
            progress.end(progress.stops(state.canvas, block))
