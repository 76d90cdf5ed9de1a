"""Quantized weights: which methods there are, the config that transformers needs for each, and what became of a model.

A model is quantized in one of two ways. ``sinklens.load(..., quantization="torchao-int8")`` reads full-precision files
and quantizes each layer as it is read. A checkpoint whose config.json has a ``quantization_config`` was quantized
before, and is loaded as it was published. Both go through transformers' own quantizers; this module checks what they
would only warn of, and reports which weights are quantized (`Quantization`).

Words: the *matrices* of a model are the weights of its linear layers and its stacked experts, which have three axes.
Embeddings, norms and, by transformers' choice, the language-model head stay in floating point.

Silent failure that is refused: a quantizer that finds none of its layers leaves a model as it was, without an error.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sinklens.errors import CheckpointError, nearest
from sinklens.families import Family
from sinklens.hooks.quantized import form_of
from sinklens.model.files import Weights, rename

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPS = (128, 64, 32)  # columns that share a scale, in 4-bit matrices: the largest that divides all rows
EXPERTS = r"re:.*\.experts\.(gate_up_proj|down_proj)"  # torchao's name for the parameters of stacked experts
DEQUANTIZED = "dequantized while it was loaded"
NAMES_OF_MODULES = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")


class Place(NamedTuple):
    """What a config depends on.

    Attributes:
        cuda: whether the weights go to a GPU.
        group: one of `GROUPS`.
        dtype: element type of what stays in floating point.
        experts: whether the model has stacked experts.
    """

    cuda: bool
    group: int
    dtype: torch.dtype
    experts: bool


@dataclass(frozen=True)
class Method:
    """A way to quantize the weights of a full-precision checkpoint while it is read.

    Attributes:
        name: as in ``sinklens.load(..., quantization=name)``.
        package: the Python package that computes it; "" for transformers itself.
        config: makes transformers' quantization config.
        experts: whether stacked experts are quantized, too.
        cuda_only: whether it needs a GPU.
        cuda_dtype: the element type that its GPU kernels need; None for any.
    """

    name: str
    package: str
    config: Callable[[Place], Any]
    experts: bool
    cuda_only: bool = False
    cuda_dtype: torch.dtype | None = None


def _torchao(made: Any, place: Place, of_experts: Any = None) -> Any:
    """transformers' config of a torchao config, and of the one for stacked experts if it differs."""
    from torchao.quantization import FqnToConfig
    from transformers import TorchAoConfig

    if not place.experts:
        return TorchAoConfig(made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Config Deprecation: _default", UserWarning)
        return TorchAoConfig(FqnToConfig({EXPERTS: of_experts or made, "_default": made}))


def _torchao_int8(place: Place) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return _torchao(Int8WeightOnlyConfig(), place)


def _torchao_int4(place: Place) -> Any:
    """4 bits per value; on a CPU, where torchao has no packed layout for these matrices, in one byte each.

    Stacked experts have 8 bits: torchao has no 4-bit layout from which one expert can be taken.
    """
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    if place.cuda:
        made = Int4WeightOnlyConfig(group_size=place.group, int4_packing_format="tile_packed_to_4d")
    else:
        made = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(place.group))  # type: ignore[attr-defined]
    return _torchao(made, place, of_experts=Int8WeightOnlyConfig())


def _torchao_float8(place: Place) -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return _torchao(Float8WeightOnlyConfig(), place)


def _bitsandbytes_int8(place: Place) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _bitsandbytes_nf4(place: Place) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=place.dtype)


def _fp8(place: Place) -> Any:
    from transformers import FineGrainedFP8Config

    return FineGrainedFP8Config()


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("torchao-int8", "torchao", _torchao_int8, experts=True),
        Method("torchao-int4", "torchao", _torchao_int4, experts=True, cuda_dtype=torch.bfloat16),
        Method("torchao-float8", "torchao", _torchao_float8, experts=True),
        Method("bnb-int8", "bitsandbytes", _bitsandbytes_int8, experts=False),
        Method("bnb-nf4", "bitsandbytes", _bitsandbytes_nf4, experts=False),
        Method("fp8", "", _fp8, experts=True, cuda_only=True),
    )
}


@dataclass(frozen=True)
class Layout:
    """How a published checkpoint stores a quantized matrix.

    Attributes:
        packages: the Python packages that transformers needs for it.
        matrix: regular expression of the name of the packed matrix, and what the matrix is called unpacked.
        beside: regular expression of what is stored beside it; the first group is what the matrix's name begins with.
        experts: whether transformers reads quantized experts, which its classes hold as one stacked parameter.
    """

    packages: tuple[str, ...]
    matrix: tuple[str, str]
    beside: str
    experts: bool = False


_AS_IT_IS = (r"^(?!)", "")
LAYOUTS: dict[str, Layout] = {  # by quant_method in config.json
    "torchao": Layout(
        ("torchao",),
        (r"\._(\w+)_qdata$", r".\1"),
        r"^(.*)\._\w+?_(?:scale_and_zero|per_tensor_scale|act_pre_scale|scale|zero_point)$",
        experts=True,
    ),
    "bitsandbytes": Layout(
        ("bitsandbytes",),
        _AS_IT_IS,
        r"^(.*)\.(?:weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)|SCB|weight_format)$",
    ),
    "fp8": Layout((), _AS_IT_IS, r"^(.*)\.(?:weight_scale_inv|activation_scale)$", experts=True),
    "gptq": Layout(("optimum", "gptqmodel"), (r"\.qweight$", ".weight"), r"^(.*)\.(?:qzeros|scales|g_idx)$"),
    "awq": Layout(("gptqmodel",), (r"\.qweight$", ".weight"), r"^(.*)\.(?:qzeros|scales)$"),
}


@dataclass(frozen=True)
class Quantization:
    """Which matrices of a model are quantized.

    Attributes:
        method: the method of `METHODS`, or ``quant_method`` of a published checkpoint.
        quantized: name of each quantized weight -> library and form, such as "torchao Int8Tensor".
        kept: name of each matrix in floating point -> why.
    """

    method: str
    quantized: Mapping[str, str]
    kept: Mapping[str, str]

    def __str__(self) -> str:
        forms = ", ".join(dict.fromkeys(self.quantized.values())) or "none"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            reasons.setdefault(reason, []).append(re.sub(r"\.\d+\.", ".*.", name))
        kept = "; ".join(f"{', '.join(dict.fromkeys(names))} ({reason})" for reason, names in reasons.items())
        total = len(self.quantized) + len(self.kept)
        rest = f"; in floating point: {kept}" if kept else ""
        return f"{self.method}: {len(self.quantized)} of {total} matrices quantized ({forms}){rest}"


def method_named(name: Any) -> Method:
    """The method called `name`.

    Raises:
        CheckpointError: no method has this name.
    """
    if not isinstance(name, str) or name not in METHODS:
        hint = nearest(name, METHODS) if isinstance(name, str) else ""
        raise CheckpointError(
            f"quantization={name!r} is unknown; choose one of {', '.join(METHODS)}, or pass a quantization config of "
            f"transformers.{hint}"
        )
    return METHODS[name]


def config_for(method: Method, place: Place, where: str) -> Any:
    """transformers' quantization config.

    Raises:
        CheckpointError: its package is missing, or it needs a GPU.
    """
    _need((method.package,) if method.package else (), method.name, where)
    if method.cuda_only and not place.cuda:
        raise CheckpointError(
            f"{where}: quantization={method.name!r} needs a GPU of compute capability 8.9 or newer, and the model goes "
            f"to another device; 'torchao-float8' also runs on a CPU."
        )
    return method.config(place)


def _need(packages: tuple[str, ...], what: str, where: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise CheckpointError(
            f"{where}: {what} weights need {' and '.join(missing)}, not installed here: pip install "
            f"{' '.join(missing)}. To go without, load the full-precision checkpoint."
        )


def group_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The largest of `GROUPS` that divides the rows of all matrices; the smallest if none does."""
    widths = {shape[-1] for shape in _linear(shapes).values()}
    return next((group for group in GROUPS if all(width % group == 0 for width in widths)), GROUPS[-1])


def check_sizes(method: Method, shapes: Mapping[str, tuple[int, ...]], cuda: bool, where: str) -> None:
    """Refuse matrices that a 4-bit method cannot divide into groups.

    Raises:
        CheckpointError: it cannot; the message names one.
    """
    checked = {"torchao-int4": [(-1, GROUPS[-1])], "bnb-nf4": [] if cuda else [(-2, 32), (-1, 64)]}
    for axis, group in checked.get(method.name, []):  # bitsandbytes' kernels for a CPU pack rows and columns
        for name, shape in _linear(shapes).items():
            if shape[axis] % group:
                raise CheckpointError(
                    f"{where}: {method.name} divides {'rows' if axis == -1 else 'columns'} into groups of {group}, and "
                    f"{name} is {list(shape)}. Choose an 8-bit method: torchao-int8, torchao-float8 or bnb-int8."
                )


def _linear(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The matrices of linear layers, as far as names tell: neither embeddings nor the head, routers or experts."""
    other = re.compile(r"embed|lm_head|wte|wpe|\.experts\.|\.mlp\.gate\.")
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and not other.search(name)}


def published(
    raw: Mapping[str, Any], family: Family, where: str, installed: bool = True
) -> dict[str, Any] | None:  # fmt: skip
    """The ``quantization_config`` of a checkpoint, with modules under transformers' names; None without one.

    Args:
        installed: whether the packages of the method must be there.

    Raises:
        CheckpointError: its method is unknown or not installed, or the family's weights cannot be loaded so.
    """
    found = raw.get("quantization_config")
    if found is None:
        return None
    kind = found.get("quant_method") if isinstance(found, dict) else None
    if kind is None and isinstance(found, dict) and {"load_in_8bit", "load_in_4bit"} & set(found):
        kind = "bitsandbytes"  # written before transformers named the method
    if kind not in LAYOUTS:
        raise CheckpointError(
            f"{where}: config.json has a quantization_config with quant_method {kind!r}; known are "
            f"{', '.join(LAYOUTS)}. Load the checkpoint that was quantized, with quantization= if it is too large."
        )
    if family.fused:
        raise CheckpointError(
            f"{where}: {family.name} checkpoints store {', '.join(family.fused)} in one piece, which cannot be split "
            f"once it is quantized. Load the full-precision checkpoint with quantization=."
        )
    if kind == "torchao" and family.renames:
        raise CheckpointError(
            f"{where}: torchao files list their weights by name, and {family.name} checkpoints have other names than "
            f"transformers' class. Load the full-precision checkpoint with quantization=."
        )
    if installed:
        _need(LAYOUTS[kind].packages, kind, where)
    renamed = {
        key: [rename(f"{name}.", family.renames).removesuffix(".") for name in found[key]]
        for key in NAMES_OF_MODULES
        if found.get(key)
    }
    return {**found, "quant_method": kind, **renamed}


def unpacked(weights: Weights, kind: str, expected: Mapping[str, tuple[int, ...]], where: str) -> Weights:
    """The headers of a published checkpoint as if its matrices were not packed, so that they can be checked.

    Args:
        kind: one of `LAYOUTS`.
        expected: names and shapes of the model's parameters.

    Raises:
        CheckpointError: a matrix lacks its scales, or holds another number of values than the model's; or experts are
            packed in a form that transformers cannot stack.
    """
    layout, shapes, original = LAYOUTS[kind], {}, {}
    beside = {match.group(1) for name in weights.shapes if (match := re.match(layout.beside, name))}
    for name, shape in weights.shapes.items():
        if re.match(layout.beside, name):
            continue
        plain = re.sub(*layout.matrix, name)
        packed = plain != name or name in weights.packed
        if packed and plain.rpartition(".")[0] not in beside:
            raise CheckpointError(
                f"{where}: {weights.original[name]} is quantized, but the files have no scales for it. Download the "
                f"checkpoint again."
            )
        if packed and ".experts." in plain and not layout.experts:
            raise CheckpointError(
                f"{where}: {weights.original[name]} is an expert quantized by {kind}, and transformers reads such "
                f"weights into linear layers only, while its class stacks the experts in one parameter. Load the "
                f"full-precision checkpoint, with quantization='torchao-int8' if it is too large."
            )
        if packed and plain in expected:
            shape = _full(shape, expected[plain], weights.original[name], where)
        shapes[plain], original[plain] = shape, weights.original[name]
    if stray := sorted(name for name in beside if not any(plain.startswith(f"{name}.") for plain in shapes)):
        raise CheckpointError(f"{where}: the files have scales for {stray[0]}, but not its weight. Download it again.")
    return replace(weights, shapes=shapes, original=original)


def _full(shape: tuple[int, ...], wanted: tuple[int, ...], name: str, where: str) -> tuple[int, ...]:
    """The shape of a packed matrix before it was packed: up to 16 values are stored as one number."""
    stored, values = torch.Size(shape).numel(), torch.Size(wanted).numel()
    if stored == 0 or values % stored or values // stored > 16:
        raise CheckpointError(
            f"{where}: {name} holds {stored} packed numbers, which cannot be the {values} values of a matrix "
            f"{list(wanted)}. Check that config and weights match."
        )
    return wanted


def quantization_of(hf: "PreTrainedModel", method: str | None = None) -> Quantization | None:
    """Which matrices of a transformers model are quantized; None if it has no quantization config."""
    config = getattr(hf.config, "quantization_config", None)
    if config is None and method is None:
        return None
    kind = getattr(config, "quant_method", None) or (config.get("quant_method") if isinstance(config, dict) else "")
    name = method or str(getattr(kind, "value", kind))
    quantized, kept = {}, {}
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    tied = {*hf.all_tied_weights_keys, *hf.all_tied_weights_keys.values()}
    for path, module in hf.named_modules():
        for parameter in ("qweight",) if hasattr(module, "qweight") else _matrices(module):
            full, form = f"{path}.{parameter}", form_of(module, parameter)
            if form is not None:
                quantized[full] = form
            elif module is not embedding:
                kept[full] = _reason(module, name, bool(quantized))
                if module is head:
                    kept[full] = "the language-model head stays in floating point"
                elif full in tied:
                    kept[full] = "shared with another module, which transformers leaves out"
    return Quantization(name, quantized, kept)


def _matrices(module: torch.nn.Module) -> list[str]:
    """The parameters of `module` itself that are matrices, or stacks of them."""
    return [name for name, value in module.named_parameters(recurse=False) if value.ndim >= 2 and name != "SCB"]


def _reason(module: torch.nn.Module, method: str, any_quantized: bool) -> str:
    """Why a matrix is in floating point."""
    library = METHODS[method].package if method in METHODS else method
    if not isinstance(module, torch.nn.Linear):
        return f"{library or method} does not quantize {type(module).__name__}"
    return "left out by the quantization config" if any_quantized else DEQUANTIZED


def check_quantized(found: Quantization, where: str) -> None:
    """Refuse a model of which nothing was quantized.

    Raises:
        CheckpointError: none of its matrices is.
    """
    reasons = set(found.kept.values())
    if found.quantized or DEQUANTIZED in reasons:
        return
    raise CheckpointError(
        f"{where}: {found.method} quantizes none of this model's matrices ({'; '.join(sorted(reasons))}). Choose "
        f"another of {', '.join(METHODS)}, or leave quantization= out."
    )
