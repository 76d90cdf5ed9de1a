"""MDLM's sampler: a time falls from 1 to 0, and each step decides some of the masked positions at random.

A step from time t to s decides a masked position with probability (t − s) / t and draws its token from the model's
distribution without the mask. Decided positions, including the prompt's, do not change.

Pitfall: "ddpm" computes with 0.999 t where "ddpm_cache" computes with t. The same random numbers therefore may give
different texts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.noise_levels import FallingTime, StepTime

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class MdlmSettings(FallingTime):
    """MDLM's sampler (Sahoo et al., 2406.07524, and its reference code).

    A pass of an untimed network is left out while the canvas does not change and nothing is watched. The reference code
    does so with "ddpm_cache" only; the tokens are the same.

    Attributes:
        predictor: the update: "ddpm_cache" or "ddpm", or "analytic", SEDD's.
        noise_removal: end with a step that decides every position that is still masked: by the most likely token, or
            with "analytic" by one more draw.
    """

    name: ClassVar = "mdlm"
    predictor: Literal["ddpm", "ddpm_cache", "analytic"] = "ddpm_cache"

    def weights(
        self, state: "State", logits: Float[Tensor, "masked vocab"], times: StepTime
    ) -> Float[Tensor, "masked vocab"]:
        """See `FallingTime.weights`."""
        probs = decisions.token_probabilities(logits, state.mask_id)
        if self.predictor == "analytic":
            score = probs / times.sigma.expm1()
            score[:, state.mask_id] = 1
            return decisions.analytic_weights(score, state.mask_id, times.decrease)
        if times.closing:
            return probs
        time, until = times.time, times.until
        if self.predictor == "ddpm":
            time, until = (1 - (-decisions.log_linear_sigma(one)).exp() for one in (time, until))
        return decisions.posterior_weights(probs, state.mask_id, until / time)

    def draws(self, times: StepTime) -> bool:
        """See `FallingTime.draws`."""
        return self.predictor == "analytic" or not times.closing
