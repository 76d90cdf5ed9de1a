"""Policies that treat sinks differently from other keys, to ask what a cache owes to its sinks.

A detector finds sinks in the scores of the step before, in each layer: a position that is a sink of any head counts.
Outside the block, either the sinks are computed and the others stale (`others="stale"`), or the sinks are stale and the
others hidden (`others="gone"`). The negation, ``~KeepSinks(...)``, exchanges sinks and others.

What they approximate: as `DualCache`, with the exceptions above. The first step of a block computes everything.

Pitfall: a key that is hidden has no attention, so it cannot become a sink again before the next complete step.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.sampling.key_cache import History, Keys, Policy
from sinklens.sinks.detectors import Detector, EpsilonOverMean, require_detector
from sinklens.sinks.track import build_track
from sinklens.utils.arguments import Count, check_arguments

Others = Literal["stale", "gone"]


@dataclass(frozen=True)
class KeepSinks(Policy):
    """Compute the sinks in every step and leave other keys stale, or keep the sinks and hide the others.

    Attributes:
        detector: what a sink is; it may read the scores only.
        k: at most this many sinks per layer, those whose strongest head is strongest; None for all that are found.
        others: what happens to the other positions outside the block: "stale" (sinks are fresh) or "gone" (sinks are
            stale).
        negated: exchange sinks and others; write ``~KeepSinks(...)``.
    """

    detector: Detector = field(default_factory=EpsilonOverMean)
    k: Count | None = None
    others: Others = "stale"
    negated: bool = False
    reads_scores: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        require_detector(self.detector)
        check_arguments(self)

    def __invert__(self) -> "KeepSinks":
        return replace(self, negated=not self.negated)

    def plan(self, history: History) -> Int[Tensor, "batch layer pos"]:
        """Everything fresh in the block's first step; then the block, and the sinks or the others."""
        if history.step_in_block == 0:
            return torch.full_like(history.age, int(Keys.FRESH))
        favored, rest = (Keys.FRESH, Keys.STALE) if self.others == "stale" else (Keys.STALE, Keys.GONE)
        chosen = ~history.gone
        if self.others == "stale" or bool(history.complete.any()):
            found = self._sinks(history) ^ self.negated
            chosen = found if self.others == "stale" else torch.where(history.complete[:, :, None], found, chosen)
        plan = torch.where(chosen, int(favored), int(rest))
        return torch.where(history.in_block, int(Keys.FRESH), plan)

    def _sinks(self, history: History) -> Bool[Tensor, "batch layer pos"]:
        track = _track(history)
        found = torch.from_numpy(self.detector.detect(track).to_numpy()[:, 0])
        if self.k is not None:
            strength = torch.from_numpy(np.nan_to_num(self.detector.strength(track).to_numpy()[:, 0], nan=-np.inf))
            best = torch.where(found, strength, -torch.inf).amax(dim=2)
            kth = best.topk(min(self.k, best.shape[-1]), dim=-1).values[..., -1:]
            return ((best >= kth) & (best > -torch.inf)).to(history.real.device)
        return found.any(dim=2).to(history.real.device)


def _track(history: History) -> Any:
    """The step before as a track of one step; scores are scaled to a mean of 1, as if every position were a query."""
    assert history.scores is not None
    scores = history.scores.float()
    mean = scores.sum(dim=-1, keepdim=True) / history.real.sum(dim=-1)[:, None, None, None]
    scaled = (scores / mean.clamp(min=torch.finfo(torch.float32).tiny)).cpu().numpy()
    masked = history.undecided.cpu().numpy()
    return build_track(
        score=scaled[:, None], token_id=history.canvas.to(torch.int32).cpu().numpy()[:, None],
        masked=masked[:, None], committed=np.zeros_like(masked)[:, None], is_real=history.real.cpu().numpy(),
        unmask_step=np.full(masked.shape, -1), attrs={"model": "", "prompt_length": 0},
    )  # fmt: skip
