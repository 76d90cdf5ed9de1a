"""ReMDM: ψ samplers for masked diffusion, which may mask a decided token again.

With κ = 1 (the default) nothing is masked again: this is ancestral sampling as s-sahoo/duo computes it for MDLM. A
decided position predicts its own token, whatever the network says (SUBS), and a masked one never the mask.

If the previous update changed nothing and the network is untimed, the published code skips the pass. Here every step
runs its pass; the tokens are the same.

Pitfall: decided positions use random numbers too, so the numbers of another sampler's run give a different text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.sampling.psi import PsiSampler

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class RemdmSettings(PsiSampler):
    """Ancestral and ψ samplers of masked diffusion (Wang et al., 2503.00307; s-sahoo/duo's implementation for MDLM)."""

    name: ClassVar = "remdm"

    def log_probs(
        self, state: "State", logits: Float[Tensor, "drawn vocab"], present: Int[Tensor, " drawn"]
    ) -> Float[Tensor, "drawn vocab"]:
        """See `PsiSampler.log_probs`; 0 and −inf at decided positions."""
        without = logits.index_fill(-1, torch.tensor([state.mask_id], device=logits.device), -torch.inf)
        own = torch.full_like(logits, -torch.inf).scatter(-1, present[:, None], 0.0)
        return torch.where((present == state.mask_id)[:, None], without.log_softmax(dim=-1), own)

    def posterior(
        self,
        state: "State",
        probs: Float[Tensor, "drawn vocab"],
        present: Int[Tensor, " drawn"],
        alpha_t: Float[Tensor, ""],
        alpha_s: Float[Tensor, ""],
    ) -> Float[Tensor, "drawn vocab"]:
        """(α_s − α_t) / (1 − α_t) p for tokens and (1 − α_s) / (1 − α_t) for the mask; a decided token stays."""
        weights = (alpha_s - alpha_t) / (1 - alpha_t) * probs
        weights[:, state.mask_id] = (1 - alpha_s) / (1 - alpha_t)
        return torch.where((present == state.mask_id)[:, None], weights, probs)

    def noised(
        self, state: "State", probs: Float[Tensor, "drawn vocab"], alpha_s: Float[Tensor, ""]
    ) -> Float[Tensor, "drawn vocab"]:
        """See `PsiSampler.noised`."""
        weights = alpha_s * probs
        weights[:, state.mask_id] = 1 - alpha_s
        return weights
