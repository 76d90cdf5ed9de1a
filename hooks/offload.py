"""Weights of modules that accelerate keeps elsewhere.

A model that is spread over devices may have layers whose weights rest in main memory or on disk. accelerate brings them
to the device just before such a module's ``forward`` and takes them away behind it; in between, the parameter is an
empty tensor on the meta device. A tap runs behind ``forward``, so it has to bring them back itself.

One way this fails: a weight that was brought back here is a copy; writing to it changes nothing.
"""

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn


def weight_of(module: Any) -> Tensor:
    """The weight of `module`, on the device where the module computes."""
    return value_of(module, "weight")


def value_of(root: Any, name: str) -> Any:
    """The parameter or buffer called `name` below `root`, on the device where its module computes, or None if it is."""
    path, _, own = name.rpartition(".")
    module = root.get_submodule(path)
    value = getattr(module, own)
    if value is None or not value.is_meta:
        return value
    with align_module_device(module):
        return getattr(module, own)


def device_of(module: nn.Module) -> torch.device:
    """Where the inputs of `module` go: to its weight, or to where accelerate brings the weight."""
    hook: Any = module.__dict__.get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        found = getattr(part, "execution_device", None)
        if found is not None:
            return torch.device(f"cuda:{found}" if isinstance(found, int) else found)
    return next(module.parameters()).device
