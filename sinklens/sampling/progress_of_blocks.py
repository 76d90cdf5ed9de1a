"""How far each row of a block-by-block run has come: its current block, and the passes that the block had.

Pitfall: blocks are counted by the model's attention rule (hooks/blocks.py). If they are counted from each row's first
token, the blocks of two rows may lie at different columns.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.hooks.blocks import Blocks
from sinklens.sampling import decisions
from sinklens.sampling.block_cache import BlockCache
from sinklens.sampling.settings_blocks import SdarSettings
from sinklens.sampling.settings_llada2 import Llada2Settings
from sinklens.sampling.state import State


class BlockProgress:
    """The current block of every row.

    Args:
        state: the run at its start.
        schedule: number of masked positions of a block at its start -> how many each pass decides. The block ends after
            these passes even if positions are still masked.
        stop_ids: tokens that end a row once a block with one of them is finished.
        early: end a row as soon as no masked answer position precedes a stop token, within a block too.
        blocks: how blocks are counted; None for the model's rule.
    """

    def __init__(
        self,
        state: State,
        schedule: Callable[[int], Sequence[int]],
        stop_ids: tuple[int, ...],
        early: bool = False,
        blocks: Blocks | None = None,
    ) -> None:
        blocks = blocks or state.tree.attention_blocks
        assert blocks is not None, "the registry allows these samplers for block-causal models only"
        columns = torch.arange(state.real.shape[1], device=state.real.device)
        self._answer = state.real & (columns >= state.prompt_length)
        self._numbers = blocks.numbers(state.real).masked_fill(~state.real, -1)
        self._schedule, self._mask, self._early = schedule, state.mask_id, early
        self._stop_ids = torch.tensor(stop_ids, dtype=state.canvas.dtype, device=state.canvas.device)
        first = torch.where(self._answer, self._numbers, self._numbers.max() + 1)
        self._block, self._last = first.amin(dim=1), self._numbers.amax(dim=1)
        self._running = torch.ones_like(self._block, dtype=torch.bool)
        self._plans: list[list[int]] = [[] for _ in state.real]
        self._plan(state.canvas, self._running)

    def _plan(self, canvas: Int[Tensor, "batch pos"], rows: Bool[Tensor, " batch"]) -> None:
        """Plan the passes of the current blocks of `rows`."""
        masked = ((canvas == self._mask) & self.current()).sum(dim=1).tolist()
        for row in rows.nonzero()[:, 0].tolist():
            self._plans[row] = list(self._schedule(masked[row]))

    def advance(self, canvas: Int[Tensor, "batch pos"]) -> bool:
        """Move rows whose block is finished to their next block; whether any row still has one."""
        if self._early:
            self.end(self.ended(canvas))
        while bool((done := self._finished(canvas)).any()):
            self._running &= ~(done & (self._stopped(canvas) | (self._block >= self._last)))
            self._block = self._block + (done & self._running).long()
            self._plan(canvas, done & self._running)
        return bool(self._running.any())

    def ended(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows whose answer contains a stop token that no masked position precedes."""
        masked = ((canvas == self._mask) & self._answer).cumsum(dim=1) > 0
        return self.stops(canvas, self._answer & ~masked)

    def stops(self, canvas: Int[Tensor, "batch pos"], where: Bool[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows with a stop token at `where`."""
        return (torch.isin(canvas, self._stop_ids) & where).any(dim=1)

    def end(self, rows: Bool[Tensor, " batch"]) -> None:
        """End these rows; their current blocks may still have masked positions."""
        self._running &= ~rows

    def _finished(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        masked = ((canvas == self._mask) & self.current()).any(dim=1)
        planned = torch.tensor([bool(plan) for plan in self._plans], device=masked.device)
        return self._running & ~(masked & planned)

    def _stopped(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows whose answer contains a stop token in their current block or an earlier one."""
        return self.stops(canvas, self._answer & (self._numbers <= self._block[:, None]))

    def current(self) -> Bool[Tensor, "batch pos"]:
        """The answer positions of each row's current block; none in rows that have ended."""
        return self._answer & (self._numbers == self._block[:, None]) & self._running[:, None]

    def in_block(self, distance: int = 0) -> Bool[Tensor, "batch pos"]:
        """The positions `distance` blocks after each row's current one, the prompt's included."""
        return (self._numbers == self._block[:, None] + distance) & self._running[:, None]

    def after(self) -> Bool[Tensor, "batch pos"]:
        """The positions of blocks after each row's current one."""
        return self._numbers > self._block[:, None]

    def window(self) -> slice:
        """Columns from the first to the last one of the rows' current blocks; earlier ones do not change any more."""
        columns = self.in_block().any(dim=0).nonzero()[:, 0]
        return slice(int(columns[0]), int(columns[-1]) + 1)

    def take_counts(self) -> list[int]:
        """How many positions this pass decides in each row; 0 in rows that have ended. Counts the pass."""
        running = self._running.tolist()
        return [plan.pop(0) if here else 0 for plan, here in zip(self._plans, running, strict=True)]


def even_passes(state: State, settings: SdarSettings | Llada2Settings) -> BlockProgress:
    """The progress of a run whose passes decide equal shares of a complete block; sets up the block cache.

    A block that begins with prompt tokens gets the same passes.
    """
    shares = decisions.even_schedule(torch.tensor([settings.block_length]), settings.denoising_steps)
    planned = [count for (count,) in shares]
    state.cache = BlockCache(state.tree) if settings.use_cache else None
    return BlockProgress(state, lambda masked: planned, state.eos_ids if settings.stop else ())
