"""Token ids that record which of them are padding.

Ids alone do not show whether a leading end token is padding or text. `PaddedIds` is a tensor of ids with the answer in
its attribute ``is_real``. Copies, moves, rows and slices keep the matching part of ``is_real``; any other function
returns a plain tensor, whose padding is unknown again.

Silent failure: a token that is written over padding stays padding. `PaddedIds.written` finds such tokens.
"""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

CARRYING = {
    Tensor.__getitem__,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.detach,
    Tensor.expand,
    Tensor.long,
    Tensor.repeat,
    Tensor.repeat_interleave,
    Tensor.to,
    Tensor.unsqueeze,
    torch.clone,
    torch.repeat_interleave,
}
"""Functions that select, copy or move elements without reading them; applied to the marks as to the ids."""


class PaddedIds(Tensor):
    """Token ids, some of which are padding.

    Attributes:
        is_real: False on padding; the shape of the ids.
        pad: the token at the padding.
    """

    is_real: Bool[Tensor, "*shape"]
    pad: int

    @staticmethod
    def of(ids: Int[Tensor, "*shape"], real: Bool[Tensor, "*shape"], pad: int) -> Tensor:
        """`ids` with their marks, or as they are if none is padding or they are a single id."""
        if ids.ndim == 0 or bool(real.all()):
            return ids
        found = ids.as_subclass(PaddedIds)
        found.is_real, found.pad = real, pad
        return found

    @property
    def plain(self) -> Int[Tensor, "*shape"]:
        """The ids as a plain tensor."""
        return self.as_subclass(Tensor)

    def written(self) -> bool:
        """Whether a token other than `pad` is at a padded position."""
        return bool((self.plain[~self.is_real] != self.pad).any())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func not in CARRYING or not isinstance(args[0], PaddedIds):
                return result
            marks = func(args[0].is_real, *args[1:], **(kwargs or {}))
            return PaddedIds.of(result.as_subclass(Tensor), marks.bool(), args[0].pad)

    def __iter__(self) -> Any:
        return iter([self[row] for row in range(len(self))])

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # files hold plain tensors, which torch.load reads without this class
