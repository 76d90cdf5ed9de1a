"""How far the strongest keys move if one token of a block changes, in causal and in denoising passes over one text.

A pair of canvases differs in one token, and both modes read both canvases. There are two kinds of *edits*: ``fill``
decides one masked position of the block, in the order of the run, as a denoise step does; ``swap`` replaces one token
of the finished block by another token of the text, so that neither mode reads a mask. The number of edits is the same
in both modes.

A causal pass differs from a denoising one in more than its streams: queries before the edited position do not see the
edit, and no query sees later keys. Three comparisons match this step by step:

    all        all queries of the block, and all keys
    seeing     the queries from the edited position on, which see the edit in both modes, and all keys
    matched    the same queries, and the keys up to the edited position, which they all see in both modes

Pitfall: without masks in the text, a causal pass never sees one in training. ``fill`` therefore asks what the same
canvases do to both modes, and ``swap`` what they do on text that both know.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.analyses.mode_text import MODES, BlockText, patterns, scaled, sinks

if TYPE_CHECKING:
    from sinklens.model import Model

EDITS = {"fill": "a masked position is decided", "swap": "a token of the finished block is replaced"}
MATCHING = {
    "all": "all queries and keys",
    "seeing": "queries that see the edit",
    "matched": "the same queries and keys",
}
MOTION = {
    "jump_share": "share of edits at which the strongest key changes",
    "sink_jump_share": "the same over heads and edits where it is a sink before and after",
    "moved": "share of the attention that moves to other keys",
}


class Pair(NamedTuple):
    """Two canvases that differ in one token.

    Attributes:
        edit: of `EDITS`.
        before, after: their rows.
        position: the position of the token.
    """

    edit: str
    before: int
    after: int
    position: int


class Moves(NamedTuple):
    """What one pair of canvases does to every head, [layer, head].

    Attributes:
        changes: whether the strongest key changes.
        sinks: whether it is a sink before and after.
        moved: ½ Σ_j |a_j − b_j| of the two distributions of attention over keys.
    """

    changes: Tensor
    sinks: Tensor
    moved: Float[Tensor, "layer head"]


def canvases(
    text: BlockText, block: range, mask_id: int, rng: np.random.Generator
) -> tuple[Int[Tensor, "row pos"], list[Pair]]:
    """The canvases of a block and the pairs that differ in one token."""
    finished = text.ids[: block.stop]
    order = block.start + np.argsort(text.decided[block.start : block.stop], kind="stable")
    canvas = finished.clone()
    canvas[block.start :] = mask_id
    rows, pairs = [canvas], []
    for position in order.tolist():
        canvas = canvas.clone()
        canvas[position] = finished[position]
        pairs.append(Pair("fill", len(rows) - 1, len(rows), position))
        rows.append(canvas)
    for position in block:
        others = finished[finished != finished[position]]
        if len(others):
            swapped = finished.clone()
            swapped[position] = others[int(rng.integers(len(others)))]
            pairs.append(Pair("swap", len(block), len(rows), position))
            rows.append(swapped)
    return torch.stack(rows), pairs


def moves(
    pattern: Float[Tensor, "row layer head query key"], pair: Pair, first: int, matching: str, epsilon: float
) -> Moves:
    """What a pair does to the attention of a pass of one mode.

    Args:
        pattern: attention of the block's queries over every canvas.
        first: position of the first query.
        epsilon: as in `sinks`.
    """
    queries = slice(0 if matching == "all" else pair.position - first, None)
    keys = slice(pair.position + 1 if matching == "matched" else None)
    sums = torch.stack([pattern[row, :, :, queries, keys].sum(dim=-2) for row in (pair.before, pair.after)])
    strongest = sums.argmax(dim=-1, keepdim=True)
    is_sink = sinks(scaled(sums), epsilon).gather(-1, strongest)[..., 0].all(dim=0)
    share = sums / sums.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return Moves((strongest[0] != strongest[1])[..., 0], is_sink, (share[0] - share[1]).abs().sum(dim=-1) / 2)


def motion(
    model: "Model", text: BlockText, epsilon: float, seed: int
) -> dict[str, Float[np.ndarray, "mode edit matching"]]:
    """`MOTION` of one text; means over the layers, heads, edits and blocks. NaN without a complete block."""
    found: dict[tuple[str, str, str], list[Moves]] = {}
    for mode, pattern, pairs, block in _passes(model, text, seed):
        for pair in pairs:
            for matching in MATCHING:
                one = moves(pattern, pair, block.start, matching, epsilon)
                found.setdefault((mode, pair.edit, matching), []).append(one)
    values = {name: np.full((len(MODES), len(EDITS), len(MATCHING)), np.nan) for name in MOTION}
    for (mode, edit, matching), parts in found.items():
        place = (list(MODES).index(mode), list(EDITS).index(edit), list(MATCHING).index(matching))
        changes, are_sinks, moved = (torch.stack(part) for part in zip(*parts, strict=True))
        values["jump_share"][place] = float(changes.float().mean())
        values["moved"][place] = float(moved.mean())
        if bool(are_sinks.any()):
            values["sink_jump_share"][place] = float(changes[are_sinks].float().mean())
    return values


def _passes(model: "Model", text: BlockText, seed: int) -> Iterator[tuple[str, Tensor, list[Pair], range]]:
    """The attention of every block's canvases in every mode."""
    rng = text.random(seed)
    assert model.mask_token_id is not None, "models that change their attention have a mask token"
    for block in text.blocks:
        rows, pairs = canvases(text, block, model.mask_token_id, rng)
        for mode in MODES:
            yield mode, patterns(model, rows, mode, block), pairs, block
