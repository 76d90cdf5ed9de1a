"""The two caches of Fast-dLLM (Wu et al., 2505.22618, v1 of the code): prefix and dual.

The first step of each block computes all positions; nothing survives from the block before. Later steps of the block
reuse the entries of the columns before it (`PrefixCache`), or of those before and after it (`DualCache`).

What they approximate: a reused entry belongs to the canvas of the block's first step, where the block was still masked.
In particular the entries of the prompt and of earlier blocks do not know the tokens that the block has got since then.

Pitfall: of a sampler without blocks the answer is the block, so its only complete step is the first of the run.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.sampling.key_cache import History, Policy


@dataclass(frozen=True)
class PrefixCache(Policy):
    """Reuse the keys and values of the columns before the active block until the next block begins."""

    def plan(self, history: History) -> Bool[Tensor, " pos"]:
        """Fresh from the block's first column on; everything in its first step."""
        columns = torch.arange(history.canvas.shape[1], device=history.canvas.device)
        return columns >= (history.block.start if history.step_in_block else 0)


@dataclass(frozen=True)
class DualCache(Policy):
    """Reuse the keys and values of the columns before and after the active block until the next block begins."""

    def plan(self, history: History) -> Bool[Tensor, " pos"]:
        """Fresh inside the block; everything in its first step."""
        return history.in_block if history.step_in_block else torch.ones_like(history.in_block)
