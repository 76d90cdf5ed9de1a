"""Tensor parallelism: points show complete values while each process holds some heads and some neurons.

transformers divides a model among processes by its *plan*: projections into heads and into the MLP's neurons are
*sharded*, so each process computes some heads and some neurons; what enters and leaves a layer is complete everywhere,
because the output projections are summed over the processes. All processes run the same script.

A point of a sharded axis gathers its value while it is watched, calls its hooks on the complete value in every process,
and hands on the part that the process holds. Only the value itself travels: recording sink scores gathers
[batch, head, key], never a pattern. `Sharding` knows the axes, `whole` gathers a sharded parameter.

Pitfall: a hook that acts in one process only (``if rank == 0``) leaves the others waiting, or makes them compute
something else. Hooks run in every process, with equal values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.errors import SettingError
from sinklens.hooks.architectures import Architecture
from sinklens.hooks.names import axes_of

HEADS = ("head", "kv_head")
NEURONS = ("d_mlp",)


def started() -> bool:
    """Whether several processes compute together."""
    return dist.is_available() and dist.is_initialized()


def whole(value: Any) -> Any:
    """A parameter with the parts that other processes hold; every process must ask for it."""
    if not started():
        return value
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def is_sharded(module: nn.Module) -> bool:
    """Whether other processes hold parts of a parameter of `module` itself."""
    if not started():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in module.parameters(recurse=False))


@dataclass(frozen=True)
class Sharding:
    """Which axes of a model are divided among processes, each process holding an equal run of them.

    Attributes:
        axes: names of the divided axes, from the glossary of points.
        size: number of processes.
        rank: number of this process.
    """

    axes: tuple[str, ...]
    size: int
    rank: int

    def axis_of(self, point: str) -> int | None:
        """The divided axis of the value at `point`; None if every process has all of it."""
        return _divided_axis(point, self.axes) if point.startswith("blocks.") else None

    def through(self, value: Tensor, axis: int, point: Callable[[Tensor], Tensor]) -> Tensor:
        """This process's part of what `point` makes of the complete value; `value` itself if that is unchanged.

        Raises:
            SettingError: gradients are asked for.
        """
        if value.requires_grad:
            raise SettingError(
                "gradients do not pass through the points of a model that is divided among processes; load it in one "
                "process, or run the pass under torch.no_grad()."
            )
        with torch.inference_mode(False):  # inference tensors do not record in-place writes
            complete = self.gathered(value, axis)
        before = complete._version
        found = point(complete)
        if found is complete and complete._version == before:
            return value
        return self.part(found, axis)

    def gathered(self, value: Tensor, axis: int) -> Tensor:
        """The parts of all processes, one after another along `axis`."""
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, value.contiguous())
        return torch.cat(parts, dim=axis)

    def part(self, value: Tensor, axis: int) -> Tensor:
        """This process's part of a complete value."""
        return value.chunk(self.size, dim=axis)[self.rank].contiguous()

    def summed(self, value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The sum of the processes' values."""
        total = value.contiguous().clone()
        dist.all_reduce(total)
        return total


@cache
def _divided_axis(point: str, axes: tuple[str, ...]) -> int | None:
    return next((number for number, axis in enumerate(axes_of(point)) if axis in axes), None)


def sharding_of(hf: Any, architecture: Architecture) -> Sharding | None:
    """How a transformers model is divided among processes; None if this process has all heads and neurons."""
    if not started():
        return None
    axes: tuple[str, ...] = ()
    for layer in hf.get_submodule(f"{architecture.base}.{architecture.layers}"):
        attn, mlp = layer.get_submodule(architecture.attn), layer.get_submodule(architecture.mlp)
        axes += HEADS if is_sharded(attn.get_submodule(architecture.q)) else ()
        dense = dict(mlp.named_modules()).get(architecture.up)
        axes += NEURONS if dense is not None and is_sharded(dense) else ()
    return Sharding(tuple(dict.fromkeys(axes)), dist.get_world_size(), dist.get_rank()) if axes else None
