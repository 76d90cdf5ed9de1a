"""Weights of modules that are offloaded by accelerate or quantized.

A model that is split over devices may have layers whose weights are in main memory or on disk. accelerate loads them
onto the device just before such a module's ``forward`` and removes them after it; between calls, the parameter is an
empty tensor on the meta device. A tap runs after ``forward``, so it has to load them again.

A quantized weight is returned as the matrix that its layer multiplies with (quantized.py).

Pitfall: a weight loaded or dequantized here is a copy; writing to it changes nothing.
"""

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklens.hooks.quantized import PACKED, dequantized, form_of


def weight_of(module: Any) -> Tensor:
    """The weight of `module`, on the device where the module computes; of a projection [out, in]."""
    weight = value_of(module, "weight")
    return weight.T if isinstance(module, Conv1D) else weight  # GPT-2 stores [in, out]


def value_of(root: Any, name: str) -> Any:
    """The parameter or buffer called `name` below `root`, on the device where its module computes; may be None."""
    path, _, attribute = name.rpartition(".")
    module = root.get_submodule(path)
    if form_of(module, attribute) is not None and attribute != PACKED:
        with align_module_device(module):
            return dequantized(module, attribute)
    value = getattr(module, attribute)
    if value is None or not value.is_meta:
        return value
    with align_module_device(module):
        return getattr(module, attribute)


def class_forward(module: Any, *inputs: Tensor) -> Tensor:
    """The forward of the module's class, with its weights in place and without its hooks."""
    with align_module_device(module):
        return type(module).forward(module, *inputs)


def device_of(module: nn.Module) -> torch.device:
    """The device for inputs of `module`: that of its weight, or the one onto which accelerate loads the weight."""
    hook: Any = module.__dict__.get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        found = getattr(part, "execution_device", None)
        if found is not None:
            return torch.device(f"cuda:{found}" if isinstance(found, int) else found)
    return next(module.parameters()).device
