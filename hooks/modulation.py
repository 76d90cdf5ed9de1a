"""Blocks whose attention and MLP are shifted, scaled and gated by the noise level of a row (adaptive layer norm).

    read = ln1(x) · (1 + scale) + shift        x + gate · attention(read)        and the same for the MLP

``hook_attn_out`` and ``hook_mlp_out`` are what is added to the stream, so they come after the gate, as does
``hook_result``: the heads' outputs add up to ``hook_attn_out``.

Caveat: a gate may be negative or 0. The output before it (``hook_attn_ungated``, ``hook_mlp_ungated``) then says little
about what reaches the stream.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.errors import require
from sinklens.hooks.offload import class_forward
from sinklens.hooks.points import Point, Tap, at

if TYPE_CHECKING:
    from sinklens.hooks.groups import AttentionPoints

Time = Float[Tensor, " _"] | float | None  # the noise level of each row, or of all rows
BLOCK = "sinklens_block"  # key in a layer's __dict__, like attention.POINTS
SHIFTED = "sinklens_shifted"  # there too: shift and scale of what attention reads in this pass, for inputs.py
MIXED = "sinklens_mixed"  # key in a group of attention points: the heads' outputs of this pass, for hook_result


def modulated(
    x: Float[Tensor, "batch pos *head d_model"],
    shift: Float[Tensor, "batch d_model"],
    scale: Float[Tensor, "batch d_model"],
) -> Float[Tensor, "batch pos *head d_model"]:
    """x · (1 + scale) + shift, the same for all positions of a row, and for each head's copy of x."""
    between = (slice(None), *(None,) * (x.ndim - 2))
    return x * (1 + scale[between]) + shift[between]


def times_of(tree: Any, time: Time, rows: int, device: torch.device) -> Float[Tensor, " batch"] | None:
    """The noise level of each of `rows` as the network reads it; None if it is not conditioned on it.

    Raises:
        SettingError: `time` is missing or does not fit, or it is given and the network is not conditioned on it.
    """
    architecture = tree.architecture
    if not architecture.time:
        require(time is None, "this model is not conditioned on the noise level; leave time= out.")
        return None
    return tree.hf.get_submodule(architecture.base).time_of(time, rows, device)


class FinalModulation(NamedTuple):
    """What the noise level does between the final norm and the head: norm(x) · (1 + scale) + shift."""

    shift: Float[Tensor, "*place d_model"]
    scale: Float[Tensor, "*place d_model"]


def final_modulation(tree: Any, condition: Float[Tensor, "*place d_cond"]) -> FinalModulation:
    """The final shift and scale that are made from `condition`, without calling hooks."""
    made = class_forward(
        tree.hf.get_submodule(tree.architecture.base).get_submodule(tree.architecture.modulation), condition
    )
    return FinalModulation(*made.chunk(2, dim=-1))


def shown(points: Sequence[Point], together: Float[Tensor, "batch parts"]) -> Float[Tensor, "batch parts"] | None:
    """Equal parts of `together`, each passed through its point; None while none of them is watched."""
    if not any(point.watched for point in points):
        return None
    parts = together.chunk(len(points), dim=-1)
    return torch.cat([at(point, part) for point, part in zip(points, parts, strict=True)], dim=-1)


def tap_mixed(undo: ExitStack, output_projection: nn.Module, points: "AttentionPoints") -> None:
    """Keep what enters the output projection while ``hook_result`` is watched; `block_forward` makes its value."""

    def tap(_module: nn.Module, inputs: tuple[Tensor], _output: Tensor) -> None:
        if points.hook_result.watched:
            points.__dict__[MIXED] = inputs[0]

    Tap(undo, [points.hook_result], lambda: output_projection.register_forward_hook(tap, prepend=True).remove)


def block_forward(self: nn.Module, hidden_states: Tensor, condition: Tensor, **kwargs: Any) -> Tensor:
    """Forward of a pre-norm block with modulation, with its points."""
    block, architecture, _ = self.__dict__[BLOCK]
    module = self.get_submodule
    resid_pre = at(block.hook_resid_pre, hidden_states)
    made = module(architecture.modulation)(condition.expand(len(resid_pre), -1))
    seen = shown(list(block.adaln.children()), made)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (made if seen is None else seen).chunk(6, dim=-1)
    block.attn.__dict__[SHIFTED] = shift_1, scale_1
    read = at(block.ln1.hook_modulated, modulated(module(architecture.ln1)(resid_pre), shift_1, scale_1))
    attn_out, _ = module(architecture.attn)(hidden_states=read, **kwargs)
    edited = _result_edits(block.attn, gate_1)
    attn_out = gate_1[:, None] * at(block.hook_attn_ungated, attn_out)
    attn_out = attn_out if edited is None else attn_out + edited
    resid_mid = at(block.hook_resid_mid, resid_pre + at(block.hook_attn_out, attn_out))
    read = at(block.ln2.hook_modulated, modulated(module(architecture.ln2)(resid_mid), shift_2, scale_2))
    mlp_out = gate_2[:, None] * at(block.hook_mlp_ungated, module(architecture.mlp)(read))
    return at(block.hook_resid_post, resid_mid + at(block.hook_mlp_out, mlp_out))


def _result_edits(
    points: "AttentionPoints", gate: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch pos d_model"] | None:
    """What hooks of ``hook_result`` change in the sum of the heads' gated outputs; None while it is not watched."""
    mixed = points.__dict__.pop(MIXED, None)
    if mixed is None:
        return None
    result = points.head_results(mixed) * gate[:, None, None]
    return (points.hook_result(result.clone()) - result).sum(dim=-2)
