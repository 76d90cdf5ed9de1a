"""Sink scores without the attention map.

The *sink score* of key j is the column sum Σ_i A[i, j] of the attention pattern A over the S queries i that are not
padding. Each row of A sums to 1, so the scores of a row sum to S and their mean over real keys is 1.

Fused attention never forms A, but it knows the log-sum-exp of each of its rows, lse_i. With it,

    Σ_i A[i, j] = Σ_i exp(q_i · k_j · scale + mask[i, j] − lse_i),

summed over blocks of queries: one extra matrix product, nothing of size S² kept, no softmax pass.

column_sums_triton.py implements the same formula as kernels for GPUs. They run on the kinds of devices in
`TRITON_DEVICES` if Triton is installed and they have agreed with the formula (trust.py); elsewhere the plain version
below runs. ``sinklens.hooks.attention.column_sums.TRITON_DEVICES = ()`` turns them off.

Caveat: a fully masked row has lse = −inf and no defined attention. The sum leaves out such rows, and padding rows.
"""

import math
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG2_E = math.log2(math.e)  # scores use base 2: torch's exp2 is about three times as fast as its exp
BLOCK_ELEMENTS = {
    "cpu": 1 << 19,
    "cuda": 1 << 24,
}  # scores in memory at once; 2 MiB on a CPU, to fit a core's cache

TRITON_DEVICES: tuple[str, ...] = ("cuda",)  # kinds of devices on which the kernels may be used


class ScoreBlock(NamedTuple):
    """Scores of some queries of some heads of one row of the batch.

    Attributes:
        row: index of the row in the batch.
        heads, queries: ranges of heads and queries.
        scores: (q_i · k_j · scale + mask[i, j]) · unit + start[i], in float32; the next block reuses its memory.
    """

    row: int
    heads: slice
    queries: slice
    scores: Float[Tensor, "head query key"]


@torch.no_grad()
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
        query, key: the inputs of attention (rotated; key heads repeated to the query heads).
        lse: log Σ_j exp(q_i · k_j · scale + mask[i, j]).
        scale: factor on the scores, usually d_head ** -0.5.
        mask: added to the scores; −inf hides a key.
        real: queries that count; None for all.
        causal: query i sees keys up to i + (key − query) only.
    """
    kernels = _kernels(query, mask, causal)
    if kernels is not None:
        return kernels.column_sums(query, key, lse, scale, mask, real, causal)
    return plain_column_sums(query, key, lse, scale, mask, real, causal)


def plain_column_sums(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    lse: Float[Tensor, "batch head query"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    real: Bool[Tensor, "#batch query"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head key"]:
    """`column_sums` in plain PyTorch, block by block."""
    shape = (*query.shape[:2], key.shape[2])
    start = (lse * -LOG2_E).nan_to_num_(-torch.inf, -torch.inf, -torch.inf)  # leaves out rows without a key
    if real is not None:
        start = start.masked_fill(~real[:, None, :], -torch.inf)
    if mask is None or mask.shape[2] == 1:  # all heads of all rows alike
        mask = None if mask is None else mask.expand(*query.shape[:2], 1, -1).flatten(0, 1)[None]
        query, key, start = (one.flatten(0, 1)[None] for one in (query, key, start))
    total = torch.empty(*query.shape[:2], key.shape[2], dtype=torch.float32, device=query.device)
    ones = torch.ones(1, query.shape[2], dtype=torch.float32, device=query.device)
    for block in _blocks(query, key, scale, mask, causal, start, LOG2_E):
        part = torch.matmul(ones[:, : block.scores.shape[1]], block.scores.exp2_())[:, 0]
        if block.queries.start > 0:
            part += total[block.row, block.heads]
        total[block.row, block.heads] = part
    return total.view(shape)


@torch.no_grad()
def log_sum_exp(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head query"]:
    """log Σ_j exp(q_i · k_j · scale + mask[i, j]) in float32; for devices whose fused attention does not return it."""
    kernels = _kernels(query, mask, causal)
    if kernels is not None:
        return kernels.log_sum_exp(query, key, scale, mask, causal)
    return plain_log_sum_exp(query, key, scale, mask, causal)


def plain_log_sum_exp(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head query"]:
    """`log_sum_exp` in plain PyTorch, block by block."""
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    for block in _blocks(query, key, scale, mask, causal, torch.zeros_like(lse), 1.0):
        lse[block.row, block.heads, block.queries] = torch.logsumexp(block.scores, dim=-1)
    return lse


def _kernels(query: Tensor, mask: Tensor | None, causal: bool) -> Any:
    """The module of the Triton kernels if they may be used for these operands, else None."""
    if query.device.type not in TRITON_DEVICES:
        return None
    kernels = _installed()
    return kernels if kernels is not None and kernels.usable(query, mask, causal) else None


@cache
def _installed() -> Any:
    """The module of the Triton kernels; None, with a warning, if Triton is missing."""
    try:
        from sinklens.hooks.attention import column_sums_triton
    except ImportError as error:
        warnings.warn(
            f"sink scores are computed without their Triton kernel, which is slower: {error}. Install triton.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return column_sums_triton


def _blocks(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None,
    causal: bool,
    start: Float[Tensor, "batch head query"],
    unit: float,
) -> Iterator[ScoreBlock]:
    """The scores times `unit` plus each row's `start`, in blocks of `BLOCK_ELEMENTS` (or one row of one head)."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    limit = BLOCK_ELEMENTS["cpu" if query.device.type == "cpu" else "cuda"]
    step = max(1, min(queries, limit // keys))
    group = min(heads, max(1, limit // (step * keys)))
    full_mask = None if mask is None else mask.expand(batch, heads, -1, keys)
    buffer = torch.empty(
        group * step * keys, dtype=torch.float32, device=query.device
    )  # reused by all blocks: allocating memory is slow
    for row in range(batch):
        for first in range(0, heads, group):
            head = slice(first, first + group)
            q, k = query[row, head].float(), key[row, head].float().transpose(-2, -1)
            for begin in range(0, queries, step):
                rows = slice(begin, begin + step)
                shift = start[row, head, rows, None].float()
                scores = buffer[: shift.numel() * keys].view(*shift.shape[:2], keys)
                # faster than a product that is added to a copy of `shift`
                scores.baddbmm_(q[:, rows], k, beta=0, alpha=scale * unit).add_(shift)
                if full_mask is not None:
                    part = full_mask[row, head]
                    scores.add_(
                        part if part.shape[1] == 1 else part[:, rows], alpha=unit
                    )  # added in float32, as the scores
                if causal:
                    last = torch.arange(begin, begin + scores.shape[1], device=query.device) + keys - queries
                    scores.masked_fill_(torch.arange(keys, device=query.device) > last[:, None], -torch.inf)
                yield ScoreBlock(row, head, rows, scores)
