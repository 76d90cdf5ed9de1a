"""Keys and values of finished blocks, so that a step of block diffusion computes only what is new.

A step computes the columns from the first one without cached keys to the end of the current blocks, in one pass, and
keeps the keys of the columns that no later step changes. The first step of a block therefore also computes the block
before it, whose last tokens were decided in the step before. If the canvas holds other tokens than the cached ones (an
edit, a replay), the cache is emptied. Tokens are the same with and without a cache.

Pitfall: points show only the computed positions, and attention has a row for each of these; see `Point.key_positions`.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.tree import HookTree


class BlockCache:
    """Cached keys and values of one run.

    Attributes:
        length: number of columns with cached keys.
    """

    def __init__(self, tree: HookTree) -> None:
        self._tree = tree
        self.length = 0
        self._keys: Any = None
        self._ids: Tensor | None = None
        self._last: Float[Tensor, "batch 1 d_model"] | None = None  # output before the first column without keys
        self._before: Float[Tensor, "batch 1 d_model"] | None = None  # that of the latest pass

    def first(self, canvas: Int[Tensor, "batch pos"]) -> int:
        """The first column that a pass over `canvas` must compute; empties the cache if its tokens have changed."""
        if self._ids is not None and not torch.equal(self._ids, canvas[:, : self.length]):
            self.length, self._keys, self._ids, self._last = 0, None, None, None
        return self.length

    def hidden(
        self, canvas: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"], window: slice
    ) -> Float[Tensor, "batch new d_model"]:
        """The final-norm outputs of the columns up to `window.stop`; keeps the keys before `window.start`."""
        from transformers import DynamicCache

        first = self.first(canvas)
        if self._keys is None:
            self._keys = DynamicCache(config=self._tree.hf.config)
        hidden = self._tree.hidden(canvas[:, first : window.stop], real[:, : window.stop], self._keys)
        self._keys.crop(-(window.stop - window.start))
        self.length, self._ids = window.start, canvas[:, : window.start].clone()
        self._before = self._last
        if window.start > first:
            self._last = hidden[:, [window.start - first - 1]]
        return hidden

    def shifted(
        self, hidden: Float[Tensor, "batch new d_model"], real: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch new d_model"]:
        """`hidden` one position later; see `one_later`."""
        return one_later(hidden, real, self._before)


def one_later(
    hidden: Float[Tensor, "batch new d_model"],
    real: Bool[Tensor, "batch pos"],
    before: Float[Tensor, "batch 1 d_model"] | None = None,
) -> Float[Tensor, "batch new d_model"]:
    """`hidden`, the outputs of the last positions of `real`, one position later; a row's first token keeps its own.

    Args:
        before: the output before the first position; by default this position keeps its own.
    """
    later = torch.cat([hidden[:, :1] if before is None else before, hidden[:, :-1]], dim=1)
    if bool(real[:, 0].all()):
        return later
    first = (real & (real.cumsum(dim=1) == 1))[:, -hidden.shape[1] :].to(hidden.device)
    return torch.where(first[..., None], hidden, later)
