"""Fast-dLLM's sampler for Dream: blocks from left to right, each filled by a schedule or by a threshold.

The first step of a block writes only the block's first token, which the position before it predicts. The later ones
decide inside the block: by Dream's schedule over the block's steps, or, with a threshold, every proposal that is
confident enough and at least one. Logits predict the next position; `State.logits` has shifted them back, inside the
columns that the step computes.

Source: NVlabs/Fast-dLLM, v1/dream/model/generation_utils_block.py. It takes one row with a threshold or the dual cache,
and names all rules other than the threshold's alike (negative entropy); here rows are independent, and `alg` counts.

Pitfall: the first token of a block is written however unsure the model is of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.parts import DreamRule, EqualBlocks, check_threshold
from sinklens.sampling.sampler import require

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class DreamBlockSettings(DreamRule, EqualBlocks):
    """Fast-dLLM's sampler for Dream (NVlabs/Fast-dLLM, v1/dream), for use with or without a cache policy.

    `top_p` is applied to all tokens, then `top_k` to those that are left.

    Attributes:
        steps: denoising steps of the complete generation, summed over blocks; default `gen_length`. With a threshold a
            block ends as soon as it is filled. The first step of a block decides its first token alone, so with one
            step per block the other positions stay masked, as in Fast-dLLM.
        alg: the confidence that orders commits: "entropy" (negative entropy), "maskgit_plus" (probability), or
            "topk_margin" (margin over the second most likely token).
        threshold: commit every proposal of the block of at least this confidence, in the unit of `alg`, and at least
            the most confident one, instead of the schedule's share; None follows the schedule. Fast-dLLM's
            "confidence_threshold" is `alg` "maskgit_plus" with a threshold.
        eps: time at the end of a block's schedule, above 0.
    """

    name: ClassVar = "dream-blocks"
    alg: Literal["entropy", "maskgit_plus", "topk_margin"] = "entropy"
    threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.threshold is None or self.steps == self.gen_length,
            "with a threshold, blocks end when they are filled; leave steps out.",
        )
        check_threshold(self.alg, self.threshold)

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        times = self.times(self.steps_per_block)
        for start in range(state.prompt_length, state.prompt_length + self.gen_length, self.block_length):
            block = slice(start, start + self.block_length)
            for number in range(self.steps_per_block):
                if not bool((state.canvas[:, block] == state.mask_id).any()):
                    break
                yield
                self._step(state, block, times, number)

    def _step(self, state: "State", block: slice, times: Float[Tensor, " time"], number: int) -> None:
        canvas = state.begin_step(block)
        masks = torch.zeros_like(state.real)
        decided = slice(block.start, block.start + 1) if number == 0 else block
        masks[:, decided] = (canvas[:, decided] == state.mask_id) & state.real[:, decided]
        where = masks & state.computed()
        drawn = self.draw(state, canvas, where)
        scores = decisions.dream_confidence(self.alg, drawn.probs, drawn.candidates)
        confidence = state.spread_confidence(where, scores)
        threshold = None if number == 0 else self.threshold
        counts = self._counts(masks.sum(dim=1), times, number)
        state.commit(decisions.most_confident(confidence, counts, threshold, state.padding), drawn.canvas)

    def _counts(self, masks: Int[Tensor, " batch"], times: Float[Tensor, " time"], number: int) -> list[int]:
        """Tokens that the step commits in each row, at least those that a threshold allows."""
        if number == 0 or self.threshold is not None:
            return [1] * len(masks)
        return decisions.dream_schedule(masks, times, number)
