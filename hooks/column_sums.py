"""Sink scores without the attention map.

The *sink score* of key j is the column sum Σ_i A[i, j] of the attention pattern A over the S queries i that are not
padding. Each row of A sums to 1, so the scores of a row sum to S and their mean over real keys is 1.

Fused attention never forms A, but it knows the log-sum-exp of each of its rows, lse_i. With it,

    Σ_i A[i, j] = Σ_i exp(q_i · k_j · scale + mask[i, j] − lse_i),

summed over blocks of queries: one extra matrix product, nothing of size S² kept, no softmax pass.

One way this fails: a row whose every key is masked has lse = −inf and no defined attention. Such rows, and padding
rows, are left out of the sum.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

BLOCK_ELEMENTS = 1 << 19  # scores held at a time: 2 MiB of float32, about one core's second-level cache


def column_sums(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    lse: Float[Tensor, "batch head query"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    real: Bool[Tensor, "#batch query"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head key"]:
    """Σ_i A[i, j] in float32, from the log-sum-exp of the rows.

    Args:
        query, key: as attention saw them (rotated; key heads repeated to the query heads).
        lse: log Σ_j exp(q_i · k_j · scale + mask[i, j]).
        scale: factor on the scores, usually d_head ** -0.5.
        mask: added to the scores; −inf forbids.
        real: queries that count; None for all.
        causal: query i sees keys up to i + (key − query) only.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    shift = torch.where(torch.isfinite(lse), lse, torch.inf)
    if real is not None:
        shift = shift.masked_fill(~real[:, None, :], torch.inf)
    key_t = key.transpose(-2, -1).float()
    total = torch.zeros(batch, heads, keys, dtype=torch.float32, device=query.device)
    block = max(1, BLOCK_ELEMENTS // (batch * heads * keys))
    for start in range(0, queries, block):
        rows = slice(start, start + block)
        scores = torch.matmul(query[:, :, rows].float() * scale, key_t)
        if mask is not None:
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, rows])
        if causal:
            scores = scores.masked_fill(~_visible(start, scores.shape[2], queries, keys, query.device), -torch.inf)
        total += scores.sub_(shift[:, :, rows, None]).exp_().sum(dim=2)
    return total


def log_sum_exp(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head query"]:
    """log Σ_j exp(q_i · k_j · scale + mask[i, j]) in float32, by blocks; for devices whose kernel does not tell it."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    key_t = key.transpose(-2, -1).float()
    block = max(1, BLOCK_ELEMENTS // (batch * heads * keys))
    parts = []
    for start in range(0, queries, block):
        rows = slice(start, start + block)
        scores = torch.matmul(query[:, :, rows].float() * scale, key_t)
        if mask is not None:
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, rows])
        if causal:
            scores = scores.masked_fill(~_visible(start, scores.shape[2], queries, keys, query.device), -torch.inf)
        parts.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(parts, dim=2)


def _visible(start: int, rows: int, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """Which keys the `rows` queries from `start` on may see under causal attention."""
    last = torch.arange(start, start + rows, device=device) + keys - queries
    return torch.arange(keys, device=device)[None, :] <= last[:, None]
