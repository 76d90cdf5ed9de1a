"""Quantized weights, through transformers' quantizers for bitsandbytes.

``sinklens.load(..., quantization="bnb-nf4")`` reads full-precision files and quantizes each layer as it is read. A
checkpoint whose config.json has a ``quantization_config`` of bitsandbytes is loaded as it was published.

Silent failure that is refused: a quantizer that finds none of its layers leaves a model as it was, without an error.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from sinklens.errors import CheckpointError, nearest, require
from sinklens.families import Family
from sinklens.model.files import rename

METHODS = ("bnb-int8", "bnb-nf4")
LIBRARY = "bitsandbytes"
NAMES_OF_MODULES = ("modules_to_not_convert", "llm_int8_skip_modules")


def check_library(config: Any, where: str) -> None:
    """Refuse a quantization config, one of transformers' or that of a config.json, of another library.

    Raises:
        CheckpointError: see above.
    """
    found = config if isinstance(config, dict) else vars(config)
    kind = found.get("quant_method")
    kind = getattr(kind, "value", kind)
    older = kind is None and {"load_in_8bit", "load_in_4bit"} & set(found)  # before transformers named the method
    require(
        kind == LIBRARY or older,
        f"{where}: weights quantized by quant_method {kind!r} are not supported; known is {LIBRARY}. Correct "
        f"config.json, or load the full-precision checkpoint, with quantization= if it is too large.",
        CheckpointError,
    )


def check_wanted(wanted: Any, packed: Any, where: str) -> None:
    """Refuse a value of ``quantization`` that is not known, or does not apply to a full-precision checkpoint.

    Raises:
        CheckpointError: see above.
    """
    require(
        packed is None,
        f"{where}: this checkpoint is quantized already; leave quantization= out, or load the full-precision one.",
        CheckpointError,
    )
    if not isinstance(wanted, str):
        check_library(wanted, where)
    else:
        require(
            wanted in METHODS,
            f"quantization={wanted!r} is unknown; choose one of {', '.join(METHODS)}, or pass a quantization config of "
            f"transformers.{nearest(wanted, METHODS)}",
            CheckpointError,
        )


def published(raw: Mapping[str, Any], family: Family, where: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint, with modules under transformers' names; None without one.

    Raises:
        CheckpointError: its library is not supported, or the family stores several weights as one.
    """
    found = raw.get("quantization_config")
    if found is None:
        return None
    check_library(found if isinstance(found, dict) else {}, where)
    require(
        not family.fused,
        f"{where}: the quantized weights of a {family.name} checkpoint cannot be split as its class needs. "
        f"Load the full-precision checkpoint with quantization=.",
        CheckpointError,
    )
    renamed = {
        key: [rename(f"{name}.", family.renames).removesuffix(".") for name in found[key]]
        for key in NAMES_OF_MODULES
        if found.get(key)
    }
    return {**found, "quant_method": LIBRARY, **renamed}


def quantized_weights(hf: "PreTrainedModel") -> dict[str, str]:
    """Name of each quantized weight -> its library and form, such as "bitsandbytes Params4bit"."""
    return {
        name: f"{LIBRARY} {type(value).__name__}"
        for name, value in hf.named_parameters()
        if type(value).__module__.partition(".")[0] == LIBRARY
    }


def read_quantized(
    read_to: "partial[PreTrainedModel]", config: "PreTrainedConfig", packed: dict[str, Any] | None, wanted: Any
) -> "PreTrainedModel":  # fmt: skip
    """Read a model whose weights are, or become, quantized.

    Args:
        read_to: reads it, with transformers' config of a quantization or without.
        config: its transformers config.
        packed: the config of `published`.
        wanted: the argument ``quantization`` of `sinklens.load`.

    Raises:
        CheckpointError: the quantizer cannot load it, or finds none of its layers.
    """
    try:
        if packed is not None:
            config.quantization_config = packed
        if isinstance(wanted, str):
            from transformers import BitsAndBytesConfig

            four_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": read_to.keywords["dtype"]}
            options = {"load_in_8bit": True} if wanted == "bnb-int8" else {"load_in_4bit": True} | four_bits
            wanted = BitsAndBytesConfig(**options)
        hf = read_to(quantization=wanted)
    except (ImportError, RuntimeError, ValueError, KeyError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(
            f"transformers could not load the quantized weights ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Try another method: {', '.join(METHODS)}."
        ) from error
    require(
        quantized_weights(hf),
        f"the quantizer found none of its layers in this {type(hf).__name__}; it quantizes linear layers. Leave "
        f"quantization= out.",
        CheckpointError,
    )
    if any(".experts." in name for name, _ in hf.named_parameters()):
        hf.set_experts_implementation("eager")  # grouped products take plain tensors
    return hf
