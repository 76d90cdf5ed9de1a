"""dKV-Cache's delayed cache (Ma et al., 2505.15781; horseee/dKV-Cache, `llada_dkv_cache_decode.py`).

A position is reused from the second step after its token was written: the first step that sees the token computes its
entry, and later steps reuse it. The first two steps of a block and every `refresh`-th one compute everything. Undecided
positions are always computed, those of later blocks included.

Where logits at j predict the token at j + 1, j is reused only if both tokens were written by then, dKV-Cache's rule
"un_right". Its other two rules skip positions that a policy here must compute: "right" (only j is written) skips those
that predict undecided ones, and "un" (only j + 1 is written) skips undecided ones.

What it approximates: a reused entry knows the tokens that were written up to the step after its own, but no later ones.

Pitfall: the published code needs rows with equally many decided positions; here each row reuses its own.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.sampling.key_cache import History, Policy
from sinklens.utils.arguments import Count, check_arguments


@dataclass(frozen=True)
class DelayedCache(Policy):
    """Reuse the entries of positions from the second step after their token was written.

    Attributes:
        refresh: steps of a block between complete steps (`cache_reloading_step`); 1 computes everything always.
    """

    refresh: Count = 8

    def __post_init__(self) -> None:
        check_arguments(self)

    def plan(self, history: History) -> Bool[Tensor, "batch pos"]:
        """Fresh where undecided, or written in the step before; with shifted logits also before such positions."""
        if history.step_in_block < 2 or history.step_in_block % self.refresh == 0:
            return torch.ones_like(history.undecided)
        fresh = history.undecided | (history.decided == 1)
        if history.shift:
            fresh[:, :-1] |= (fresh & history.real)[:, 1:].clone()
        return fresh
