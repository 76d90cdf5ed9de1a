"""Patch a subspace: of the value at a point, only the part inside a few directions comes from another run.

With B the orthonormal basis [rank, d] of the subspace, h the value here and v that of the source,

    h + (v − h) Bᵀ B

so what is orthogonal to the subspace stays (interchange interventions in a subspace: Geiger et al., 2303.02536).

Pitfall: a large effect of a subspace does not mean that the model uses it in its own runs. A direction that nothing
varies along can be joined with one that nothing reads, and the two together carry an effect that neither has (Makelov
et al., 2311.17030). Compare with a random subspace of the same rank, and with the complete patch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.patching import PatchHooks
from sinklens.runs.caches import chosen_points
from sinklens.runs.intervention import HookFunction, Pairs, RunContext

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class PatchSubspace(PatchHooks):
    """Patch the part of another run's values that lies in a subspace; everything else is as in `PatchHooks`.

        kept = Activations(names=[point])
        generate(model, other, hooks=kept)
        generate(model, prompt, hooks=PatchSubspace(source=kept.caches, names=[point], basis=direction[None]))

    Attributes:
        names: points with a vector at each position, of the size of those of `basis`; heads are flattened.
        basis: vectors that span the subspace; they need not be orthonormal.

    Raises:
        SettingError: no points; no vector, one of another size than the values, or vectors that are linearly dependent.
    """

    on_canvas: ClassVar[bool] = False

    basis: Float[Tensor, "rank d"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names is None:
            raise SettingError("PatchSubspace needs names=, the points that the vectors of basis belong to.")
        if self.basis.ndim != 2 or not len(self.basis) or int(torch.linalg.matrix_rank(self.basis)) < len(self.basis):
            raise SettingError(
                f"basis must be linearly independent vectors [rank, d], at least one; got shape "
                f"{list(self.basis.shape)}."
            )

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`: those of the complete patch, of which only the part in the subspace is kept."""
        span = torch.linalg.qr(self.basis.detach().float().T).Q  # [d, rank]

        def inside(patch: HookFunction) -> HookFunction:
            def patched(value: Tensor, hook: Point) -> Tensor | None:
                here = value.flatten(2).float()
                if here.shape[-1] != len(span):
                    raise SettingError(
                        f"basis has vectors of size {len(span)}, and the values at {hook.name} have size "
                        f"{here.shape[-1]}."
                    )
                complete, along = patch(value, hook), span.to(value.device)
                if complete is None:
                    return None
                moved = (complete.flatten(2).float() - here) @ along @ along.T
                return (here + moved).to(value.dtype).view_as(value)

            return patched

        points = chosen_points(self.names, model, self.layers)
        return [(name, inside(act) if name in points else act) for name, act in super().pairs(model, run)]
