"""Refresh a cache after some steps, or when the keys have moved (after Elastic-Cache, Nguyen-Tri et al., 2510.14973).

Between refreshes another policy decides. Where `drift` has a bound, each row also computes one *probe*: of the
positions that it would not compute otherwise, the one that got the most attention in the step before, summed over
layers and heads. The drift of its key, the relative change ‖k_t − k‖ / ‖k_t‖ against the entry it replaces, needs no
second pass. If it exceeds the bound in any layer, the row computes everything in the next step.

What it approximates: Elastic-Cache measures attention, not keys, and refreshes only the layers from the first one that
drifts; here all layers are refreshed.

Pitfall: the probe enlarges the window that a step computes, up to everything between it and the block.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.caching.fast_dllm import DualCache
from sinklens.errors import SettingError
from sinklens.sampling.key_cache import History, Policy
from sinklens.utils.arguments import Count, check_arguments
from sinklens.utils.integers import is_finite


@dataclass(frozen=True)
class DriftAbove:
    """A bound on the drift of a key; write ``drift > 0.1``.

    Attributes:
        bound: the largest drift that does not trigger a refresh.
    """

    bound: float | int


class _Drift:
    """Represents the drift of a key in a condition."""

    def __gt__(self, bound: float | int) -> DriftAbove:
        return DriftAbove(bound)

    def __repr__(self) -> str:
        return "drift"


drift = _Drift()


@dataclass(frozen=True)
class Refresh(Policy):
    """Compute everything every `every` steps of a block, or when the probe's key has moved.

    Attributes:
        every: steps of a block between complete steps; None for none after the first.
        where: the condition for a complete step, ``drift > x``; None for none.
        within: the policy of the other steps.
    """

    every: Count | None = None
    where: DriftAbove | None = None
    within: Policy = field(default_factory=DualCache)

    def __post_init__(self) -> None:
        if not isinstance(self.within, Policy):
            raise SettingError(f"within must be a policy such as DualCache(); got {self.within!r}.")
        if self.where is not None and not isinstance(self.where, DriftAbove):
            raise SettingError(f"where must be a condition such as drift > 0.1; got {self.where!r}.")
        check_arguments(self)
        if self.where is not None and not is_finite(self.where.bound):
            raise SettingError(f"drift is compared with a finite number; got {self.where.bound!r}.")
        if self.every is None and self.where is None:
            raise SettingError("Refresh needs every= or where=; without them use the inner policy alone.")
        needs = self.where is not None
        object.__setattr__(self, "reads_scores", needs or self.within.reads_scores)
        object.__setattr__(self, "reads_drift", needs or self.within.reads_drift)
        object.__setattr__(self, "reads_queries", self.within.reads_queries)

    def plan(self, history: History) -> Tensor:
        """The inner plan with the probe, or everything."""
        everything = torch.ones_like(history.undecided)
        if history.step_in_block == 0 or (self.every and history.step_in_block % self.every == 0):
            return everything
        inner = self.within.plan(history)
        if self.where is None:
            return inner
        if inner.dtype is not torch.bool or inner.ndim > 2:
            raise SettingError(
                f"where= needs an inner policy that returns booleans [batch, pos]; {type(self.within).__name__} "
                f"hides keys or chooses by layer. Use every=."
            )
        inner = inner.expand_as(everything)
        computed = history.with_predictors(inner)
        return inner | self._probe(history, computed) | self._moved(history, computed)[:, None]

    def _probe(self, history: History, computed: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """The most attended position of each row outside `computed`."""
        assert history.scores is not None
        total = history.scores.sum(dim=(1, 2)).masked_fill(computed | ~history.real, -torch.inf)
        return torch.zeros_like(computed).scatter(1, total.argmax(dim=1, keepdim=True), True) & ~computed

    def _moved(self, history: History, computed: Bool[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows whose probe drifted beyond the bound in the step before; not after a complete step."""
        assert history.drift is not None
        assert self.where is not None
        outside = history.drift.masked_fill(computed[:, None], torch.nan)
        above = (outside > self.where.bound).flatten(1).any(dim=1)
        return above & ~history.complete[:, 0]
