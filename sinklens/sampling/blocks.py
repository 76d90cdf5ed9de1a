"""Decoding block by block under block-causal attention: the shared settings, and how far each row has come.

Pitfall: blocks are counted by the model's attention rule (hooks/blocks.py). If they are counted from each row's first
token, the blocks of two rows may lie at different columns.

Pitfall: the block length is the model's, not the run's, because attention depends on it. It is a setting only so that a
run records it; a value other than the model's is an error.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.hooks.attention.blocks import Blocks
from sinklens.sampling import decisions
from sinklens.sampling.sampler import FILLED_IN, Sampler
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count

Schedule = Callable[[int], Sequence[int]]


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
        schedule: Schedule,
        stop_ids: tuple[int, ...],
        early: bool = False,
        blocks: Blocks | None = None,
    ) -> None:
        blocks = blocks or state.tree.attention_blocks
        assert blocks is not None, "the registry allows these samplers for block-causal models only"
        self._answer = state.real & (torch.arange(state.real.shape[1], device=state.real.device) >= state.prompt_length)
        self._numbers = blocks.numbers(state.real).masked_fill(~state.real, -1)
        self._schedule, self._mask, self._early = schedule, state.mask_id, early
        self._state, self._stop_ids = state, stop_ids
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
            reached = self._answer & (self._numbers <= self._block[:, None])
            self._running &= ~(done & (self.stops(canvas, reached) | (self._block >= self._last)))
            self._block = self._block + (done & self._running).long()
            self._plan(canvas, done & self._running)
        return bool(self._running.any())

    def ended(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows whose answer contains a stop token that no masked position precedes."""
        return self._state.ends(canvas, self._stop_ids).any(dim=1)

    def stops(self, canvas: Int[Tensor, "batch pos"], where: Bool[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows with a stop token at `where`."""
        return (decisions.among(canvas, self._stop_ids) & where).any(dim=1)

    def end(self, rows: Bool[Tensor, " batch"]) -> None:
        """End these rows; their current blocks may still have masked positions."""
        self._running &= ~rows

    def _finished(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        masked = ((canvas == self._mask) & self.current()).any(dim=1)
        return self._running & ~(masked & torch.tensor([bool(plan) for plan in self._plans], device=masked.device))

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
        return [plan.pop(0) if here else 0 for plan, here in zip(self._plans, self._running.tolist(), strict=True)]


@dataclass(frozen=True)
class CachedBlocks(Sampler):
    """Blocks that are decoded from left to right.

    Attributes:
        block_length: positions per block; by default the checkpoint's.
        use_cache: compute only the current block and cache the keys of the text before it; the tokens are the same.
    """

    block_length: Count = 32
    use_cache: bool = False

    @property
    def positions_per_block(self) -> int:
        return self.block_length

    @property
    def caches_keys(self) -> bool:
        return self.use_cache


@dataclass(frozen=True)
class Blockwise(CachedBlocks):
    """Blocks of the model's length, decoded from left to right.

    Attributes:
        block_length: positions per block; always the model's.
        stop: end a row after the block in which an end-of-sequence token appears; later blocks stay masked.
        use_cache: compute only the current block and cache the keys of finished ones; the tokens are the same.
    """

    attention: ClassVar = ("block-causal",)
    stop: bool = True

    def stop_ids(self, state: State) -> tuple[int, ...]:
        """The tokens that end a row."""
        return state.eos_ids if self.stop else ()

    def denoise(self, state: State) -> Iterator[None]:
        if self.use_cache:
            state.cache_keys()
        progress = self.progress(state)
        while progress.advance(state.canvas):
            yield
            self.step(state, progress)

    @abstractmethod
    def progress(self, state: State) -> BlockProgress:
        """The progress of a run at its start."""

    @abstractmethod
    def step(self, state: State, progress: Any) -> None:
        """One step: a pass over the current blocks of all rows, and what it decides."""


@dataclass(frozen=True)
class BlocksOfRows(Blockwise):
    """Blocks that are counted in each row, so that the number of steps depends on the prompts.

    Attributes:
        blocks: number of blocks of the row that has most; set by the run.
    """

    blocks: int = field(default=0, metadata=FILLED_IN, kw_only=True)

    def derived(self) -> dict[str, Any]:
        return super().derived() | {"blocks": self.blocks or -(-self.gen_length // self.block_length)}

    def fitted(self, prompt_lengths: Sequence[int]) -> "BlocksOfRows":
        """These settings, with the number of blocks of the row that has most."""
        size = self.block_length
        return replace(self, blocks=max(-(-(n + self.gen_length) // size) - n // size for n in prompt_lengths))


@dataclass(frozen=True)
class WholeBlocks(BlocksOfRows):
    """Blocks that are all complete: positions after the answer are decided too."""

    def spare(self, prompt_length: int) -> int:
        """The positions that complete the last block."""
        return -(prompt_length + self.gen_length) % self.block_length


@dataclass(frozen=True)
class Passes(BlocksOfRows):
    """A largest number of passes per block.

    Attributes:
        denoising_steps: most passes per block; default `block_length`. Each decides its share of a block's positions.
    """

    denoising_steps: Count = 0

    def derived(self) -> dict[str, Any]:
        return super().derived() | {"denoising_steps": self.denoising_steps or self.block_length}

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * min(self.denoising_steps, self.block_length)

    def progress(self, state: State) -> BlockProgress:
        """The progress of a run at its start; every block has all passes, even one that holds a part of the prompt."""
        return BlockProgress(state, lambda masked: self.even_shares(self.block_length), self.stop_ids(state))

    def even_shares(self, positions: int) -> list[int]:
        """How many of a block's masked positions each pass decides."""
        return [count for (count,) in decisions.even_schedule(torch.tensor([positions]), self.denoising_steps)]
