"""Sparse-dLLM's eviction (Song et al., 2508.02558; OpenMOSS/Sparse-dLLM): keys that matter little are hidden.

The first two steps of a block compute everything. Then, in each layer, the positions outside the block are ranked, and
only the best share is kept until the next complete step; the block itself is computed in every step. The published rank
of a position is the mean over heads of (mean rotated query of the block) · (its rotated key), unscaled and without
softmax, followed by a maximum over neighboring positions.

What it approximates: the block no longer sees the hidden positions, and the kept ones are stale.

Pitfall: hidden keys are masked, not removed, so that a map keeps one column per position; they take up memory still.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import max_pool1d

from sinklens.errors import SettingError
from sinklens.sampling.key_cache import History, Keys, Policy
from sinklens.utils.arguments import Count, Share, check_arguments

By = Literal["queries", "score"]


@dataclass(frozen=True)
class Evict(Policy):
    """Hide all but the best share of the positions outside the block, from its third step on.

    Attributes:
        keep: share of these positions that each layer keeps, rounded down; from 0 to 1.
        by: their rank: "queries", Sparse-dLLM's, or "score", their sink score in the step before, averaged over heads.
        kernel: width of the maximum over neighbors, an odd number; 1 for none.
    """

    keep: Share = 0.5
    by: By = "queries"
    kernel: Count = 3

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.kernel % 2 == 0:
            raise SettingError(f"kernel must be an odd number of positions; got {self.kernel!r}.")
        object.__setattr__(self, "reads_queries", self.by == "queries")
        object.__setattr__(self, "reads_scores", self.by == "score")

    def plan(self, history: History) -> Int[Tensor, "batch layer pos"]:
        """Everything fresh in two steps; then the block fresh, the best others stale, the rest gone.

        The best are chosen after a complete step.
        """
        if history.step_in_block < 2:
            return torch.full_like(history.age, int(Keys.FRESH))
        chosen = history.complete[:, :, None]
        kept = torch.where(chosen, self._kept(history), ~history.gone) if bool(chosen.any()) else ~history.gone
        plan = torch.where(kept, int(Keys.STALE), int(Keys.GONE))
        return torch.where(history.in_block, int(Keys.FRESH), plan)

    def _kept(self, history: History) -> Tensor:
        """True at the best positions outside the block, [batch, layer, pos]."""
        outside = ~history.in_block
        ranked = self._importance(history).masked_fill(~history.real[:, None], -torch.inf)[:, :, outside]
        if self.kernel > 1:  # the positions before and after the block are neighbors, as in the published code
            ranked = max_pool1d(ranked.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2).view_as(ranked)
        ranked = ranked.masked_fill(~history.real[:, None, outside], -torch.inf)
        order = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        counts = (history.real[:, outside].sum(dim=1) * self.keep).long()
        kept = torch.zeros_like(history.age, dtype=torch.bool)
        kept[:, :, outside] = order < counts[:, None, None]
        return kept

    def _importance(self, history: History) -> Float[Tensor, "batch layer pos"]:
        if self.by == "score":
            assert history.scores is not None
            return history.scores.mean(dim=2)
        assert history.queries is not None
        layers = []
        for layer in range(history.age.shape[1]):
            query, key = history.queries[:, layer], history.keys(layer).float()
            grouped = query.unflatten(1, (key.shape[1], -1)).mean(dim=2)  # heads that share keys
            layers.append(torch.einsum("bhd,bhpd->bp", grouped, key) / key.shape[1])
        return torch.stack(layers, dim=1)
