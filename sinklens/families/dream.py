"""Dream, Dream-Coder and DiffuCoder: Qwen2 without the causal mask, whose logits predict the next position.

Dream's sampler: no blocks; a time that falls from 1 to eps decides how many tokens each step commits.

Dream was trained from an autoregressive model's weights: its logits at position i predict the token at i + 1.
`State.logits` has already shifted them back.

Fast-dLLM's sampler for Dream (`dream-blocks`): blocks from left to right, each filled by a schedule or by a threshold.

The first step of a block writes only the block's first token, which the position before it predicts. The later ones
decide inside the block: by Dream's schedule over the block's steps, or, with a threshold, every proposal that is
confident enough and at least one. Logits predict the next position; `State.logits` has shifted them back, inside the
columns that the step computes.

Source: NVlabs/Fast-dLLM, v1/dream/model/generation_utils_block.py. It takes one row with a threshold or the dual cache,
and uses negative entropy for every rule except the threshold's, whatever its name; here rows are independent, and `alg`
counts.

Pitfall: the first token of a block is written, no matter how unsure the model is of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import QWEN_REQUIRED, THETA, VERIFIED, Family
from sinklens.sampling import decisions
from sinklens.sampling.parts import DreamRule, EqualBlocks, StopAtEnd, check_threshold, divisors
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, NonNegative


@dataclass(frozen=True)
class DreamSettings(StopAtEnd, DreamRule):
    """Dream's sampler (Ye et al., 2508.15487, and its reference code).

    `top_p` is applied to all tokens, then `top_k` to those that are left.

    Attributes:
        alg: the confidence that orders commits: "origin" commits at random, "maskgit_plus" by probability,
            "topk_margin" by the margin over the second most likely token, "entropy" by negative entropy.
        alg_temp: temperature for choosing positions; None or 0 takes the most confident.
        threshold: also commit every proposal of at least this confidence, in the unit of `alg` (for "entropy" at most
            0); None turns it off.
        tokens_per_step: commit by `threshold` alone, and always the most confident proposal, but in the first i steps
            no more than i times this many tokens; None follows the schedule. With `alg` "maskgit_plus" this is
            Fast-dLLM's "confidence_threshold" without a cache, whose own `steps` are `gen_length` / `tokens_per_step`.
    """

    name: ClassVar = "dream"
    blocks_by: ClassVar = "dream-blocks"
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy"] = "entropy"
    alg_temp: NonNegative | None = None
    threshold: float | None = None
    tokens_per_step: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.alg != "origin" or self.threshold is None,
            "alg 'origin' does not use confidences; leave threshold out or choose another alg.",
        )
        check_threshold(self.alg, self.threshold)
        if self.tokens_per_step is not None:
            require(
                self.threshold is not None and not self.alg_temp,
                "tokens_per_step limits what threshold commits; set threshold, and leave alg_temp out.",
            )
            require(
                self.gen_length % self.tokens_per_step == 0,
                f"tokens_per_step {self.tokens_per_step} does not divide gen_length {self.gen_length}; choose one of "
                f"{divisors(self.gen_length)}.",
            )
            require(
                self.steps == self.gen_length,
                "with tokens_per_step, a run ends when no position is masked; leave steps out.",
            )

    def denoise(self, state: State) -> Iterator[None]:
        if self.stop_at_eos:
            state.require_end_tokens()
        times = self.times(self.steps)
        for step in state.while_undecided(range(self.steps)):
            yield
            self._step(state, times, step)

    def _step(self, state: State, times: Float[Tensor, " time"], step: int) -> None:
        canvas = state.begin_step()
        masks = (canvas == state.mask_id) & state.real
        where = masks & state.computed()
        proposed, confidence = self.draw(state, canvas, where)
        chosen = self._chosen(state, where, masks.sum(dim=1), confidence, times, step)
        ranking = None if self.alg == "origin" or self.alg_temp else confidence
        state.commit(chosen, proposed, fill=self.stop_at_eos, best_by=ranking)

    def _chosen(
        self,
        state: State,
        where: Bool[Tensor, "batch pos"],
        masks: Int[Tensor, " batch"],
        confidence: Float[Tensor, "batch pos"],
        times: Float[Tensor, " time"],
        step: int,
    ) -> Bool[Tensor, "batch pos"]:
        if self.alg == "origin":
            share = 1 - times[step + 1] / times[step] if step < self.steps - 1 else torch.tensor(1.0)
            drawn = state.noise.uniform(where, dtype=torch.float32) < share.to(where.device)
            return torch.zeros_like(where).masked_scatter(where, drawn)
        if self.tokens_per_step and self.threshold is not None:
            later = max(self.gen_length // self.tokens_per_step - 1 - step, 0) * self.tokens_per_step
            counts = [max(int(n) - later, 0) for n in masks.tolist()]
            return decisions.confident_within(confidence, counts, self.threshold, state.computed())
        counts = decisions.dream_schedule(masks, times, step)
        if not self.alg_temp:
            return decisions.most_confident(confidence, counts, self.threshold, state.computed())
        chosen = decisions.sampled_by_confidence(confidence, counts, self.alg_temp, state.noise)
        return chosen if self.threshold is None else chosen | (confidence >= self.threshold)


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

    def denoise(self, state: State) -> Iterator[None]:
        times = self.times(self.steps_per_block)
        for start in range(state.prompt_length, state.prompt_length + self.gen_length, self.block_length):
            block = slice(start, start + self.block_length)
            for number in state.while_undecided(range(self.steps_per_block), (slice(None), block)):
                yield
                self._step(state, block, times, number)

    def _step(self, state: State, block: slice, times: Float[Tensor, " time"], number: int) -> None:
        canvas = state.begin_step(block)
        masks = torch.zeros_like(state.real)
        decided = slice(block.start, block.start + 1) if number == 0 else block
        masks[:, decided] = (canvas[:, decided] == state.mask_id) & state.real[:, decided]
        proposed, confidence = self.draw(state, canvas, masks & state.computed())
        threshold = None if number == 0 else self.threshold
        sizes = masks.sum(dim=1)  # a threshold, and the first pass of a block, commit one token at least
        at_times = number > 0 and self.threshold is None
        counts = decisions.dream_schedule(sizes, times, number) if at_times else [1] * len(sizes)
        chosen = decisions.most_confident(confidence, counts, threshold, state.computed())
        state.commit(chosen, proposed, best_by=confidence)


FAMILIES = (
    Family(
        name="dream",
        model_types=("Dream", "dream"),
        architecture="qwen2",
        sampler="dream",
        verified=VERIFIED,
        shift=True,
        required=QWEN_REQUIRED,
        needed=THETA,
        mask_token_id=151666,
        own_classes=("DreamModel",),
        checkpoints="Dream-v0 Base/Instruct, Dream-Coder, DiffuCoder",
        parameters=(7_615_616_512,),
    ),
)
SAMPLERS = (
    DreamSettings,
    DreamBlockSettings,
)
