"""Where an intervention acts, by how much of the answer is still undecided: a schedule over the noise level.

A schedule by ``steps=`` belongs to one number of steps. `AtNoise` says the same for runs of any length, and in the
passes of a likelihood, whose answers are masked at random.

Limitation: the share is that of all positions after the prompt. A `Suffix` or a given part of the answer counts as
decided, so such a run begins below 1.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.interventions.where import Chooser, Moment, OfStep
from sinklens.utils.arguments import Share, check_arguments


@dataclass(frozen=True)
class AtNoise(OfStep):
    """All positions of the rows whose undecided share of the answer lies in a range, at the steps where it does.

        Steer(direction, where=AtNoise(0.5, 1.0) & "masked")  # undecided positions, while half the answer is open

    Attributes:
        least, most: the range, ends included; 1 is an answer without any token, 0 a finished one.

    Raises:
        SettingError: not numbers with 0 ≤ least ≤ most ≤ 1; in a run, a model without a mask token.
    """

    least: Share
    most: Share = 1.0

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.least > self.most:
            raise SettingError(f"AtNoise takes 0 <= least <= most <= 1; got {self.least} and {self.most}.")

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        if now.need_run().causal or now.model.mask_token_id is None:
            raise SettingError(
                f"AtNoise counts undecided positions of the answer, and {now.model.name} has no masks; use steps=."
            )
        return super().start(now)

    def at(self, now: Moment) -> Bool[Tensor, "batch 1 1 pos"]:
        """See `Rule.at`."""
        run = now.need_run()
        assert now.canvas is not None, "every step of a run has a canvas"
        answer = torch.arange(run.real.shape[1], device=run.real.device) >= run.prompt_length
        undecided = (now.canvas.undecided & run.real & answer).sum(dim=1)
        share = undecided / (run.real & answer).sum(dim=1).clamp(min=1)
        inside = (share >= self.least) & (share <= self.most)
        return (inside[:, None] & run.real)[:, None, None]
