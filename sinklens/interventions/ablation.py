"""Replace what components write: a number, a mean, the outputs of other prompts, or what a layer read.

`Ablate` acts at a point of the chosen layers; `AblateHeads`, `AblateMLPs` and `SkipLayers` are short for it. Heads are
ablated at ``hook_z``, before the output projection: after it they are summed and can no longer be separated. A skipped
layer is still computed, and nothing becomes faster.

Pitfall: a zero is not a typical output. Where a head's mean is large, setting it to zero moves the stream away from
anything the model has seen; compare with the mean and with resampled outputs. And a layer that does little at one noise
level may matter at another: compare the effect by step, under replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.names import axes_of
from sinklens.hooks.points import Point
from sinklens.interventions.donors import Donors, random_places
from sinklens.interventions.places import AtPositions, index_mask
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, RunContext, layer_of, within
from sinklens.utils.arguments import Seed, checked, plainly_shown

Z, PARTS = "attn.hook_z", {"layer": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class Ablate(AtPositions):
    """Replace the value of a point of the layers.

        Ablate(point="hook_mlp_out", layers=[1], by="mean")  # an MLP writes its mean over the positions of the row
        Ablate(point="attn.hook_z", heads=[5], where="masked")  # a head of every layer writes 0 where masks are

    Attributes:
        point: the point, which has a position axis.
        by: a number; "zero"; "mean", of the reference, or without one of the row's real positions (diffusion models
            only, in steps that compute the complete canvas); "resample", the value at a random place of the
            reference, drawn per position; or "skip", the stream as it entered the layer.
        dims: dimensions of the last axis that are replaced; None for all.
        reference: `Donors` of other prompts, which hold the point, for the mean or resampling.
        seed: seed of the resampling, which depends only on the seed, the row's prompt, the step (in a diffusion run),
            the layer and the position.
        positions, where: positions whose values are replaced.

    Raises:
        SettingError: a missing reference, or one without a use. In a run: a point without a value at each position, or
            for "skip" without a stream; the mean without a reference in a step that computes a part of the canvas,
            under a cache policy or with cached blocks.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True
    indexed: ClassVar[tuple[str, ...]] = ("dims",)

    point: str
    by: Literal["zero", "mean", "resample", "skip"] | float | int = "zero"
    dims: Sequence[int] | None = None
    reference: Donors | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.by != "resample" or self.reference is not None,
            "resampling needs reference=donors(model, prompts, names).",
        )
        require(
            self.reference is None or self.by in ("mean", "resample"),
            f"by={self.by!r} does not use reference=; pass by='mean' or by='resample', or omit it.",
        )

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        axes = axes_of(model.tree.resolve(f"blocks.{self.chosen_layers(model)[0]}.{self.point}"))
        require(
            (axes[1] == "pos" and (self.by != "skip" or axes[2:] == ["d_model"]))
            or self.by not in ("mean", "resample", "skip"),
            f"by={self.by!r} needs a point with a {'stream' if self.by == 'skip' else 'value'} at each position, and "
            f"{self.point} has the axes {' '.join(axes)}; pass a number, or choose another point.",
        )
        require(
            self.by != "mean" or self.reference is not None or not model.causal,
            "the mean over a row's positions would leak later positions in a causal model; pass "
            "reference=donors(model, prompts, names).",
        )
        entered: dict[int, Tensor] = {}
        samples = {} if self.reference is None else self._samples(self.reference, model)

        def keep(value: Tensor, hook: Point) -> None:
            entered[layer_of(hook)] = value

        def replacement(value: Tensor, hook: Point) -> Tensor:
            if self.by == "skip":
                new = entered[layer_of(hook)]
            elif self.by in ("mean", "resample"):
                new = self._typical(value, hook, run, samples)
            else:
                new = torch.full_like(value, 0.0 if self.by == "zero" else float(self.by))
            dims = value.shape[-1]
            return torch.where(index_mask(within("dim", self.dims, dims), dims, value.device), new, value)

        streams = [(f"blocks.{layer}.hook_resid_pre", keep) for layer in self.chosen_layers(model)]
        return (streams if self.by == "skip" else []) + self.edits(model, run, self.point, replacement)

    def _samples(self, reference: Donors, model: "Model") -> dict[int, Tensor]:
        """The values of the reference at each layer; for the mean only that."""
        found = {layer: reference.of_point(f"blocks.{layer}.{self.point}") for layer in self.chosen_layers(model)}
        if self.by == "resample":
            return found
        return {layer: values.mean(dim=0, keepdim=True) for layer, values in found.items()}

    def _typical(
        self, value: Float[Tensor, "batch pos *shape"], hook: Point, run: RunContext, samples: dict[int, Tensor]
    ) -> Tensor:
        """The mean of the row's positions, or a sample of the reference at each."""
        if not samples:
            real, computed = hook.forward_pass.real, hook.forward_pass.computed
            left = None if computed is None else real & ~computed.to(real.device)
            require(
                value.shape[1] >= real.shape[1] and (left is None or not bool(left.any())),
                f"by='mean' without reference= is the mean over all positions of a row, and step {hook.step} computes "
                f"only some of them; pass reference=donors(model, prompts, names), or run without a cache.",
            )
            real = real.to(value)
            weights = real / real.sum(dim=1, keepdim=True)
            return torch.einsum("bp,bp...->b...", weights, value)[:, None].expand_as(value)
        pool, first = samples[layer_of(hook)], hook.forward_pass.first(value.shape[1])
        numbers = random_places(run, hook, self.seed, layer_of(hook) + 1)[:, first : first + value.shape[1]]
        return pool[(numbers * len(pool)).long()].to(value)


@plainly_shown
def AblateHeads(
    *,
    by: Literal["zero", "mean", "resample"] = "zero",
    reference: Donors | None = None,
    seed: Seed = 0,
    **places: Any,
) -> Ablate:
    """Replace the output of heads, z = A·V, before the output projection.

    Args:
        by, reference, seed: as in `Ablate`.
        **places: ``steps=``, ``layers=``, ``heads=``, ``positions=`` and ``where=`` whose outputs are replaced.
    """
    return Ablate(point=Z, by=by, reference=reference, seed=seed, **places)


def AblateMLPs(**places: Any) -> Ablate:
    """Remove what MLPs add to the residual stream: their outputs become 0.

    Args:
        **places: ``steps=``, ``layers=``, ``positions=`` and ``where=`` at which they are removed.
    """
    return Ablate(point=PARTS["mlp"], **places)


@checked
def SkipLayers(part: Literal["layer", "attn", "mlp"] = "layer", **places: Any) -> Ablate:
    """Skip layers, or only their attention or MLP: at the chosen places these add nothing to the residual stream.

        SkipLayers(layers=[2], steps=range(8), where="masked")

    Args:
        part: "layer", "attn" or "mlp".
        **places: ``steps=``, ``layers=``, ``positions=`` and ``where=`` at which they are skipped; other positions
            still read these through attention.

    Raises:
        SettingError: an unknown part.
    """
    return Ablate(point=PARTS[part], by="skip" if part == "layer" else "zero", **places)
