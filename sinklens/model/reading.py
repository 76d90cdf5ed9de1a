"""Reads the weights of a checkpoint into its transformers class, once its headers have been checked.

transformers opens every safetensors file at once and reads their tensors in a pool of threads, straight to the device
on which the model runs. Nothing is read that the model does not keep, so memory is that of the weights and of the
tensors in flight.

Pitfall: memory-mapped pages of the files count as memory of the process in ``top`` (RES), but the system takes them
back when it needs room.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinklens.errors import CheckpointError
from sinklens.families import Family
from sinklens.model import files, quantization
from sinklens.model.packing import class_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DeviceMap = str | dict[str, int | str | torch.device]
SMALL = 1_000_000_000  # parameters; smaller models run in float32 without a GPU, and load without a progress bar


@dataclass(frozen=True)
class Source:
    """A checkpoint whose headers were checked.

    Attributes:
        folder: where its files are.
        family: its record.
        config: the transformers config.
        weights: the contents of its headers, with quantized matrices as if unpacked.
        published: the ``quantization_config`` with which it was published; None for full precision.
    """

    folder: Path
    family: Family
    config: "PreTrainedConfig"
    weights: files.Weights
    published: dict[str, Any] | None = None


@dataclass(frozen=True)
class Target:
    """Where the weights go, and in which form.

    Attributes:
        device: the device of the model.
        device_map: several devices instead; None for `device` alone.
        dtype: element type of what is not quantized.
        method: how full-precision weights are quantized while they are read; None for not at all.
        config: transformers' quantization config for it.
    """

    device: torch.device
    device_map: DeviceMap | None
    dtype: torch.dtype
    method: str | None = None
    config: Any = None


def target_for(source: Source, device: torch.device, device_map: DeviceMap | None, dtype: Any, wanted: Any) -> Target:
    """Where and how a checkpoint is loaded.

    Args:
        dtype: as in `sinklens.load`.
        wanted: the argument ``quantization`` of `sinklens.load`.

    Raises:
        CheckpointError: the method is unknown, not available here, or does not apply; or `dtype` does not fit.
    """
    where, packed = str(source.folder), source.published is not None
    if wanted is not None and packed:
        raise CheckpointError(
            f"{where}: this checkpoint is quantized already; leave quantization= out, or load the full-precision one."
        )
    chosen = _dtype(dtype, source.weights, device, packed)
    if wanted is None:
        return Target(device, device_map, chosen)
    if not isinstance(wanted, str):
        kind = str(getattr(getattr(wanted, "quant_method", ""), "value", ""))
        _check_fused(source, kind, where)
        return Target(device, device_map, chosen, kind, wanted)
    method, cuda = quantization.method_named(wanted), device.type == "cuda"
    _check_fused(source, method.package, where)
    if cuda and method.cuda_dtype not in (None, chosen):
        if dtype != "auto":
            raise CheckpointError(
                f"quantization={wanted!r} runs in {method.cuda_dtype} on a GPU; got dtype={dtype!r}. Leave dtype= out."
            )
        chosen = method.cuda_dtype or chosen
    shapes = source.weights.shapes
    quantization.check_sizes(method, shapes, cuda, where)
    experts = any(".experts." in name for name in shapes)
    place = quantization.Place(cuda, quantization.group_of(shapes), chosen, experts)
    return Target(device, device_map, chosen, wanted, quantization.config_for(method, place, where))


def _check_fused(source: Source, library: str, where: str) -> None:
    """Refuse to quantize what is read as one matrix and then split: only bitsandbytes' quantizer keeps every part."""
    if source.family.fused and library != "bitsandbytes":
        raise CheckpointError(
            f"{where}: {source.family.name} checkpoints store {', '.join(source.family.fused)} in one piece, of which "
            f"this method would keep the first part only. Pass quantization='bnb-int8' or 'bnb-nf4'."
        )


def read(source: Source, target: Target, attention: str) -> "PreTrainedModel":
    """The transformers model with its weights, on its device.

    Args:
        attention: the attention function that it runs.

    Raises:
        CheckpointError: its quantizer cannot load it, or would leave a packed layer without values.
    """
    quantized = source.published is not None or target.config is not None
    if source.published is not None:
        source.config.quantization_config = source.published
    device_map = target.device_map
    if device_map is None and (quantized or target.device.type != "cpu"):
        device_map = {"": target.device}
    options: dict[str, Any] = {} if target.config is None else {"quantization_config": target.config}
    with _refusing(str(source.folder), quantized):
        hf, found = class_for(source.config, source.family).from_pretrained(
            source.folder,
            config=source.config,
            key_mapping=dict(source.family.renames) or None,
            dtype=target.dtype,
            device_map=device_map,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    if absent := sorted(name for name in found["missing_keys"] if name.endswith((".qweight", ".qzeros", ".scales"))):
        raise CheckpointError(
            f"{source.folder}: by config.json, {absent[0].rpartition('.')[0]} is quantized, but the files do not have "
            f"its {absent[0].rpartition('.')[2]}. Name the layer among the modules that config.json leaves out, or "
            f"download the checkpoint again."
        )
    if quantized and any(".experts." in name for name in source.weights.shapes):
        hf.set_experts_implementation("eager")  # grouped products take plain tensors
    return hf


@contextmanager
def _refusing(where: str, quantized: bool) -> Iterator[None]:
    """Turn what quantizers raise into errors of ours."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError, KeyError, NotImplementedError) as error:
        if not quantized or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{where}: transformers could not load the quantized weights ({type(error).__name__}: {reason[:300]}). Try "
            f"another method: {', '.join(quantization.METHODS)}."
        ) from error


def _dtype(dtype: str | torch.dtype, weights: files.Weights, target: torch.device, packed: bool) -> torch.dtype:
    """The requested element type; by default the stored one, or float32 for a small model on a CPU."""
    if dtype == "auto":
        small = target.type == "cpu" and weights.parameters < SMALL
        return torch.float32 if small and not packed else weights.dtype
    named = {str(kind).removeprefix("torch."): kind for kind in files.DTYPES.values()}
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    key = str(dtype).removeprefix("torch.")
    if short.get(key, key) not in named:
        raise CheckpointError(f"dtype {dtype!r} is not one of auto, {', '.join([*named, *short])}.")
    return named[short.get(key, key)]


def checked_source(
    folder: Path,
    family: Family,
    raw: Mapping[str, Any],
    made: tuple["PreTrainedConfig", files.Weights],
    expected: Mapping[str, tuple[int, ...]],
    tied: set[str],
) -> Source:
    """A checkpoint whose headers have the model's weights.

    Args:
        raw: the parsed config.json.
        made: the transformers config, and the contents of the headers.
        expected: names and shapes under which the family stores the model's parameters.
        tied: parameters that may be absent.

    Raises:
        CheckpointError: they have not.
    """
    config, weights = made
    packed = quantization.published(raw, family, str(folder))
    if packed is not None:
        weights = quantization.unpacked(weights, packed["quant_method"], expected, str(folder))
    files.check_weights(weights, dict(expected), tied, str(folder))
    return Source(folder, family, config, weights, packed)
