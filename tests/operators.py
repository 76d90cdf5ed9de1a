"""Calls that would wait for a GPU, counted on the CPU."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
COPYING = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


def tensors(values):
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


class Counting:
    def __init__(self, seen):
        super().__init__()
        self.seen = seen


class Operators(Counting, TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        chosen = name in ("index", "index_put", "index_put_") and any(
            one.dtype == torch.bool for one in tensors(args[1])
        )
        self.seen[name] += chosen or name in WAITING
        return func(*args, **(kwargs or {}))


class Copies(Counting, TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen["copies"] += func in COPYING
        return func(*args, **(kwargs or {}))
