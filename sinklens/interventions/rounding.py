"""Simulated quantization: weights or activations rounded to few levels, and kept in the model's type.

Both round symmetrically to the nearest of 2·q + 1 levels, q = 2^(bits − 1) − 1: in each group of values with largest
magnitude a,

    x ↦ s · round(x / s),    s = a / q.

A group of weights is a row of a matrix (one output), or `group` neighboring inputs of it; a group of activations is
one position. One large value makes all levels of its group coarse, so outlier dimensions decide how much rounding costs
(LLM.int8, 2208.07339; massive activations, 2402.17762). `keep_dims` leaves them unrounded.

Limitation: this is the error of rounding, not the arithmetic of a quantized kernel, and no calibration (GPTQ, AWQ) is
done, which would lower it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.interventions.weights import EditWeights, WeightMatrix
from sinklens.runs.intervention import Pairs, RunContext, within
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from sinklens.model import Model

Bits = Annotated[int, Ge(2), Le(8)]
RoundedPoint = Literal["ln1.hook_normalized", "ln2.hook_normalized", "hook_resid_pre", "hook_resid_mid"]


def rounded(values: Float[Tensor, "*row column"], bits: int, group: int | None = None) -> Float[Tensor, "*row column"]:
    """`values` rounded as in the module, in groups of `group` neighbors along the last axis; None is all of it.

    The last group of a row may be shorter. A group of zeros stays as it is.
    """
    levels, size = 2 ** (bits - 1) - 1, values.shape[-1]
    width = size if group is None else group
    padded = nn.functional.pad(values.float(), (0, -size % width)).unflatten(-1, (-1, width))
    scale = padded.abs().amax(dim=-1, keepdim=True) / levels
    found = torch.where(scale > 0, (padded / scale.clamp(min=1e-30)).round() * scale, padded)
    return found.flatten(-2)[..., :size].to(values.dtype)


@dataclass(frozen=True)
class RoundWeights(EditWeights):
    """Round the weight matrices of layers while a run lasts; afterwards they are as before.

        sinklens.generate(model, prompt, hooks=RoundWeights(4, group=32))
        with RoundWeights(3).applied(model):  # a single pass
            logits = model(ids)

    Embeddings, norms, biases and the language-model head stay as they are. A copy of the rounded matrices' original
    values is kept in memory meanwhile.

    Attributes:
        bits: bits per weight, 2 to 8.
        group: number of neighboring inputs that share a scale; None for one scale per output.
        keep_dims: dimensions of the residual stream whose weights stay as they are, in matrices that read the stream.
        layers: layers whose weights are rounded.

    Raises:
        SettingError: numbers out of range; otherwise as `EditWeights`.
    """

    bits: Bits
    group: Count | None = None
    keep_dims: Sequence[int] = ()

    def edited(self, model: "Model", matrix: WeightMatrix) -> Float[Tensor, "*expert out inputs"]:
        keep = [within("dim", [dim], model.cfg.d_model)[0] for dim in self.keep_dims]
        others = torch.ones(matrix.rows.shape[-1], dtype=torch.bool, device=matrix.rows.device)
        others[keep if matrix.reads else []] = False
        found = matrix.rows.clone()
        found[..., others] = rounded(matrix.rows[..., others], self.bits, self.group)
        return found


@dataclass(frozen=True)
class RoundActivations(AtPositions):
    """Round activations position by position: what the heads or the MLP of a layer read, or the stream itself.

        RoundActivations(4, point="ln2.hook_normalized", keep_dims=[17])

    Attributes:
        bits: bits per value, 2 to 8.
        point: the point of a layer.
        keep_dims: dimensions that are neither rounded nor counted for the scale.
        layers, positions, where: places that are rounded.

    Raises:
        SettingError: bits out of range, another point, a dimension that does not exist, or ``heads=``.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("heads",)

    bits: Bits
    point: RoundedPoint = "ln1.hook_normalized"
    keep_dims: Sequence[int] = ()

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        others = torch.ones(model.cfg.d_model, dtype=torch.bool)
        others[[within("dim", [dim], model.cfg.d_model)[0] for dim in self.keep_dims]] = False

        def edit(value: Float[Tensor, "batch pos d_model"], hook: Point) -> Tensor:
            value[..., others] = rounded(value[..., others], self.bits)
            return value

        return self.edits(model, run, self.point, edit)
