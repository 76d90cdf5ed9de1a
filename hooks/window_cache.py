"""A key/value cache whose pass computes one window of columns anywhere in the text and reads the others as they were.

transformers' caches append: the columns of a pass follow those that are cached. Here a *window* of columns is computed,
and attention reads the keys of all columns. A key is *fresh* if this pass computes it, *stale* if an earlier pass did,
and *gone* if no query may see it. While `Watch.cache` is set, the attention function and the taps of ``hook_k`` and
``hook_v`` take part: these points show the keys and values of all columns, before the rotation, and the key axis of
every map has all columns. Queries are those of the window.

A hook that changes a stale key or value changes it for this pass only. `WindowCache.edited` names these positions,
whose entries the caller should not use again. A fresh one that a hook changes is kept as the hook left it.

Memory: three tensors [batch, pos, kv_head, d_head] per layer (keys before and after the rotation, and values).

Pitfall: entries depend on everything that was done to the model when they were computed. A hook that acts at one step
leaves its mark on the entries of that step until they are computed again.
"""

import sys
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sinklens.hooks.offload import class_forward

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.hooks.tree import HookTree

KeyOrValue = Literal["k", "v"]


class WindowCache(Cache):
    """The keys and values of one run.

    Attributes:
        window: the columns that the pass computes.
        fresh: keys that the pass computes and uses; never padding.
        gone: keys that no query may see.
        edited: positions whose stale key or value a hook changed in this pass.
    """

    def __init__(self, tree: "HookTree", real: Bool[Tensor, "batch pos"]) -> None:
        super().__init__(layers=[])
        self._tree, self._real = tree, real
        self._raw: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._changed: dict[tuple[KeyOrValue, int], Tensor] = {}
        self.window = slice(0, real.shape[1])
        self.fresh: Bool[Tensor, "batch layer pos"]
        self.gone: Bool[Tensor, "batch layer pos"]
        self.edited = torch.zeros_like(real)

    def hidden(
        self,
        canvas: Int[Tensor, "batch pos"],
        window: slice,
        fresh: Bool[Tensor, "batch layer pos"],
        gone: Bool[Tensor, "batch layer pos"],
    ) -> Float[Tensor, "batch window d_model"]:
        """The final-norm outputs of the columns in `window`, from a pass over `canvas`."""
        self.window, self.fresh, self.gone = window, fresh, gone
        self.edited = torch.zeros_like(self._real)
        self._changed.clear()
        watch = self._tree.watch
        watch.describe(real=self._real, fresh=fresh, gone=gone)
        self._uniform = self.fresh[:, :, self.window].all(dim=2).all(dim=0).tolist()  # in every row
        self._hides = self.gone.any(dim=2).any(dim=0).tolist()
        computed = self._tree.watch.forward_pass.computed
        assert computed is not None
        self._counted, self._every = computed[:, self.window], bool(computed[:, self.window].all())
        watch.cache = self
        names = ("hook_k", "hook_v", "hook_rot_k")
        try:
            with watch.armed(getattr(block.attn, name) for block in self._tree.blocks for name in names):
                return self._tree.hidden(canvas[:, window], self._real, self)
        finally:
            watch.cache = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The column at which the pass begins."""
        return self.window.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys, and the column of the first."""
        return self._real.shape[1], 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Float[Tensor, "batch kv_head key d_head"], Float[Tensor, "batch kv_head key d_head"]]:
        """The rotated keys, and the values, of all columns of a layer, from those of the window."""
        self._store(self._keys, layer_idx, key_states, axis=2)
        self._store(self._values, layer_idx, value_states, axis=2)
        values = self._changed.get(("v", layer_idx))
        return self._edited_keys(layer_idx), self._values[layer_idx] if values is None else values.transpose(1, 2)

    def seen(
        self, layer: int, mask: Bool[Tensor, "batch 1 query key"] | None, device: torch.device
    ) -> tuple[Bool[Tensor, "batch 1 query key"] | None, Bool[Tensor, "batch query"] | None]:
        """What attention of one layer needs beside keys and values.

        Returns:
            `mask` without the keys that are gone; None if nothing is hidden. Then the queries whose own position is
            computed and is not padding; None for all.
        """
        if self._hides[layer]:
            visible = ~self.gone[:, layer, None, None].to(device)
            if mask is not None:  # one row if it is the same for all queries
                visible = visible & (mask[..., :1, :] if mask.stride(-2) == 0 else mask)
            mask = visible.expand(-1, -1, self.window.stop - self.window.start, -1)
        return mask, None if mask is None and self._every else self._counted.to(device)

    def project(
        self, kind: KeyOrValue, layer: int, computed: Float[Tensor, "batch window kv_head d_head"], point: "Point"
    ) -> Float[Tensor, "batch window kv_head d_head"]:
        """Pass the keys or values of all columns through `point`; returns those of the window, with any edits."""
        if kind == "k":
            self._store(self._raw, layer, computed, axis=1)
        if not point.watched:
            return computed
        if kind == "v":
            self._store(self._values, layer, computed.transpose(1, 2), axis=2)
        shown = self._raw[layer].clone() if kind == "k" else self._values[layer].transpose(1, 2).contiguous()
        returned = point(shown.clone())
        differs = (returned != shown).flatten(2).any(dim=-1)
        if not bool(differs.any()):
            return computed
        self.edited |= differs.to(self.edited.device) & ~self.fresh[:, layer]
        self._changed[kind, layer] = returned
        computed = torch.where(differs[:, self.window, None, None], returned[:, self.window], computed)
        if kind == "k":
            self._store(self._raw, layer, computed, axis=1)
        return computed

    def _store(self, kept: dict[int, Tensor], layer: int, computed: Tensor, axis: int) -> None:
        """Write the fresh entries of the window into the tensor of all columns along `axis`."""
        if layer not in kept:
            size = list(computed.shape)
            size[axis] = self._real.shape[1]
            kept[layer] = computed.new_zeros(size)
        part = kept[layer].narrow(axis, self.window.start, self.window.stop - self.window.start)
        if self._uniform[layer]:
            part.copy_(computed)
            return
        fresh = self.fresh[:, layer, self.window].to(part.device)
        size = [fresh.shape[0] if at == 0 else fresh.shape[1] if at == axis else 1 for at in range(4)]
        part.copy_(torch.where(fresh.view(size), computed, part))

    def _edited_keys(self, layer: int) -> Float[Tensor, "batch kv_head key d_head"]:
        """The rotated keys, with the edits that a hook made to stale ones at ``hook_k``."""
        keys, changed = self._keys[layer], self._changed.get(("k", layer))
        if changed is None:
            return keys
        stale = (changed != self._raw[layer]).flatten(2).any(dim=-1) & ~self.fresh[:, layer]
        architecture = self._tree.architecture
        base = self._tree.hf.get_submodule(architecture.base)
        attn: Any = base.get_submodule(architecture.layers)[layer].get_submodule(architecture.attn)
        norm: nn.Module | None = getattr(attn, architecture.k_norm, None) if architecture.k_norm else None
        normed = (changed if norm is None else class_forward(norm, changed)).transpose(1, 2)
        cos, sin = base.rotary_emb(changed, position_ids=(self._real.long().cumsum(-1) - 1).clamp(min=0))
        rotate = sys.modules[type(attn).__module__].apply_rotary_pos_emb
        return torch.where(stale[:, None, :, None], rotate(normed, normed, cos, sin)[1], keys)
