"""SEDD: score-entropy diffusion of a DiT.

SEDD's sampler: steps along the scores of an absorbing diffusion.

For each position and token the network gives a log score: the log ratio of two probabilities, that of the canvas with
this token at this position and that of the canvas as it is. Only scores of masked positions are used, since a decided
token never changes.

Fixed tokens are the prompt, and those that `interventions.Suffix` appends. Prompts may differ in length.

Pitfall: scores are not probabilities; at a masked position of a trained network they sum to about 1 / expm1(σ).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from sinklens.families.modulated import DIT, DIT_ROTATION
from sinklens.sampling import decisions
from sinklens.sampling.noise_levels import FallingTime, StepTime
from sinklens.sampling.state import State


@dataclass(frozen=True)
class SeddSettings(FallingTime):
    """SEDD's sampler (Lou et al., 2310.16834, and its reference code).

    Attributes:
        predictor: the update: "euler" or "analytic".
        noise_removal: end with an analytic step in which no position stays masked.
    """

    name: ClassVar = "sedd"
    predictor: Literal["euler", "analytic"] = "euler"

    def weights(
        self, state: State, logits: Float[Tensor, "masked vocab"], times: StepTime
    ) -> Float[Tensor, "masked vocab"]:
        if state.tree.hf.config.scale_by_sigma:
            logits = logits - times.sigma.expm1().log() - math.log(logits.shape[-1] - 1)
        score = logits.exp()
        score[:, state.mask_id] = 1
        if self.predictor == "analytic" or times.closing:
            return decisions.analytic_weights(score, state.mask_id, times.decrease)
        rate = 0.999 / (1 - 0.999 * times.time)
        return decisions.euler_weights(score, state.mask_id, rate * (times.time - times.until))


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """SEDD's training configuration as the config of dit.py; the mask token comes after the ``tokens`` others."""
    model = config["model"]
    return {
        "vocab_size": config["tokens"] + 1,
        "hidden_size": model["hidden_size"],
        "cond_dim": model["cond_dim"],
        "num_hidden_layers": model["n_blocks"],
        "num_attention_heads": model["n_heads"],
        "max_position_embeddings": model["length"],
        "scale_by_sigma": model["scale_by_sigma"],
        **DIT_ROTATION,
    }


FAMILIES = (
    replace(
        DIT,
        name="sedd",
        bound="score entropy",
        sampler="sedd",
        convert=converted,
        foreign=r"backbone\.|rotary_emb\.(cos|sin)_cached$",
        needed=(
            "graph.type",
            "noise.type",
            "tokens",
            "model.hidden_size",
            "model.cond_dim",
            "model.n_blocks",
            "model.n_heads",
            "model.length",
            "model.scale_by_sigma",
        ),
        required={"graph.type": ("absorb",), "noise.type": ("loglinear",), "model.type": ("ddit",)},
        mask_is_last=True,
        checkpoints="sedd-small, sedd-medium",
        parameters=(169_627_218, 424_477_010),
    ),
)
SAMPLERS = (SeddSettings,)
