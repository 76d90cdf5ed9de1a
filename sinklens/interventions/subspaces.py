"""Patch a subspace: of the value at a point, only the part inside a few directions comes from another run.

With B the orthonormal basis [rank, d] of the subspace, h the value here and v that of the source,

    h + (v − h) Bᵀ B

so what is orthogonal to the subspace stays (interchange interventions in a subspace: Geiger et al., 2303.02536).

Pitfall: a large effect of a subspace does not mean that the model uses it in its own runs. A direction that nothing
varies along can be joined with one that nothing reads, and the two together carry an effect that neither has (Makelov
et al., 2311.17030). Compare with a random subspace of the same rank, and with the complete patch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.interventions.patching import PatchHooks


@dataclass(frozen=True, kw_only=True)
class PatchSubspace(PatchHooks):
    """Patch the part of another run's values that lies in a subspace; everything else is as in `PatchHooks`.

        kept = Activations(names=[point])
        generate(model, other, hooks=kept)
        generate(model, prompt, hooks=PatchSubspace(source=kept.caches, names=[point], basis=direction[None]))

    Attributes:
        basis: vectors that span the subspace, along the last axis of the values; they need not be orthonormal.

    Raises:
        SettingError: no vector, one of another size than the values, or vectors that are linearly dependent.
    """

    basis: Float[Tensor, "rank d"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis.ndim != 2 or not len(self.basis) or int(torch.linalg.matrix_rank(self.basis)) < len(self.basis):
            raise SettingError(
                f"basis must be linearly independent vectors [rank, d], at least one; got shape "
                f"{list(self.basis.shape)}."
            )

    def _chosen_of(self, here: Tensor, new: Tensor, name: str, *places: Any) -> Tensor:
        """See `PatchHooks`."""
        if here.shape[-1] != self.basis.shape[1]:
            raise SettingError(
                f"basis has vectors of size {self.basis.shape[1]}, and the values at {name} have size {here.shape[-1]}."
            )
        complete = super()._chosen_of(here, new, name, *places)
        span = torch.linalg.qr(self.basis.detach().float().T).Q.to(here.device)  # [d, rank]
        moved = (complete.float() - here.float()) @ span @ span.T
        return (here.float() + moved).to(here)
