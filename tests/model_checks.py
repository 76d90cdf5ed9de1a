"""The self-check in `sinklens.load`, which most of a test's models have passed before in the same process."""

import json
import zlib
from typing import Any

import torch

import sinklens.model.model
from sinklens.hooks import HookTree
from sinklens.model.selfcheck import check

_passed: set[Any] = set()


def check_equal_models_once() -> None:
    """Skip the check of a model that equals one that passed; tests of the check call it themselves."""
    sinklens.model.model.run_check = check_unless_passed


def check_unless_passed(tree: HookTree, causal: bool) -> None:
    """`check`, if no equal model has passed it: same weights, config, modules and direction."""
    described = _described(tree, causal)
    if described is None or described not in _passed:
        check(tree, causal)
        _passed.add(described)


def _described(tree: HookTree, causal: bool) -> Any:
    """What the check's result follows from; None where hooks of others change the pass, or
    weights are elsewhere or quantized."""
    hf = tree.hf
    modules = list(hf.modules())
    if any("_hf_hook" in vars(module) for module in modules):
        return None
    hooks = (hook for one in modules for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values()))
    if not all(getattr(hook, "__module__", "").startswith("sinklens.") for hook in hooks):
        return None
    if getattr(hf.config, "quantization_config", None) is not None:
        return None
    values = [*hf.named_parameters(), *hf.named_buffers()]
    if any(value.is_meta for _, value in values):
        return None
    weights = [(name, str(value.dtype), str(value.device), _checksum(value)) for name, value in values]
    config = json.dumps(hf.config.to_dict(), sort_keys=True, default=str)
    return tuple(weights), config, causal, tree.architecture, tuple(type(module).__name__ for module in modules)


def _checksum(value: torch.Tensor) -> int:
    flat = value.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy() if flat.numel() else b"")
