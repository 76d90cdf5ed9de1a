"""A low-rank adapter that acts in some passes, and there in the block alone; its weights are never merged.

An adapted projection of x returns W x + scale · B A x. Passes that a run marks as `ForwardPass.adapted` use it, at the
columns of their block; every other pass, and every other column, computes what the checkpoint computes without the
adapter. Keys and values of finished text are therefore never adapted.

Pitfall: ``attn.hook_result`` and the weights that a model shows (``W_O``, …) are those without the adapter. What an
adapted layer adds to the stream is ``hook_attn_out`` and ``hook_mlp_out``.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

if TYPE_CHECKING:
    from sinklens.hooks.points import Watch

ADAPTED = ("o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that an adapter may change. Hook points read the others' outputs before an adapter could add to them."""


class LowRank(NamedTuple):
    """The two factors of what an adapter adds to a projection."""

    a: Float[Tensor, "rank d_in"]
    b: Float[Tensor, "d_out rank"]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of a checkpoint.

    Attributes:
        name: the folder that it was read from.
        scale: factor of what it adds.
        factors: path of each adapted projection in the transformers model -> its factors.
    """

    name: str
    scale: float
    factors: Mapping[str, LowRank] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Hash of its scale and factors, the same in every dtype that represents them exactly."""
        digest = hashlib.sha256(repr(self.scale).encode())
        for path, pair in sorted(self.factors.items()):
            digest.update(path.encode())
            for factor in pair:
                digest.update(factor.float().cpu().numpy().tobytes())
        return digest.hexdigest()


def connect_adapter(undo: ExitStack, hf: nn.Module, adapter: Adapter, watch: "Watch") -> None:
    """Install the taps of an adapter; called once.

    That of an output projection comes after ``hook_result``, which computes the output again, and that of another
    projection before the points that show it.
    """
    for path, factors in adapter.factors.items():
        handle = hf.get_submodule(path).register_forward_hook(
            _tap(factors, adapter.scale, watch), prepend=not path.endswith("o_proj")
        )
        undo.callback(handle.remove)


def _tap(factors: LowRank, scale: float, watch: "Watch") -> Callable[..., Tensor | None]:
    """A hook that adds the low-rank product to the output of one projection."""

    def add(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        described = watch.forward_pass
        if not described.adapted or described.block is None:
            return None
        columns = torch.arange(described.queries.start, described.queries.stop, device=output.device)
        inside = (columns >= described.block.start) & (columns < described.block.stop)
        a, b = (factor.to(output) for factor in factors)
        return output + inside[:, None] * scale * (inputs[0] @ a.mT @ b.mT)

    return add
