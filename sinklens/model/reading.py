"""Reads the weights of a checkpoint into its transformers class, once its headers have been checked.

transformers opens every safetensors file at once and reads their tensors in a pool of threads, straight to the device
on which the model runs. Nothing is read that the model does not keep, so memory is that of the weights and of the
tensors in flight.

Pitfall: memory-mapped pages of the files count as memory of the process in ``top`` (RES), but the system takes them
back when it needs room.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from sinklens.errors import CheckpointError, require
from sinklens.families import Family
from sinklens.model import files
from sinklens.model.packing import class_for

DeviceMap = str | dict[str, int | str | torch.device]
SMALL = 1_000_000_000  # parameters; smaller models run in float32 without a GPU, and load without a progress bar


def read(
    folder: Path,
    family: Family,
    config: "PreTrainedConfig",
    *,
    dtype: torch.dtype,
    device_map: Any,
    attention: str,
    quantization: Any = None,
) -> "PreTrainedModel":  # fmt: skip
    """The transformers model with its weights, on its device.

    Args:
        folder, family, config: where the files are, the family's record, and the transformers config.
        dtype: element type of what is not quantized.
        device_map: device or devices; None for the CPU.
        attention: the attention function that it runs.
        quantization: transformers' config with which full-precision weights are quantized while they are read.

    Raises:
        CheckpointError: the checkpoint's quantizer cannot load it, or a quantized checkpoint's files lack weights.
    """
    options: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization}
    hf, found = class_for(config, family).from_pretrained(
        folder,
        config=config,
        key_mapping=dict(family.renames) or None,
        dtype=dtype,
        device_map=device_map,
        attn_implementation=attention,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        adapter_kwargs={"subfolder": "config.json"},  # no folder: transformers would add an adapter that is merged here
        **options,
    )
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{folder}: {len(missing)} weights are missing ({', '.join(missing[:4])}). Download the checkpoint again."
        )
    return hf


def dtype_for(dtype: str | torch.dtype, weights: files.Weights, target: torch.device, packed: bool) -> torch.dtype:
    """The requested element type; by default the stored one, or float32 for a small model on a CPU."""
    if dtype == "auto":
        small = target.type == "cpu" and weights.parameters < SMALL
        return torch.float32 if small and not packed else weights.dtype
    named = {str(kind).removeprefix("torch."): kind for kind in files.DTYPES.values()}
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    key = str(dtype).removeprefix("torch.")
    require(
        short.get(key, key) in named,
        f"dtype {dtype!r} is not one of auto, {', '.join([*named, *short])}.",
        CheckpointError,
    )
    return named[short.get(key, key)]
