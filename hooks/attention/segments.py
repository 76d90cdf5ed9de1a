"""Attention that changes from pass to pass: causal, except inside segments whose queries see all of their segment.

A model with such attention decodes with the same weights from left to right and by diffusion; each pass says by which
rule. *Segments* are ranges of columns: a query in one sees every key up to the end of its segment, any other query its
own and earlier keys. So no segment is a causal pass, one segment at the end is a pass that denoises a block behind
finished text, and one segment of all columns is a bidirectional pass. `Segments` is the rule; ``ForwardPass.segments``
says which one a pass has, and `HookTree.hidden` applies it.

Pitfall: keys that a cache holds were computed by the rule of an earlier pass. A block that was committed by a causal
pass stays causal within itself, whatever a later pass opens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks.forward_pass import CAUSAL, IN_BLOCK, PassKind
from sinklens.utils.integers import as_integer

CHANGES = "sinklens_attention_changes"


@dataclass(frozen=True)
class Segments:
    """The rule of one pass.

    Attributes:
        ranges: columns whose queries see all of their range; they do not overlap.
    """

    ranges: tuple[range, ...] = ()

    def mask(self, real: Bool[Tensor, "batch key"], queries: slice) -> Bool[Tensor, "batch 1 query key"]:
        """True where a query may see a key. Padding is never a key. As a query it sees all keys; no position reads it.

        A row without any key would become NaN in some fused kernels.
        """
        columns = torch.arange(real.shape[1], device=real.device)
        last = columns.clone()
        for one in self.ranges:
            last[one.start : one.stop] = one.stop - 1
        reach = torch.where(real, last, real.shape[1])[:, queries]
        return ((columns <= reach[:, :, None]) & real[:, None, :])[:, None]


def write(config: Any) -> None:
    """Mark a transformers config as that of a model whose attention changes from pass to pass."""
    setattr(config, CHANGES, True)


def changes_attention(config: Any) -> bool:
    """Whether the attention of a model with this transformers config changes from pass to pass."""
    return bool(getattr(config, CHANGES, False))


def single_pass(mode: Any, block_start: Any, length: int, adapted: bool) -> PassKind:
    """The kind of a pass over `length` columns outside a run, whose block ends with the last column.

    Args:
        mode: see `ForwardPass.mode`; None for a pass that sees all tokens.
        block_start: first column of the block of a "denoise" or "draft" pass.
        adapted: whether the checkpoint has an adapter, which a "draft" pass uses.

    Raises:
        SettingError: there is no such mode, or `block_start` does not fit it.
    """
    if mode is None and block_start is None:
        return PassKind()
    require(
        mode in (*CAUSAL, *IN_BLOCK),
        f"mode must be one of {', '.join(map(repr, (*CAUSAL, *IN_BLOCK)))}; got {mode!r}. Without a mode and a "
        f"block_start, a pass sees all tokens.",
    )
    if mode in CAUSAL:
        require(
            block_start is None, f"a {mode!r} pass is causal everywhere, so it has no block; leave block_start= out."
        )
        return PassKind(mode, ())
    first = as_integer(block_start)
    if first is None or not 0 <= first < length:
        raise SettingError(
            f"a {mode!r} pass needs block_start=, the column where the block begins that sees all of itself: 0 to "
            f"{length - 1}; got {block_start!r}."
        )
    return PassKind(mode, (range(first, length),), adapted and mode == "draft")
