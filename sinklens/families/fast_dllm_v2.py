"""Fast-dLLM v2: Qwen2 with block-causal attention.

Fast-dLLM v2's sampler: blocks from left to right, each in sub-blocks; the logits predict the next position.

The model was made from an autoregressive one, so the first token of a block is decided as there: from the last position
of the finished block before it, in a separate step (in the reference, in the pass that writes the keys). It is the most
likely token at every temperature. The other positions of a block are decided sub-block by sub-block: every step accepts
the most confident proposal and all above a threshold.

Where the published implementation fails, this sampler does not: a prompt of exactly one block is seen (the reference
ignores it), and a proposed mask token stays masked (the reference never ends).

With `use_block_cache`, a step computes only the sub-block that it decides, and reads the other keys of the block as
they were in the block's last complete pass. The complete block is computed in its first step and whenever the first
position of the sub-block is masked; a finished block is computed once more, with its final tokens, in the step that
decides the first token of the next one. These are the columns that the reference computes, and its stored run agrees
token for token. The points of such a step have the computed columns as queries and all columns as keys;
``attn.hook_fresh`` says which keys the step computed.

Pitfall: keys of the sub-block cache are stale, so its tokens differ from those of a run without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import QWEN_REQUIRED, THETA, VERIFIED, Family
from sinklens.sampling import decisions
from sinklens.sampling.blocks import BlockProgress, Blockwise
from sinklens.sampling.key_cache import History, Keys, Policy
from sinklens.sampling.parts import Drawn, divisors
from sinklens.sampling.sampler import FILLED_IN
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, Share


@dataclass(frozen=True)
class FastDllmV2Settings(Drawn, Blockwise):
    """Fast-dLLM v2's sampler (Wu et al., 2509.26328, and its reference code).

    The last block is always complete, as in the reference, unless only its first position is part of the answer: up to
    ``block_length - 2`` positions after the answer are decided too. The reference's ``max_new_tokens`` counts blocks,
    the first of which holds prompt tokens: to get its result, choose `gen_length` so that prompt and answer fill
    complete blocks and one more position. `top_p` applies at a temperature above 0.

    Attributes:
        small_block_size: positions per sub-block; default 8, or the block if 8 does not divide it.
        threshold: in addition to the most confident proposal, accept all with more confidence than this; 1 accepts one
            per step.
        temperature: randomness of the proposed tokens, except the first one of a block; 0 takes the most likely.
        stop: end a row at its first end-of-sequence token; later positions stay masked.
        use_block_cache: also compute only the current sub-block where possible, and reuse the keys of the other ones in
            its block, as they were in the block's last complete pass. This changes results.
        positions: number of positions that the run decides; set by the run.
    """

    name: ClassVar = "fast-dllm-v2"
    top_p: Annotated[float, Gt(0), Le(1)] | None = 0.95
    small_block_size: Count = 0
    threshold: Share = 1.0
    use_block_cache: bool = False
    positions: int = field(default=0, metadata=FILLED_IN)

    def derived(self) -> dict[str, Any]:
        return super().derived() | {
            "small_block_size": self.small_block_size or (self.block_length if self.block_length % 8 else 8),
            "positions": self.positions or self.gen_length,
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.block_length % self.small_block_size == 0,
            f"small_block_size {self.small_block_size} does not divide block_length {self.block_length}; choose one of "
            f"{divisors(self.block_length)}.",
        )
        require(
            not (self.use_cache and self.use_block_cache),
            "use_block_cache caches finished blocks too; leave use_cache out.",
        )

    @property
    def steps(self) -> int:
        """Largest number of steps: each decides at least one position."""
        return self.positions

    @property
    def reuses_keys(self) -> bool:
        """Whether a step computes a single sub-block."""
        return self.use_block_cache

    def fitted(self, prompt_lengths: Sequence[int]) -> "FastDllmV2Settings":
        """These settings, with the number of positions of the longest row."""
        return replace(self, positions=self.gen_length + max(map(self.spare, prompt_lengths)))

    def spare(self, prompt_length: int) -> int:
        """The positions that complete the last block."""
        beyond = -(prompt_length + self.gen_length) % self.block_length
        return 0 if beyond == self.block_length - 1 else beyond

    def progress(self, state: State) -> BlockProgress:
        progress = BlockProgress(state, lambda masked: [1] * masked, self.stop_ids(state), early=True)
        if self.use_block_cache:
            state.cache_keys(SubBlockCache(state, progress, self.small_block_size))
        return progress

    def step(self, state: State, progress: BlockProgress) -> None:
        canvas, block, counts = state.begin_step(progress.window()), progress.current(), progress.take_counts()
        where = _next((canvas == state.mask_id) & block, state, self.small_block_size)
        proposed, confidence = self.draw(state, canvas, where, greedy=_offsets(state) == 0)
        chosen = decisions.leftmost_best(confidence, counts) | (confidence > self.threshold)
        state.commit(chosen, proposed, best_by=confidence)


class SubBlockCache(Policy):
    """The keys that a step computes: those of the sub-block that it decides, or of a complete block."""

    def __init__(self, state: State, progress: BlockProgress, size: int) -> None:
        self._state, self._progress, self._size = state, progress, size
        self._offsets = _offsets(state)

    def plan(self, history: History) -> Int[Tensor, "batch 1 pos"]:
        """The plan of the next step, which also computes keys that were never computed."""
        progress, size = self._progress, self._size
        masked = (history.canvas == self._state.mask_id) & progress.current()
        first = _next(masked, self._state, size)
        place = torch.where(first, self._offsets, self._offsets.max()).amin(dim=1, keepdim=True)
        in_block, starts = progress.in_block(), place == 0
        sub_block = in_block & (self._offsets // size == place // size)
        new = history.age.amin(dim=1) < 0
        complete = (in_block & new | sub_block & masked & (self._offsets % size == 0)).any(dim=1, keepdim=True)
        fresh = torch.where(starts, progress.in_block(-1) | first, torch.where(complete, in_block, sub_block))
        gone = progress.after() | (starts & in_block & ~first)
        return torch.where(gone, int(Keys.GONE), torch.where(fresh, int(Keys.FRESH), int(Keys.STALE)))[:, None]


def _next(masked: Bool[Tensor, "batch pos"], state: State, size: int) -> Bool[Tensor, "batch pos"]:
    """The masked positions of each row's first unfinished sub-block; a block's first position is decided alone."""
    offsets = _offsets(state)
    group = torch.where(offsets == 0, -1, offsets // size).masked_fill(~masked, masked.shape[1])
    return masked & (group == group.amin(dim=1, keepdim=True))


def _offsets(state: State) -> Int[Tensor, "batch pos"]:
    """Place of each position within its block."""
    blocks = state.tree.attention_blocks
    assert blocks is not None
    return blocks.offsets(state.real)


FAMILIES = (
    Family(
        name="fast-dllm-v2",
        model_types=("Fast_dLLM_Qwen",),
        architecture="qwen2",
        sampler="fast-dllm-v2",
        verified=VERIFIED,
        shift=True,
        required=QWEN_REQUIRED,
        needed=THETA,
        mask_token_id=151665,
        block_causal=True,
        block_length_key="bd_size",
        own_classes=("Fast_dLLM_QwenForCausalLM",),
        checkpoints="Fast_dLLM_v2_1.5B, _7B",
        parameters=(1_543_714_304, 7_615_616_512),
    ),
)
SAMPLERS = (FastDllmV2Settings,)
