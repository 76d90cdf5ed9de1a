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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.runs.intervention import Intervention, Pairs, RunContext, refuse, refuse_empty, within
from sinklens.utils.integers import as_integer

if TYPE_CHECKING:
    from sinklens.model import Model

RoundedPoint = Literal["ln1.hook_normalized", "ln2.hook_normalized", "hook_resid_pre", "hook_resid_mid"]
ROUNDED = ("ln1.hook_normalized", "ln2.hook_normalized", "hook_resid_pre", "hook_resid_mid")


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
class RoundWeights(Intervention):
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
        SettingError: numbers out of range, ``steps=``, ``heads=`` or ``positions=``, or weights that are offloaded.
    """

    changes_model: ClassVar[bool] = True

    bits: int
    group: int | None = None
    keep_dims: Sequence[int] = ()

    def __post_init__(self) -> None:
        refuse_empty(self)
        refuse(self, "steps", "heads", "positions")
        _check_bits(self.bits)
        if self.group is not None and ((number := as_integer(self.group)) is None or number < 1):
            raise SettingError(f"group must be at least 1, or None for one scale per output; got {self.group!r}.")

    @contextmanager
    def applied(self, model: "Model") -> Iterator[None]:
        """See `HookSource.applied`."""
        keep = [within("dim", [dim], model.cfg.d_model)[0] for dim in self.keep_dims]
        before: list[tuple[Tensor, Tensor]] = []
        try:
            for layer in self.chosen_layers(model):
                for matrix in _matrices(model, layer):
                    data = matrix.weight.data
                    before.append((data, data.clone()))
                    data.copy_(self._rounded(matrix, keep if matrix.reads else []))
            yield
        finally:
            for data, original in before:
                data.copy_(original)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if run.single:
            raise SettingError(
                "RoundWeights changes the model and not a point, so a single pass cannot take it as hooks; write "
                "`with RoundWeights(bits).applied(model):` around the pass."
            )
        self.chosen_layers(model)
        return []

    def _rounded(self, matrix: "_Matrix", keep: list[int]) -> Tensor:
        rows = matrix.weight.data.T if matrix.turned else matrix.weight.data
        others = torch.ones(rows.shape[-1], dtype=torch.bool, device=rows.device)
        others[keep] = False
        found = rows.clone()
        found[..., others] = rounded(rows[..., others], self.bits, self.group)
        return found.T if matrix.turned else found


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

    bits: int
    point: RoundedPoint = "ln1.hook_normalized"
    keep_dims: Sequence[int] = ()

    def __post_init__(self) -> None:
        refuse_empty(self)
        refuse(self, "heads")
        _check_bits(self.bits)
        if self.point not in ROUNDED:
            raise SettingError(f"point must be one of {', '.join(ROUNDED)}; got {self.point!r}.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        others = torch.ones(model.cfg.d_model, dtype=torch.bool)
        others[[within("dim", [dim], model.cfg.d_model)[0] for dim in self.keep_dims]] = False

        def edit(value: Float[Tensor, "batch pos d_model"], hook: Point) -> Tensor:
            value[..., others] = rounded(value[..., others], self.bits)
            return value

        return self.edits(model, run, self.point, edit)


class _Matrix(NamedTuple):
    """A weight matrix of a layer, [out, in], or [in, out] if it is `turned`; `reads` if its inputs are the stream."""

    weight: nn.Parameter
    turned: bool
    reads: bool


def _matrices(model: "Model", layer: int) -> Iterator[_Matrix]:
    """The weight matrices of a layer.

    Raises:
        SettingError: one is offloaded.
    """
    architecture = model.tree.architecture
    layers: Any = model.tree.hf.get_submodule(architecture.base).get_submodule(architecture.layers)
    writers = {f"{architecture.attn}.{architecture.o}", f"{architecture.mlp}.{architecture.down}"}
    for path, module in layers[layer].named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2:
                continue
            if weight.is_meta:
                raise SettingError(f"{path} of layer {layer} is offloaded; load the model on one device to round it.")
            turned = type(module).__name__ == "Conv1D"  # of GPT-2
            inputs = weight.shape[0] if turned else weight.shape[-1]
            reads = inputs == model.cfg.d_model and path not in writers and not name.startswith("down")
            yield _Matrix(weight, turned, reads)


def _check_bits(bits: int) -> None:
    if (number := as_integer(bits)) is None or not 2 <= number <= 8:
        raise SettingError(f"bits must be an integer from 2 to 8; got {bits!r}.")
