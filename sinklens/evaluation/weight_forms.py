"""What the weights of a quantized model take: which of its matrices are quantized, and the bytes of each.

A `Form` says how one matrix is stored, and `StoredWeights` which matrices have which form. `planned_weights` reads both
from the ``quantization_config`` of a published checkpoint, by these rules of the libraries:

| ``quant_method`` | a matrix of `rows` outputs and `columns` inputs |
|---|---|
| bitsandbytes, 8 bits | 8 bits; a float32 scale per row |
| bitsandbytes, 4 bits | 4 bits; a float32 scale per 64 weights, or 8 bits and a float32 scale per 256 scales (double) |
| gptq | 2, 3, 4 or 8 bits; per row and group of columns a float16 scale and a zero point; 32 bits per column |
| awq | 4 bits; per row and group of columns a float16 scale and a zero point |
| fp8 | 8 bits; a float32 scale (or one of 8 bits) per block of 128 × 128 |
| torchao | 8 or 4 bits by its config; scales per row or group |

Caveat: tables of codes and descriptions of shapes, at most 1.5 kB per matrix, are not counted, nor is the padding of
kernels that need larger matrices.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from sinklens.errors import CheckpointError

if TYPE_CHECKING:
    from sinklens.model import Model

HALF, FLOAT = 16, 32  # bits
FIELDS = "_data"  # key of the fields of a config object in the files that torchao writes


@dataclass(frozen=True)
class Form:
    """How a matrix is stored.

    Attributes:
        bits: of a weight.
        beside: bits of the scale and the zero point of a group.
        group: columns of a group; 0 for all.
        rows: rows of a group; 0 for all.
        column: bits that are stored for each column.
        flat: groups are counted along all weights, row after row.
    """

    bits: float | int
    beside: float | int
    group: int = 0
    rows: int = 1
    column: int = 0
    flat: bool = False

    def size(self, rows: int, columns: int) -> int:
        """Bytes of a matrix."""
        high, wide = (1, rows * columns) if self.flat else (rows, columns)
        groups = math.ceil(high / (self.rows or high)) * math.ceil(wide / (self.group or wide))
        return math.ceil((rows * columns * self.bits + groups * self.beside + columns * self.column) / 8)


@dataclass(frozen=True)
class StoredWeights:
    """Which matrices of a model are quantized.

    Attributes:
        name: of the method, as it is printed.
        form: name of a module, or of stacked experts with the parameter -> their form; None if they stay as they are.
        experts: whether stacked experts are quantized.
        embeddings: whether embeddings are.
    """

    name: str
    form: Callable[[str], Form | None]
    experts: bool = False
    embeddings: bool = False

    def size(self, model: "Model") -> tuple[int, int]:
        """Bytes of all weights of a model, and of its largest quantized matrix in the model's element type.

        Args:
            model: the model in full precision; its weights are not read.
        """
        from transformers.pytorch_utils import Conv1D

        hf, largest = model.checkpoint.hf, 0
        total = sum(value.numel() * value.element_size() for value in hf.parameters())
        kinds = (nn.Linear, Conv1D, nn.Embedding) if self.embeddings else (nn.Linear, Conv1D)
        for path, module in hf.named_modules():
            if isinstance(module, kinds):
                found = [(path, module.weight.T if isinstance(module, Conv1D) else module.weight)]
            elif self.experts and path.endswith(".experts"):
                own = module.named_parameters(path, recurse=False)
                found = [(name, value) for name, value in own if value.ndim == 3]
            else:
                continue
            for name, weight in found:
                form = self.form(name)
                if form is None:
                    continue
                *stack, rows, columns = weight.shape
                plain = weight.numel() * weight.element_size()
                total += math.prod(stack) * form.size(rows, columns) - plain
                largest = max(largest, plain // math.prod(stack))
        return total, largest


class _UnknownValueError(ValueError):
    """A value of a ``quantization_config`` that no rule covers; says which, and what is known."""


def planned_weights(model: "Model", config: Mapping[str, Any] | None, where: str) -> list[StoredWeights]:
    """The forms in which the weights of a model are planned, that of its checkpoint first.

    Args:
        config: ``quantization_config`` of its checkpoint with a known ``quant_method``; None for full precision.
        where: the checkpoint, for errors.

    Returns:
        Of a full-precision checkpoint those of `cards.QUANTIZATIONS`. fp8 has a second one, since cards of a
        compute capability below 8.9 dequantize it.

    Raises:
        CheckpointError: a value of the config is not known; the message names it.
    """
    if config is None:
        return [PLAIN, *(linear_layers(name, form, model) for name, form in FORMS.items())]
    kind = config["quant_method"]
    if kind in ("gptq", "awq") and model.cfg.num_experts:
        raise CheckpointError(
            f"{where}: {kind} quantizes linear layers, and transformers' class of this model stacks its experts, which "
            f"cannot be loaded so. Plan the full-precision checkpoint."
        )
    try:
        found = _BY_METHOD[kind](config, model)
    except _UnknownValueError as error:
        raise CheckpointError(
            f"{where}: the quantization_config of {kind} has {error}. Plan the full-precision checkpoint, with "
            f"--quantization."
        ) from error
    return [found, replace(PLAIN, name="dequantized")] if kind == "fp8" else [found]


def linear_layers(
    name: str, form: Form, model: "Model", skipped: list[str] | None = None, *, experts: bool = False,
    defaults: bool = False,
) -> StoredWeights:  # fmt: skip
    """One form for all linear layers but those that transformers leaves out.

    Args:
        skipped: ``modules_to_not_convert``; None for transformers' choice: the head and weights that modules share.
        defaults: leave out transformers' choice in addition to `skipped`.
    """
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left = HfQuantizer.get_modules_to_not_convert(model.checkpoint.hf, skipped, None, defaults)
    return StoredWeights(name, lambda path: form if should_convert_module(path, left) else None, experts)


def _known(config: Mapping[str, Any], key: str, default: Any, *known: Any) -> Any:
    """The value under `key`, which must be one of `known`."""
    value = config.get(key, default)
    if value not in known:
        raise _UnknownValueError(f"{key} {value!r}; known: {', '.join(map(str, known))}")
    return value


def _bitsandbytes(config: Mapping[str, Any], model: "Model") -> StoredWeights:
    bits = 4 if config.get("load_in_4bit") else 8
    if bits == 8 and not config.get("load_in_8bit"):
        raise _UnknownValueError("load_in_4bit and load_in_8bit None; known: one that is true")
    four = DOUBLE_NF4 if config.get("bnb_4bit_use_double_quant") else NF4
    form = four if bits == 4 else INT8
    return linear_layers(f"bitsandbytes, {bits} bits", form, model, config.get("llm_int8_skip_modules"))


def _gptq(config: Mapping[str, Any], model: "Model") -> StoredWeights:
    bits = _known(config, "bits", None, 2, 3, 4, 8)
    for key in ("dynamic", "lm_head"):
        _known(config, key, None, None, False, {})
    shape, parts = model.tree.architecture, config.get("modules_in_block_to_quantize")
    form = Form(bits, HALF + bits, _group(config), column=32)
    only = None if parts is None else tuple(chain(*([part] if isinstance(part, str) else part for part in parts)))
    blocks = config.get("block_name_to_quantize") or f"{shape.base}.{shape.layers}"

    def form_of(path: str) -> Form | None:
        return form if path.startswith(f"{blocks}.") and (only is None or path.endswith(only)) else None

    return StoredWeights(f"gptq, {bits} bits", form_of)


def _awq(config: Mapping[str, Any], model: "Model") -> StoredWeights:
    bits = _known(config, "bits", 4, 4)
    form = Form(bits, HALF + (bits if config.get("zero_point", True) else 0), _group(config))
    return linear_layers("awq, 4 bits", form, model, config.get("modules_to_not_convert"), defaults=True)


def _fp8(config: Mapping[str, Any], model: "Model") -> StoredWeights:
    _known(config, "modules_to_convert", None, None)
    _known(config, "expert_dtype", None, None, "fp8")
    scale = 8 if _known(config, "scale_fmt", "float", "float", "ue8m0") == "ue8m0" else FLOAT
    rows, columns = config.get("weight_block_size", (128, 128)) or (0, 0)
    skipped = config.get("modules_to_not_convert", config.get("ignored_layers"))
    return linear_layers("fp8", Form(8, scale, columns, rows), model, skipped, experts=True)


def _torchao(config: Mapping[str, Any], model: "Model") -> StoredWeights:
    kind = config.get("quant_type")
    made = kind.get("default") if isinstance(kind, Mapping) else None
    if not isinstance(made, Mapping):
        raise _UnknownValueError(f"quant_type {kind!r}; known: the config object that torchao writes")
    name, embeddings = str(made.get("_type")), bool(config.get("include_input_output_embeddings"))
    plain = linear_layers("torchao", INT8, model, config.get("modules_to_not_convert"))
    hf = model.checkpoint.hf
    ends = {hf.get_input_embeddings(), hf.get_output_embeddings()} if embeddings else ()
    at_ends = {path for path, module in hf.named_modules() if module in ends}
    rules = made[FIELDS].get("fqn_to_config", {}) if name == "FqnToConfig" else {"_default": made}
    forms = {key: None if one is None else _torchao_form(one, model) for key, one in rules.items()}

    def form_of(path: str) -> Form | None:
        stacked = ".experts." in path  # a parameter, which only a rule of its own reaches
        if not stacked and path not in at_ends and plain.form(path) is None:
            return None
        rule = next((key for key in forms if key == path or re.fullmatch(key.removeprefix("re:"), path)), "_default")
        return None if stacked and rule == "_default" else forms.get(rule)

    return StoredWeights(f"torchao, {name.removesuffix('Config')}", form_of, True, embeddings)


def _torchao_form(made: Mapping[str, Any], model: "Model") -> Form:
    """The form of one of torchao's configs; scales have the width that torchao 0.18 gives them."""
    data, packing = made.get(FIELDS, {}), "intx_packing_format"
    kind = _known(made, "_type", None, *BESIDE, "Int4WeightOnlyConfig", "IntxWeightOnlyConfig")
    if kind == "Int4WeightOnlyConfig":
        return Form(4, 2 * HALF, int(data.get("group_size", 128)))
    if kind == "IntxWeightOnlyConfig" and "UNPACKED_TO_INT8" not in str(data.get(packing)).upper():
        raise _UnknownValueError(f"{packing} {data.get(packing)!r}; known: UNPACKED_TO_INT8")
    beside = BESIDE.get(kind, 8 * model.cfg.dtype.itemsize + 8)
    found = data.get("granularity")
    found = found[-1] if isinstance(found, list | tuple) else found or {}  # of activations, and of weights
    rows = 0 if _known(found, "_type", None, None, "PerRow", "PerAxis", "PerGroup", "PerTensor") == "PerTensor" else 1
    return Form(8, beside, data.get("group_size") or found.get(FIELDS, {}).get("group_size", 0), rows)


def _group(config: Mapping[str, Any]) -> int:
    """Columns of a group; 0 for all."""
    size = config.get("group_size", 128)
    if not isinstance(size, int) or size == 0 or size < -1:
        raise _UnknownValueError(f"group_size {size!r}; known: a number of columns, or -1 for all")
    return max(size, 0)


INT8 = Form(8, FLOAT)  # LLM.int8, Dettmers et al., 2208.07339
NF4 = Form(4, FLOAT, 64, flat=True)  # Dettmers et al., 2305.14314
DOUBLE_NF4 = Form(4, 8 + FLOAT / 256, 64, flat=True)  # the same, with quantized scales
PLAIN = StoredWeights("none", lambda path: None)
FORMS = {"bnb-int8": INT8, "bnb-nf4": NF4}
BESIDE = {
    "Int8WeightOnlyConfig": FLOAT + 8, "Int8DynamicActivationInt8WeightConfig": FLOAT + 8,
    "Float8WeightOnlyConfig": FLOAT, "Float8DynamicActivationFloat8WeightConfig": FLOAT,
}  # fmt: skip
"""Config of torchao for weights of 8 bits -> the bits of a group's scale and zero point."""
_BY_METHOD = {"bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "torchao": _torchao}
