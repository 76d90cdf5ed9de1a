"""The weights of quantized layers, as floating-point matrices.

A quantized layer stores its matrix in few bits with scales, in a form that its library chooses. Reading such a weight
(`offload.weight_of`, and so ``W_Q``, ``W_O``, ``hook_result`` and the fingerprint) computes the matrix that the layer
multiplies with. `form_of` says which library holds a weight.

| library | layer | the matrix |
|---|---|---|
| torchao | any, with a tensor subclass as its weight | the subclass's ``dequantize`` |
| bitsandbytes | ``Linear4bit``, ``Linear8bitLt`` | transformers' ``dequantize_bnb_weight`` |
| transformers | ``FP8Linear`` | weight · scale of its block |
| gptqmodel | those of GPTQ and AWQ | what the layer computes of the identity matrix |

The packing of GPTQ and AWQ belongs to the kernel that the library picks, so their matrices are read by multiplying.

Pitfall: the matrix is a copy. Writing to it changes nothing, and gradients do not reach the stored weight.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.errors import SettingError

BITSANDBYTES = ("Linear4bit", "Linear8bitLt")
PACKED = "qweight"  # the buffer that holds the matrix of a GPTQ or AWQ layer
ELEMENT_TYPE = "sinklens_dtype"  # key in a module's __dict__: the element type of what it computes
SHORT = (torch.int8, torch.uint8, torch.int16, torch.bool)  # integers that float32 represents exactly


def form_of(module: nn.Module, name: str = "weight") -> str | None:
    """How the weight called `name` of `module` is quantized, such as "torchao Int8Tensor"; None if it is not."""
    kind, weight = type(module).__name__, getattr(module, name, None)
    if type(weight).__module__.startswith("torchao."):
        return f"torchao {type(weight).__name__}"
    if hasattr(module, PACKED) and name in ("weight", PACKED):
        return f"packed {kind}"
    if name != "weight" or weight is None:
        return None
    if kind in BITSANDBYTES:
        return f"bitsandbytes {kind}"
    return "transformers FP8Linear" if kind == "FP8Linear" else None


def dequantized(module: Any, name: str = "weight") -> Float[Tensor, "*shape"]:
    """The weight called `name` of a quantized layer as the matrix that the layer multiplies with; of a linear layer
    [out, in].

    Raises:
        SettingError: its layout cannot be read.
    """
    form = form_of(module, name) or ""
    library = form.partition(" ")[0]
    if library == "torchao":
        matrix = getattr(module, name).dequantize()
    elif library == "bitsandbytes":
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        module.state_dict()  # undoes the packing for a CPU's kernels, which the next forward repeats
        matrix = dequantize_bnb_weight(module.weight, module.state if form.endswith("8bitLt") else None)
    elif library == "transformers":
        matrix = scaled_blocks(module.weight, module.weight_scale_inv)
    else:
        matrix = _multiplied(module)
    return matrix.to(module.__dict__.get(ELEMENT_TYPE, matrix.dtype))


def _multiplied(module: Any) -> Float[Tensor, "rows columns"]:
    """The matrix of a packed layer: the rows of layer(1) − bias, transposed. Products with 0 and 1 are exact.

    Raises:
        SettingError: the module does not say how many inputs it has.
    """
    size = getattr(module, "in_features", None)
    if not isinstance(size, int):
        raise SettingError(
            f"the weight of this {type(module).__name__} layer is packed for its kernel and cannot be read as a "
            f"matrix, so W_Q, W_O and the like, hook_result and attribution to weights are not available. Load the "
            f"checkpoint that was quantized, or quantize it with sinklens.load(..., quantization='torchao-int8')."
        )
    packed = getattr(module, PACKED)
    dtype = module.__dict__.get(ELEMENT_TYPE, torch.float16)
    with torch.no_grad():
        rows = type(module).forward(module, torch.eye(size, dtype=dtype, device=packed.device))
        bias = getattr(module, "bias", None)
        return (rows if bias is None else rows - bias).T


def note_element_type(root: nn.Module, dtype: torch.dtype, undo: ExitStack) -> None:
    """Let the quantized layers of `root` show their matrices in `dtype`, until `undo` is closed."""
    for module in root.modules():
        if form_of(module) is not None:
            module.__dict__[ELEMENT_TYPE] = dtype
            undo.callback(module.__dict__.pop, ELEMENT_TYPE)


def scaled_blocks(weight: Tensor, scale: Tensor) -> Float[Tensor, "rows columns"]:
    """weight[i, j] · scale of its block: `scale` has one number per block of rows and columns, or one in all."""
    scale = scale.float()
    if scale.ndim == 2:
        for axis, size in enumerate(weight.shape):
            block = -(-size // scale.shape[axis])
            scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return weight.float() * scale


def stored_values(root: nn.Module) -> Iterator[str]:
    """Name of every parameter and buffer that ``state_dict`` lists.

    Statistics that a library keeps beside a quantized weight are left out.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    for full in root.state_dict():
        path, _, name = full.rpartition(".")
        if path in modules and isinstance(getattr(modules[path], name, None), Tensor):
            yield full


def exact_words(value: Tensor) -> Tensor:
    """`value`, with integers that float32 cannot represent split into words of 16 bits."""
    wide = not value.is_floating_point() and value.dtype not in SHORT
    return value.contiguous().view(torch.int16) if wide else value
