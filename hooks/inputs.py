"""The points where a sublayer reads the residual stream. They are off until a setter turns them on.

``hook_q_input``, ``hook_k_input`` and ``hook_v_input`` are copies of the stream, one per head, from which only that
head computes its queries, keys or values; ``hook_attn_in`` is one copy per head for all three; ``hook_mlp_in`` is the
input of the MLP. They are taken before the norm, and each copy is normalized separately, so adding a vector to one
changes exactly one edge of the model, as direct-path patching requires.

``hook_attn_in`` has one copy per query head. In grouped-query attention, keys and values read the first copies, as in
TransformerLens.

Pitfall: a copy is normalized with ln1's weights but not by ln1, so hooks on ``ln1`` see the layer's usual input and do
not act on the copies.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.hooks.modulation import SHIFTED, modulated
from sinklens.hooks.offload import class_forward, value_of, weight_of
from sinklens.hooks.points import Point, Tap


class LayerInputs:
    """The taps of one layer's input points.

    While attention runs, it stores the stream that entered ln1, and with ``hook_attn_in`` the normalized copies.
    """

    def __init__(self, layer: nn.Module, block: Any, tree: Any, undo: ExitStack) -> None:
        self.points, self.mlp_in, self.tree = block.attn, block.hook_mlp_in, tree
        architecture = tree.architecture
        self.norm = layer.get_submodule(architecture.ln1)
        self.stream: Tensor | None = None
        self.shared: Tensor | None = None
        attn: Any = layer.get_submodule(architecture.attn)
        read = [self.points.hook_attn_in, *(getattr(self.points, f"hook_{letter}_input") for letter in "qkv")]
        Tap(undo, read, lambda: self.norm.register_forward_pre_hook(self._enter).remove)
        for letter in "qkv":
            projection = attn.get_submodule(getattr(architecture, letter))
            Tap(undo, read, partial(self._tap, projection, letter, attn.head_dim))
        Tap(undo, read, lambda: attn.register_forward_hook(self._leave).remove)
        norm = layer.get_submodule(architecture.ln2)
        Tap(undo, [self.mlp_in], lambda: norm.register_forward_pre_hook(self._read_mlp).remove)

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor]) -> None:
        if self.tree.cfg.use_split_qkv_input or self.tree.cfg.use_attn_in:
            self.stream = inputs[0]

    def _leave(self, *_: Any) -> None:
        self.stream = self.shared = None

    def _read_mlp(self, _module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        return (self.mlp_in(inputs[0]),) if self.tree.cfg.use_hook_mlp_in and self.mlp_in.watched else None

    def _tap(self, projection: nn.Module, letter: str, d_head: int) -> Callable[[], None]:
        """Project the copies instead of the shared stream with `projection`, while the copies are watched.

        This tap runs before that of ``hook_q``, ``hook_k`` or ``hook_v``, which therefore shows the new results.
        """

        def tap(module: Any, _inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
            copies = self._copies(letter, output.shape[-1] // d_head)
            if copies is None:
                return None
            weights = weight_of(module).unflatten(0, (-1, d_head))
            projected = torch.einsum("bphm,hdm->bphd", copies, weights).flatten(-2)
            bias = value_of(module, "bias")
            return projected if bias is None else projected + bias

        return projection.register_forward_hook(tap, prepend=True).remove

    def _copies(self, letter: str, heads: int) -> Float[Tensor, "batch pos head d_model"] | None:
        """The normalized input of each of the `heads`; None while no point is watched."""
        if self.stream is None:
            return None
        split: Point = getattr(self.points, f"hook_{letter}_input")
        if self.tree.cfg.use_split_qkv_input:
            return self._through(split, heads) if split.watched else None
        if letter == "q" and self.points.hook_attn_in.watched:
            self.shared = self._through(self.points.hook_attn_in, heads)
        return None if self.shared is None else self.shared[:, :, :heads]

    def _through(self, point: Point, heads: int) -> Float[Tensor, "batch pos head d_model"]:
        """Copies of the stream, passed through `point` and the norm; calls the norm's class, bypassing its taps."""
        assert self.stream is not None
        copies = point(repeat(self.stream, "batch pos d_model -> batch pos head d_model", head=heads).contiguous())
        normalized = class_forward(self.norm, copies)
        if SHIFTED not in self.points.__dict__:
            return normalized
        return modulated(normalized, *self.points.__dict__[SHIFTED])
