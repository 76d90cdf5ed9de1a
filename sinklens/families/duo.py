"""Duo: uniform diffusion of a DiT.

Duo's sampler: every token of the canvas may change in every update, and no token is a mask.

Noise is a token drawn uniformly from the vocabulary, so no position shows whether it is decided. All answer positions
are therefore *undecided* until the last step, which ends the run. To see what a step changed, compare consecutive
canvases of ``run.canvas``. Tokens are drawn in float64.

The settings are those of the ψ samplers of s-sahoo/duo; the defaults are ancestral sampling. ``final_step="ancestral"``
or ``"greedy"``, the published ``noise_removal``, adds a closing step after ``steps`` updates. It counts as a step:
``run.steps_run`` is then ``steps`` + 1. Guidance, cache policies and `Remask` are refused: a step needs all positions,
and there is no mask.

Pitfall: `unmask_step` of an answer position is the last step, whenever its token was last changed.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.families.modulated import DIT, DIT_NEEDED, DIT_REQUIRED
from sinklens.sampling.psi import PsiSampler, answer
from sinklens.sampling.random_canvas import RandomCanvas
from sinklens.sampling.state import State


@dataclass(frozen=True)
class DuoSettings(PsiSampler, RandomCanvas):
    """Duo's samplers: ancestral, and ψ (Sahoo et al., 2506.10892, and its reference code).

    Attributes:
        gen_length: number of answer positions; all begin as random tokens.
    """

    name: ClassVar = "duo"
    masked: ClassVar = False

    def begin(self, state: State) -> None:
        self.check_start(state)
        state.canvas = self.begun(state, state.prompt_length)
        state.undecided = answer(state, self.gen_length)

    def undecided(self, state: State, last: bool) -> Bool[Tensor, "batch pos"] | None:
        return torch.zeros_like(state.real) if last else answer(state, self.gen_length)

    def log_probs(
        self, state: State, logits: Float[Tensor, "drawn vocab"], present: Int[Tensor, " drawn"]
    ) -> Float[Tensor, "drawn vocab"]:
        return logits.log_softmax(dim=-1)

    def posterior(
        self,
        state: State,
        probs: Float[Tensor, "drawn vocab"],
        present: Int[Tensor, " drawn"],
        alpha_t: Float[Tensor, ""],
        alpha_s: Float[Tensor, ""],
    ) -> Float[Tensor, "drawn vocab"]:
        """With r = α_t / α_s, V the size of the vocabulary and x the present token:

        [(α_t V p(y) + r − α_t) [y = x] + (α_s − α_t) p(y) + (1 − r)(1 − α_s) / V] / (α_t V p(x) + 1 − α_t)
        """
        size, ratio, place = probs.shape[-1], alpha_t / alpha_s, present[:, None]
        kept = alpha_t * size * probs.gather(-1, place)
        weights = (alpha_s - alpha_t) * probs + (1 - ratio) * (1 - alpha_s) / size
        return weights.scatter_add(-1, place, kept + (ratio - alpha_t)) / (kept + (1 - alpha_t))

    def noised(
        self, state: State, probs: Float[Tensor, "drawn vocab"], alpha_s: Float[Tensor, ""]
    ) -> Float[Tensor, "drawn vocab"]:
        return alpha_s * probs + (1 - alpha_s) / probs.shape[-1]


FAMILIES = (
    replace(
        DIT,
        name="duo",
        bound="uniform",
        model_types=("duo",),
        sampler="duo",
        needed=DIT_NEEDED,
        required={**DIT_REQUIRED, "time_conditioning": (True,)},
        masked=False,
        own_classes=("DUO",),
        checkpoints="Duo, Duo-distilled",
        parameters=(169_627_218, 424_477_010),
    ),
)
SAMPLERS = (DuoSettings,)
