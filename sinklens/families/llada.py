"""LLaDA's sampler: blocks from left to right; the least confident proposals stay masked.

Within a block, every step proposes a token at each masked position and commits the next share of them, the most
confident first. If the proposal is the mask token itself, the position stays masked, as in the reference code.

Under a cache policy a step decides only positions that it computes, and a row's block ends when none of its own is
masked; masks that earlier blocks kept are decided only in steps that compute them, as in Fast-dLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.parts import EqualBlocks, Guided, StopAtEnd
from sinklens.sampling.sampler import require
from sinklens.utils.arguments import NonNegative, Share

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class LladaSettings(StopAtEnd, Guided, EqualBlocks):
    """LLaDA's sampler (Nie et al., 2502.09992, and its reference code).

    Attributes:
        threshold: also commit every proposal of at least this confidence, which can end a block early; None turns it
            off. Not allowed with "random", which has no confidences to compare.
        factor: commit by Fast-dLLM's factor rule instead of the schedule: of the proposals by falling confidence, rank
            r = 1, 2, … must have at least 1 − factor / (r + 1), and the first rank always passes; None turns it off.
        by_quota: commit at least the step's share of the block. False commits the most confident proposal and what
            `threshold` or `factor` adds; masks may then be left when the block's steps are used up, as in Fast-dLLM.
        logits_eos_inf: never propose an end-of-sequence token.
        confidence_eos_eot_inf: treat end-of-sequence and end-of-turn proposals as having no confidence. The reference
            code does so at temperature 0; above it, only for end-of-turn.
    """

    name: ClassVar = "llada"
    threshold: Share | None = None
    factor: NonNegative | None = None
    by_quota: bool = True
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False

    @property
    def leaves_masks(self) -> bool:
        """See `Sampler.leaves_masks`."""
        return not self.by_quota

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.steps <= self.gen_length,
            f"steps {self.steps} is more than gen_length {self.gen_length}: each step commits at least one token.",
        )
        require(
            self.remasking != "random" or self.threshold is None,
            "remasking 'random' does not use confidences; leave threshold out or choose remasking 'low_confidence'.",
        )
        require(
            self.factor is None or (self.threshold is None and self.remasking == "low_confidence"),
            "factor replaces threshold and needs confidences; leave threshold and remasking out.",
        )
        require(
            self.by_quota or self.threshold is not None or self.factor is not None,
            "by_quota=False commits by threshold or factor alone; set one of them.",
        )
        require(
            not (self.stop_at_eos and self.logits_eos_inf),
            "logits_eos_inf never proposes the token that stop_at_eos waits for; choose one of them.",
        )

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        if self.stop_at_eos:
            state.require_end_tokens()
        for start in range(state.prompt_length, state.prompt_length + self.gen_length, self.block_length):
            end = start + self.block_length
            masked = state.canvas[:, start:end] == state.mask_id
            for number, counts in enumerate(decisions.even_schedule(masked.sum(dim=1), self.steps_per_block)):
                first = start if number and state.keys is not None else 0
                if not bool((state.canvas[:, first:end] == state.mask_id).any()):
                    break
                yield
                self._step(state, slice(start, end), counts if self.by_quota else [1] * len(counts), first)

    def _step(self, state: "State", block: slice, counts: list[int], first: int) -> None:
        canvas = state.begin_step(block)
        where = canvas == state.mask_id
        where[:, block.stop :] = False
        waiting = ~where[:, first:].any(dim=1, keepdim=True)  # alone, these rows would be in their next block
        where &= state.computed() & ~waiting
        logits = state.logits(canvas, where, self.cfg_scale)
        if self.logits_eos_inf:
            logits[:, list(state.eos_ids)] = -torch.inf
        proposed, confidence = self.propose(state, canvas, where, logits)
        if self.factor is None:
            chosen = decisions.most_confident(confidence, counts, self.threshold, state.padding)
        else:
            chosen = decisions.by_rank(confidence, self.factor)
        state.commit(chosen, proposed, fill=self.stop_at_eos)

    def confidence(
        self, state: "State", logits: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        """Probability of the proposed token; without that of end tokens under `confidence_eos_eot_inf`."""
        if self.confidence_eos_eot_inf:
            ended = [*state.eos_ids, *([] if state.eot_id is None else [state.eot_id])]
            logits = logits.clone()
            logits[:, ended] = -torch.inf
        return super().confidence(state, logits, candidates)
