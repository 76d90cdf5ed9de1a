"""LLaDA2.1's sampler: blocks from left to right, in which decided tokens may be replaced ("T2T editing").

Every pass proposes a token at each answer position of the current block, masked or not. ``denoise.hook_commit`` has the
masked positions that are decided, ``denoise.hook_edit`` the decided ones whose token is replaced. A block ends when it
has no masked position and a pass edited nothing, or after `max_post_steps` passes without masked positions. Tokens of
the prompt and of finished blocks do not change.

Where the published implementation fails, this sampler does not: if the model proposes the mask token, a block ends with
masked positions once its passes are used up (the reference never ends).

Pitfall: `unmask_step` is the step that wrote the *final* token. ``track.edited`` follows a position from step to step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.blocks import BlockProgress, WholeBlocks
from sinklens.sampling.parts import Truncated
from sinklens.utils.arguments import Count, Share

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class Llada21Settings(Truncated, WholeBlocks):
    """LLaDA2.1's sampler (2602.08676, and the published `generate`), which edits decided tokens.

    Every pass proposes a token at each answer position of the current block. Masked positions are decided as in
    LLaDA2.0. A decided token is replaced by another proposal of more confidence than `editing_threshold`. A block
    without masked positions gets up to `max_post_steps` more passes and ends when one of them edits nothing.

    The model card's quality mode is ``threshold=0.7, editing_threshold=0.5``; its speed mode is ``threshold=0.5,
    editing_threshold=0.0``. At a temperature above 0, `top_k` applies first, then `top_p` to the tokens that it keeps.

    Attributes:
        num_to_transfer: a pass decides at least this many masked positions.
        threshold: decide all masked positions whose proposal has more confidence, if these are enough.
        editing_threshold: confidence above which a proposal replaces a decided token; 0 replaces every one that
            differs, 1 turns editing off.
        max_post_steps: most passes over a block without masked positions.
        stop: end a row after the block in which an end-of-sequence token appears, as the published ``eos_early_stop``;
            the answer, which ends there, is the same.
    """

    name: ClassVar = "llada2.1"
    num_to_transfer: Count = 1
    threshold: Share = 0.7
    editing_threshold: Share = 0.5
    max_post_steps: Annotated[int, Ge(0)] = 16

    @property
    def passes_with_masks(self) -> int:
        """Most passes over a block while it has masked positions."""
        return -(-self.block_length // self.num_to_transfer)

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * (self.passes_with_masks + self.max_post_steps)

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        progress = _EditProgress(state, self)
        if self.use_cache:
            state.cache_keys()
        while progress.advance(state.canvas):
            yield
            self._step(state, progress)

    def _step(self, state: "State", progress: "_EditProgress") -> None:
        canvas, block = state.begin_step(progress.window()), progress.current()
        masked = (canvas == state.mask_id) & block
        progress.count_pass(masked.any(dim=1))
        drawn = self.draw(state, canvas, block)
        confidence = state.spread_confidence(block, decisions.probability(drawn.probs, drawn.candidates))
        commit = decisions.above_or_best(
            confidence.masked_fill(~masked, -torch.inf), [self.num_to_transfer] * len(canvas), self.threshold
        )
        commit = state.through("hook_commit", commit)
        edits = block & ~masked & (drawn.canvas != canvas) & (confidence > self.editing_threshold)
        edits = state.through("hook_edit", edits)
        state.end_step(torch.where(commit | edits, drawn.canvas, canvas))
        progress.settle(~masked.any(dim=1) & (state.canvas == canvas).all(dim=1))


class _EditProgress(BlockProgress):
    """The current block of every row, which may get passes after its last masked position was decided."""

    def __init__(self, state: "State", settings: Llada21Settings) -> None:
        rows, device = len(state.canvas), state.canvas.device
        self._budget = torch.tensor([settings.passes_with_masks, settings.max_post_steps], device=device)
        self._left = self._budget.repeat(rows, 1)  # passes with masked positions, and without
        self._settled = torch.zeros(rows, dtype=torch.bool, device=device)
        super().__init__(state, lambda masked: (), settings.stop_ids(state))

    def _plan(self, canvas: Int[Tensor, "batch pos"], rows: Bool[Tensor, " batch"]) -> None:
        self._left[rows] = self._budget
        self._settled &= ~rows

    def _finished(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        masked = ((canvas == self._mask) & self.current()).any(dim=1)
        left = torch.where(masked, self._left[:, 0], self._left[:, 1]) > 0
        return self._running & ~(left & ~self._settled)

    def count_pass(self, masked: Bool[Tensor, " batch"]) -> None:
        """Count a pass in every running row; `masked` are the rows whose block has masked positions."""
        kinds = torch.stack([masked, ~masked], dim=1)
        self._left -= (kinds & self._running[:, None]).long()

    def settle(self, rows: Bool[Tensor, " batch"]) -> None:
        """Finish the blocks of these rows, in which a pass without masked positions changed nothing."""
        self._settled |= rows & self._running
