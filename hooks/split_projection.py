"""One projection that makes queries, keys and values, split into three that can be tapped and read one by one.

GPT-2 keeps the three side by side in one matrix. `split` gives the module that owns it three children, ``q``, ``k`` and
``v``, each of which computes its own columns; the module joins their results. Weights and their names do not change,
since the children hold no parameters.

Caveat: three products replace one, so values can differ in the last bits from those of the unsplit module.
"""

from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.hooks.offload import value_of, weight_of

LETTERS = "qkv"


class Slice(nn.Module):
    """A third of a projection: ``x @ weight.T + bias``."""

    def __init__(self, whole: nn.Module, number: int) -> None:
        super().__init__()
        self.__dict__["_whole"] = whole  # not a submodule: it owns the weights
        self._number = number

    @property
    def weight(self) -> Float[Tensor, "out d_model"]:
        """A view of its rows."""
        return weight_of(self.__dict__["_whole"]).chunk(len(LETTERS))[self._number]

    @property
    def bias(self) -> Float[Tensor, " out"]:
        """A view of its part."""
        return value_of(self.__dict__["_whole"], "bias").chunk(len(LETTERS))[self._number]

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch out"]:
        return nn.functional.linear(x, self.weight, self.bias)


def split(undo: ExitStack, whole: Any) -> None:
    """Give a `Conv1D` the children of `LETTERS`; closing `undo` takes them away."""
    cls = type(whole)
    for number, letter in enumerate(LETTERS):
        whole.add_module(letter, Slice(whole, number))
        undo.callback(delattr, whole, letter)
    joined = {"forward": lambda self, x: torch.cat([self.get_submodule(letter)(x) for letter in LETTERS], dim=-1)}
    whole.__class__ = type(cls.__name__, (cls,), joined | {"__module__": cls.__module__})
    undo.callback(setattr, whole, "__class__", cls)
