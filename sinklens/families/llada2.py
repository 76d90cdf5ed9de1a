"""LLaDA2.0's sampler: blocks from left to right, confident proposals first, with an early stop inside a block.

Every row has its own current block, as in sdar.py, from which this sampler differs in two respects: the number of
passes follows from `minimal_topk` too, and a row may end in the step that decides an end token.

Where the published implementation fails, this sampler does not: an end token of the prompt does not end the run (the
reference then returns an empty answer), and positions before the answer are never written.

Pitfall: config.json does not say whether a checkpoint is LLaDA2.0 or 2.1. The family's sampler is this one;
``sampler="llada2.1"`` chooses the other.

Pitfall: an end token that was decided before its left neighbors ends the row only after the block, as in the reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sinklens.sampling import decisions
from sinklens.sampling.blocks import BlockProgress, Passes, WholeBlocks
from sinklens.sampling.parts import Truncated
from sinklens.sampling.sampler import require
from sinklens.utils.arguments import Count, Share

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class Llada2Settings(Truncated, Passes, WholeBlocks):
    """LLaDA2.0's sampler (2512.15745, and the published `generate`).

    Blocks are decoded from left to right, each in at most `denoising_steps` passes. A pass accepts all proposals above
    `threshold` if these are at least its share of the block, else the share's most confident ones. The last block is
    always complete: up to ``block_length - 1`` positions after the answer are decided too. `top_p` and `top_k` apply at
    a temperature above 0, `top_p` to the tokens that `top_k` keeps.

    Attributes:
        denoising_steps: most passes per block, the published ``steps``; default `block_length`.
        minimal_topk: a block has at most ``gen_length // minimal_topk`` passes.
        threshold: besides the share of the pass, accept all proposals of more confidence.
        eos_early_stop: also end a row in the step that decides an end-of-sequence token, if no masked position
            precedes it.
    """

    name: ClassVar = "llada2"
    minimal_topk: Count = 1
    threshold: Share = 0.95
    eos_early_stop: bool = False

    def derived(self) -> dict[str, Any]:
        """See `Sampler.derived`."""
        found, most = super().derived(), self.gen_length // self.minimal_topk
        return found | {"denoising_steps": min(found["denoising_steps"], self.block_length, most)}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.minimal_topk <= self.gen_length,
            f"minimal_topk {self.minimal_topk} is more than gen_length {self.gen_length}, so a block would have no "
            f"pass; give at most {self.gen_length}.",
        )
        require(
            self.stop or not self.eos_early_stop,
            "eos_early_stop=True ends rows at an end-of-sequence token, which stop=False forbids; leave one of them "
            "out.",
        )

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        progress = self.begin(state, lambda masked: self.even_shares(self.block_length))
        while progress.advance(state.canvas):
            yield
            self._step(state, progress)

    def _step(self, state: "State", progress: BlockProgress) -> None:
        canvas, block, counts = state.begin_step(progress.window()), progress.current(), progress.take_counts()
        where = (canvas == state.mask_id) & block
        drawn = self.draw(state, canvas, where)
        confidence = state.spread_confidence(where, decisions.probability(drawn.probs, drawn.candidates))
        state.commit(decisions.above_or_best(confidence, counts, self.threshold), drawn.canvas)
        if self.eos_early_stop:
            decided_now = block & (state.canvas != canvas)
            progress.end(progress.stops(state.canvas, decided_now) & progress.ended(state.canvas))
