"""Are the sink heads of causal and of denoising passes over one text the same?

A head's *strength* is the share of the attention of a block's queries that its strongest key before the block receives.
Both modes read the finished block, so they see the same tokens; keys before it are the same in both. Three measures
compare the modes: the rank correlation of the strengths over heads, the overlap of the sets of sink heads (those with
a sink in at least half of the blocks), and the share of heads with the same strongest key.

Heads of one layer resemble each other, and layers differ, so heads would seem alike that have nothing in common but
their layer. The null therefore gives the heads of one mode to others of the same layer, at random (`SHUFFLES` times).

Limitation: with one head per layer, the null is the measurement.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from sinklens.analyses.estimates.ranks import rank_correlation
from sinklens.analyses.mode_text import MODES, BlockText, patterns, scaled, sinks

if TYPE_CHECKING:
    from sinklens.model import Model

SHUFFLES = 200
SIMILARITY = {
    "correlation": "rank correlation over heads of the strongest key's share of attention",
    "overlap": "overlap of the sets of sink heads (Jaccard)",
    "same_key": "share of heads with the same strongest key",
}
SOURCES = {"measured": "same heads", "shuffled": "heads shuffled within layers", "difference": "difference"}


def heads(model: "Model", text: BlockText, epsilon: float, seed: int) -> dict[str, np.ndarray]:
    """``strength`` and ``has_sink`` [mode, layer, head], and `SIMILARITY` [source], of one text.

    NaN without a complete block.
    """
    shape = (len(MODES), model.cfg.n_layers, model.cfg.n_heads)
    if not text.blocks:
        nothing = dict.fromkeys(SIMILARITY, np.full(len(SOURCES), np.nan))
        return {"strength": np.full(shape, np.nan), "has_sink": np.full(shape, np.nan), **nothing}
    strength, found, key = np.zeros(shape), np.zeros(shape), []
    for block in text.blocks:
        ids = text.ids[: block.stop][None]
        sums = torch.stack([patterns(model, ids, mode, block)[0, ..., : block.start].sum(dim=-2) for mode in MODES])
        strength += sums.amax(dim=-1).numpy() / len(block) / len(text.blocks)
        found += sinks(scaled(sums), epsilon).any(dim=-1).numpy() / len(text.blocks)
        key.append(sums.argmax(dim=-1).numpy())
    return {"strength": strength, "has_sink": found, **similarity(strength, found >= 0.5, np.stack(key), seed)}


def similarity(
    strength: Float[np.ndarray, "mode layer head"],
    is_sink: Bool[np.ndarray, "mode layer head"],
    key: Int[np.ndarray, "block mode layer head"],
    seed: int = 0,
) -> dict[str, Float[np.ndarray, " source"]]:
    """`SIMILARITY` of two modes: measured, the mean over shuffles of the second's heads within layers, the difference.

    Args:
        strength: of every head in both modes.
        is_sink: the sink heads of both modes.
        key: the strongest key in every block.
    """
    rng, (layers, number) = np.random.default_rng(seed), strength.shape[1:]
    same = np.broadcast_to(np.arange(number), (1, layers, number))
    shuffled = rng.permuted(np.broadcast_to(np.arange(number), (SHUFFLES, layers, number)), axis=-1)
    values = []
    for order in (same, shuffled):
        at = (np.arange(layers)[:, None], order)
        found = {
            "correlation": rank_correlation(strength[0].ravel(), strength[1][at].reshape(len(order), -1)),
            "overlap": _jaccard(is_sink[0].ravel(), is_sink[1][at].reshape(len(order), -1)),
            "same_key": np.stack([(a == b[at]).mean(axis=(1, 2)) for a, b in key]).mean(axis=0),
        }
        values.append({name: float(value.mean()) for name, value in found.items()})
    measured, null = values
    return {name: np.array([measured[name], null[name], measured[name] - null[name]]) for name in SIMILARITY}


def _jaccard(one: Bool[np.ndarray, " head"], other: Bool[np.ndarray, "row head"]) -> Float[np.ndarray, " row"]:
    """|A ∩ B| / |A ∪ B|; NaN where both are empty."""
    both, either = (one & other).sum(axis=-1), (one | other).sum(axis=-1)
    return np.divide(both, either, out=np.full(len(other), np.nan), where=either > 0)
