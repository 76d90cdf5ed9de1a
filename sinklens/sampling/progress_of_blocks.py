"""How far each row of a block-by-block run has come: its current block, and the passes that the block had.

Pitfall: blocks are counted by the model's attention rule (hooks/blocks.py), from each row's first token, so the blocks
of two rows may lie at different columns.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.sampling.state import State


class BlockProgress:
    """The current block of every row.

    Args:
        state: the run at its start.
        most: passes after which a block ends even if positions are still masked.
        stop_ids: tokens that end a row once a block with one of them is finished.
    """

    def __init__(self, state: State, most: int, stop_ids: tuple[int, ...]) -> None:
        blocks = state.tree.attention_blocks
        assert blocks is not None, "the registry allows this sampler for block-causal models only"
        self._numbers = blocks.numbers(state.real).masked_fill(~state.real, -1)
        self._answer = state.real & (torch.arange(state.real.shape[1], device=state.real.device) >= state.prompt_length)
        self._most, self._mask = most, state.mask_id
        self._stop_ids = torch.tensor(stop_ids, dtype=state.canvas.dtype, device=state.canvas.device)
        first = torch.where(self._answer, self._numbers, self._numbers.max() + 1)
        self._block = first.amin(dim=1)
        self._last = self._numbers.amax(dim=1)
        self._passes = torch.zeros_like(self._block)
        self._running = torch.ones_like(self._block, dtype=torch.bool)

    def advance(self, canvas: Int[Tensor, "batch pos"]) -> bool:
        """Move rows whose block is finished to their next block; whether any row still has one."""
        while bool((done := self._finished(canvas)).any()):
            self._running &= ~(done & (self._stopped(canvas) | (self._block >= self._last)))
            self._block = self._block + (done & self._running).long()
            self._passes = self._passes.masked_fill(done, 0)
        return bool(self._running.any())

    def _finished(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        masked = (canvas == self._mask) & self.current()
        return self._running & (~masked.any(dim=1) | (self._passes >= self._most))

    def _stopped(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows whose answer contains a stop token in their current block or an earlier one."""
        return (torch.isin(canvas, self._stop_ids) & self._answer & self._upto()).any(dim=1)

    def _upto(self) -> Bool[Tensor, "batch pos"]:
        return self._numbers <= self._block[:, None]

    def current(self) -> Bool[Tensor, "batch pos"]:
        """The answer positions of each row's current block; none in rows that have ended."""
        return self._answer & (self._numbers == self._block[:, None]) & self._running[:, None]

    def passes(self) -> list[tuple[int, bool]]:
        """For each row the number of passes that its block had, and whether the row is running."""
        return list(zip(self._passes.tolist(), self._running.tolist(), strict=True))

    def count(self) -> None:
        """Count a pass of every current block."""
        self._passes = self._passes + 1
