"""Motion of the strongest keys within a block, for the study `kinds`.

Sums over other queries move because the queries change. So a pair of consecutive steps is compared over the same
queries: those of the *current block*, in which the two steps decide, and those *before* it. The blocks are those of a
block-causal model or of the sampler (``block_length``, or one canvas); of other models the answer is one block, and all
prompt tokens that do not share a block with the answer come before.

In an autoregressive model a block is one token, so no two steps have a current block in common.

Caveat: a block has fewer queries than the text before it, and a sum of fewer queries moves more easily. Compare a
model's blocks with those of another model of the same block length, not with its own earlier text.
"""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.intervals import known_mean
from sinklens.sinks import SinkTrack
from sinklens.sinks.quantities import Summed, Variables

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.sampling import Sampler

BLOCK_MOTION = {
    "block_jump_share": "steps of a block at which the strongest key of the block's queries changes, share",
    "block_static_share": "heads whose strongest key for the block's queries never changes in the block, share",
    "before_jump_share": "the same steps: changes of the strongest key of the queries before the block, share",
    "before_static_share": "heads whose strongest key for the queries before the block never changes, share",
    "inside_share": "strongest keys of the block's queries that are in the block, share",
    "jump_share_inside": "block_jump_share where the key was in the block",
    "jump_share_outside": "block_jump_share where the key was outside the block",
}
BlockNumbers = Int[np.ndarray, "batch pos"]


class BlockSums(Summed):
    """Column sums over the queries of each block: ``block_sum`` [head, block, pos], Σ_{i in block} A[i, j].

    Args:
        numbers: block of each position of the final text, [batch, pos]; -1 for positions of no block.
    """

    name = "block sums"
    point = "attn.hook_pattern"
    of_keys = True
    variables: ClassVar[Variables] = {"block_sum": ("head", "block", "pos")}

    def __init__(self, numbers: Int[Tensor, "batch pos"]) -> None:
        self._members = numbers[:, None] == torch.arange(int(numbers.max()) + 1)[:, None]  # [batch, block, pos]

    def keep(self, value: Float[Tensor, "batch head query key"]) -> Tensor:
        """The sums. A cached pass computes only the last queries."""
        queries, keys = value.shape[-2:]
        chosen = self._members[..., keys - queries : keys].to(value.device)
        return torch.einsum("bhqk,bgq->bhgk", value.detach().float(), chosen.float())

    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """The sums, unchanged."""
        return {"block_sum": kept}


def block_numbers(model: "Model", real: Bool[Tensor, "batch prompt"], settings: "Sampler") -> Int[Tensor, "batch pos"]:
    """Block of each position of the prompts and of what follows them; -1 on padding.

    Of a block-causal model, those of its attention. Otherwise the prompt is block 0, and blocks of the sampler's
    ``block_length`` follow; without it, blocks of a canvas, of one token (autoregressive), or of the complete answer.

    Args:
        real: False on the prompts' padding.
    """
    start, answer, blocks = real.shape[1], settings.gen_length, model.tree.attention_blocks
    if blocks is not None:
        extended = torch.nn.functional.pad(real, (0, answer + blocks.length), value=True)
        return blocks.numbers(extended)
    length = settings.positions_per_block
    column = torch.arange(start + answer)
    numbers = torch.where(column < start, 0, (column - start).div(length, rounding_mode="floor") + 1)
    return numbers.expand(len(real), -1).masked_fill(~torch.nn.functional.pad(real, (0, answer), value=True), -1)


def current_blocks(track: SinkTrack, numbers: BlockNumbers) -> Float[np.ndarray, "batch step"]:
    """The block of the first undecided position of each step; that of the step before where nothing is undecided.

    NaN in an autoregressive run, where undecided positions do not exist yet, and at steps that a row does not have.
    """
    exists = track.scores().notnull().any(("layer", "head")).to_numpy()
    undecided = track["masked"].to_numpy() & exists
    found = np.take_along_axis(numbers, undecided.argmax(axis=-1), axis=1).astype(np.float64)
    found[~undecided.any(axis=-1)] = np.nan
    for step in range(1, found.shape[1]):
        found[:, step] = np.where(np.isnan(found[:, step]), found[:, step - 1], found[:, step])
    return np.where(exists.any(axis=-1), found, np.nan)


def block_motion(track: SinkTrack, numbers: BlockNumbers) -> dict[str, Float[np.ndarray, " batch"]]:
    """`BLOCK_MOTION` of every row; NaN where there is nothing to compare.

    Shares of steps are means over the heads, of every head over its pairs of steps in one block.

    Args:
        track: with ``block_sum``; without it the queries of a step are those of its block, as in a canvas model.
    """
    score, found = np.nan_to_num(track["score"].to_numpy()), []
    for row, now in enumerate(current_blocks(track, numbers)):
        inner, before = score[row], np.zeros_like(score[row])
        if "block_sum" in track:
            sums = np.nan_to_num(track["block_sum"][row].to_numpy())  # [step, layer, head, block, pos]
            chosen = [(part, 0 if np.isnan(block) else int(block)) for part, block in zip(sums, now, strict=True)]
            inner = np.stack([part[:, :, block] for part, block in chosen])
            before = np.stack([part[:, :, :block].sum(axis=2) for part, block in chosen])
        found.append(_of_row(_strongest(inner, now), _strongest(before, now), now, numbers[row]))
    return {name: np.array([row[name] for row in found]) for name in BLOCK_MOTION}


def _of_row(
    inner: Float[np.ndarray, "step layer head"],
    before: Float[np.ndarray, "step layer head"],
    now: Float[np.ndarray, " step"],
    numbers: Int[np.ndarray, " pos"],
) -> dict[str, float]:
    """`BLOCK_MOTION` from the strongest keys of the queries of the current block and of those before it."""
    same = (now[1:] == now[:-1])[:, None, None]
    at = numbers[np.nan_to_num(inner).astype(int)] == now[:, None, None]
    return {
        "block_jump_share": _jumps(inner, same),
        "block_static_share": _static(inner, now),
        "before_jump_share": _jumps(before, same),
        "before_static_share": _static(before, now),
        "inside_share": known_mean(np.where(np.isnan(inner), np.nan, at)),
        "jump_share_inside": _jumps(inner, same & at[:-1]),
        "jump_share_outside": _jumps(inner, same & ~at[:-1]),
    }


def _strongest(sums: Float[np.ndarray, "step layer head pos"], now: Float[np.ndarray, " step"]) -> np.ndarray:
    """Position of the largest sum, [step, layer, head]; NaN where all are zero, and in steps without a block."""
    known = (sums.max(axis=-1) > 0) & ~np.isnan(now)[:, None, None]
    return np.where(known, sums.argmax(axis=-1), np.nan)


def _jumps(strongest: Float[np.ndarray, "step layer head"], pairs: Bool[np.ndarray, "pair #layer #head"]) -> float:
    """Changes per pair of steps, mean over the heads that have a pair."""
    moved = np.diff(strongest, axis=0)
    known = pairs & ~np.isnan(moved)
    count = known.sum(axis=0)
    return known_mean(
        np.divide((known & (moved != 0)).sum(axis=0), count, out=np.full(count.shape, np.nan), where=count > 0)
    )


def _static(strongest: Float[np.ndarray, "step layer head"], now: Float[np.ndarray, " step"]) -> float:
    """Share of (block, head) whose strongest key never changes, over the blocks with at least two steps."""
    found = []
    for block in np.unique(now[~np.isnan(now)]):
        part = strongest[now == block]
        if len(part) > 1:
            known = ~np.isnan(part).any(axis=0)
            found.append(np.where(known, (part == part[0]).all(axis=0), np.nan))
    return known_mean(np.array(found))
