"""Block-causal attention: a query sees its own block of positions and all earlier blocks.

Two values of the transformers config define the rule; `write` sets them and `rule_of` reads them. The rule therefore
applies to every pass of the model, whatever code calls it; `ruled_by` replaces it for some passes. A
*block* is `length` consecutive positions. Blocks are counted from each row's first token that is not padding
("token"), or from the first column of the batch, padding included ("column").

Pitfall: a single pass over part of a text must begin where a block begins; otherwise its blocks differ from those of
the complete text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.utils.arguments import Count, read_as

LENGTH = "sinklens_block_length"
RULE = "sinklens_rule"
START = "sinklens_blocks_start"
Start = Literal["token", "column"]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a block-causal model.

    Attributes:
        length: positions per block.
        start: where blocks are counted from: each row's first "token", or the first "column".
        sealed: of each row, how many leading columns see none of the columns after them, whatever their block; empty if
            the blocks alone decide.
        reach: number of blocks that a query sees, its own included; None for all earlier ones.
    """

    length: int
    start: Start = "token"
    sealed: tuple[int, ...] = ()
    reach: int | None = None

    def numbers(self, real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """Block of each position, from 0; -1 on padding before a row's first token if blocks start there."""
        return self._columns(real).div(self.length, rounding_mode="floor").clamp(min=-1)

    def offsets(self, real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """Place of each position within its block, from 0."""
        return self._columns(real) % self.length

    def _columns(self, real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        columns = torch.arange(real.shape[1], device=real.device).expand_as(real)
        return columns - real.long().argmax(dim=1, keepdim=True) if self.start == "token" else columns

    def mask(self, real: Bool[Tensor, "batch key"], queries: slice) -> Bool[Tensor, "batch 1 query key"]:
        """True where a query may see a key. Padding is never a key. As a query it sees all keys; no position reads it.

        A row without any key would become NaN in some fused kernels.
        """
        number = self.numbers(real)
        reach = torch.where(real, number, number.amax(dim=1, keepdim=True))[:, queries]
        seen = (number[:, None, :] <= reach[:, :, None]) & real[:, None, :]
        if self.reach is not None:
            seen &= number[:, None, :] > reach[:, :, None] - self.reach
        return (seen & ~self._hidden(real, queries) if self.sealed else seen)[:, None]

    def of_rows(self, rows: Bool[Tensor, " batch"]) -> "Blocks":
        """The same blocks for a pass over some `rows` of the batch."""
        kept = zip(self.sealed, rows.tolist(), strict=True) if self.sealed else ()
        return replace(self, sealed=tuple(columns for columns, here in kept if here))

    def _hidden(self, real: Bool[Tensor, "batch key"], queries: slice) -> Bool[Tensor, "batch query key"]:
        """True where a sealed query would see a column after the sealed ones; guidance repeats the rows.

        Raises:
            SettingError: the pass has other rows than the sealed ones.
        """
        repeats, left = divmod(len(real), len(self.sealed))
        if left or not repeats:
            raise SettingError(
                f"a pass of {len(real)} rows cannot be matched with the {len(self.sealed)} rows of this step, whose "
                f"prompts do not see their answers; pass all rows of the step's canvas."
            )
        sealed = torch.tensor(self.sealed, device=real.device).repeat(repeats)[:, None, None]
        columns = torch.arange(real.shape[1], device=real.device)
        return (columns[queries][:, None] < sealed) & (columns >= sealed)


def write(config: Any, blocks: Blocks | None) -> None:
    """Make a model with this transformers config block-causal; None changes nothing."""
    if blocks is not None:
        setattr(config, LENGTH, blocks.length)
        setattr(config, START, blocks.start)


def rule_of(config: Any) -> Any:
    """The attention rule of a model with this transformers config: that of `ruled_by`, else its blocks, else None."""
    if (rule := getattr(config, RULE, None)) is not None:
        return rule
    length = getattr(config, LENGTH, None)
    return None if length is None else Blocks(length, getattr(config, START, "token"))


@contextmanager
def ruled_by(config: Any, rule: Any) -> Iterator[None]:
    """Within the block, passes of a model with this transformers config go by `rule`; None changes nothing.

    Args:
        rule: `Blocks`, or `segments.Segments`.
    """
    if rule is None:
        yield
        return
    before = getattr(config, RULE, None)
    setattr(config, RULE, rule)
    try:
        yield
    finally:
        if before is None:
            delattr(config, RULE)
        else:
            setattr(config, RULE, before)


def check_length(length: Any) -> int:
    """`length` as a block length.

    Raises:
        SettingError: it is not an integer of at least 1.
    """
    return int(read_as(Count, "block_length", length))
