"""Weights of modules, which accelerate may have offloaded, or bitsandbytes quantized.

A model that is split over devices may have layers whose weights are in main memory or on disk. accelerate loads them
onto the device just before such a module's ``forward`` and removes them after it; between calls, the parameter is an
empty tensor on the meta device. A tap runs after ``forward``, so it has to load them again.

A quantized layer stores its matrix in few bits with scales; reading it is refused.

Pitfall: a weight loaded here is a copy; writing to it changes nothing.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklens.errors import require

SHORT = (torch.int8, torch.uint8, torch.int16, torch.bool)  # integers that float32 represents exactly


def form_of(module: nn.Module) -> str | None:
    """How the weight of `module` is quantized, such as "bitsandbytes Linear4bit"; None if it is not."""
    kind = type(module)
    return f"bitsandbytes {kind.__name__}" if kind.__module__.startswith("bitsandbytes.") else None


def weight_of(module: Any) -> Tensor:
    """The weight of `module`, on the device where the module computes; of a projection [out, in]."""
    weight = value_of(module, "weight")
    return weight.T if isinstance(module, Conv1D) else weight  # GPT-2 stores [in, out]


def value_of(root: Any, name: str) -> Any:
    """The parameter or buffer called `name` below `root`, on the device where its module computes; may be None.

    Raises:
        SettingError: it is quantized.
    """
    path, _, attribute = name.rpartition(".")
    module = root.get_submodule(path)
    form = form_of(module) if attribute == "weight" else None
    require(form is None, f"{name} is quantized ({form}); load the model without quantization to read weights.")
    return _loaded(module, attribute)


def _loaded(module: Any, attribute: str) -> Any:
    value = getattr(module, attribute)
    if value is None or not value.is_meta:
        return value
    with align_module_device(module):
        return getattr(module, attribute)


def stored_values(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of everything that ``state_dict`` lists, on the device where its module computes.

    Integers that float32 would round come in words of 16 bits, for fingerprints.
    """
    for name, value in root.state_dict().items():
        if isinstance(value, Tensor):
            path, _, attribute = name.rpartition(".")
            found = _loaded(root.get_submodule(path), attribute) if value.is_meta else value
            exact = found.is_floating_point() or found.dtype in SHORT
            yield name, found if exact else found.contiguous().view(torch.int16)


def class_forward(module: Any, *inputs: Tensor) -> Tensor:
    """The forward of the module's class, with its weights in place and without its hooks."""
    with align_module_device(module):
        return type(module).forward(module, *inputs)


def device_of(module: nn.Module) -> torch.device:
    """The device for inputs of `module`: that of its weight, or the one onto which accelerate loads the weight."""
    hook: Any = module.__dict__.get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        if (found := getattr(part, "execution_device", None)) is not None:
            return torch.device(f"cuda:{found}" if isinstance(found, int) else found)
    return next(module.parameters()).device
