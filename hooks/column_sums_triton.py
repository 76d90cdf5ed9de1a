"""The column sums of attention and the log-sum-exp of its rows as Triton kernels, for GPUs.

The formulas are column_sums.py's. Scores are computed tile by tile in on-chip memory and never stored, so what is read
is queries, keys and one number per row, and what is written is one number per key (or row). Products take the inputs'
own type (tensor cores for bfloat16 and float16; float32 without TF32) and sum in float32. Grouped key heads are read as
they are, without a copy for every query head.

`column_sums` and `log_sum_exp` have the arguments and results of their namesakes; column_sums.py calls them for tensors
on a GPU where Triton is installed, and they are tested against it, without a GPU in Triton's interpreter.

One way this fails: a mask is read once per tile and head, so a full [query, key] mask costs more memory traffic than
the keys. Masks that hold for all queries are read as one row.

Source: the online log-sum-exp is that of FlashAttention (Dao et al., 2205.14135).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

TILE = {"query": 64, "key": 64}


def _jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` of the bare function, whose source it reads: type checks at run time wrap every function."""
    return triton.jit(inspect.unwrap(function))


@_jit
def _scores(
    q, k, rows, columns, mask, batch, head, queries, keys, scale,
    mask_batch, mask_head, mask_query, mask_key,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The scores of a tile in float32; -inf where a key is forbidden or either number lies outside."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
    inside = (rows[:, None] < queries) & (columns[None, :] < keys)
    if HAS_MASK:
        at = mask + batch * mask_batch + head * mask_head + rows[:, None] * mask_query + columns[None, :] * mask_key
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        inside = inside & (columns[None, :] <= rows[:, None] + (keys - queries))
    return tl.where(inside, s, float("-inf"))


@_jit
def _tile(base, rows, row_stride, channels, channel_stride, count, WIDTH: tl.constexpr):
    """Rows of queries or keys, zeros beyond the last row and the last channel."""
    at = base + rows[:, None] * row_stride + channels[None, :] * channel_stride
    return tl.load(at, mask=(rows[:, None] < count) & (channels[None, :] < WIDTH), other=0.0)


@_jit
def _lse_kernel(
    query, key, mask, out, heads, group, queries, keys, scale,
    q_batch, q_head, q_row, q_channel, k_batch, k_head, k_row, k_channel,
    mask_batch, mask_head, mask_query, mask_key,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one head, all keys; the largest score and the sum so far are kept per row."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    q = _tile(query + batch * q_batch + head * q_head, rows, q_row, channels, q_channel, queries, WIDTH)
    k_base = key + batch * k_batch + (head // group) * k_head
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, keys, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        k = _tile(k_base, columns, k_row, channels, k_channel, keys, WIDTH)
        s = _scores(q, k, rows, columns, mask, batch, head, queries, keys, scale,
                    mask_batch, mask_head, mask_query, mask_key, HAS_MASK, CAUSAL, EXACT)  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: exp(-inf), not a NaN
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(s - safe[:, None]), 1)
        top = higher
    lse = tl.where(top == float("-inf"), float("-inf"), top + tl.log(tl.where(total > 0, total, 1.0)))
    tl.store(out + tl.program_id(1) * queries + rows, lse, mask=rows < queries)


@_jit
def _sums_kernel(
    query, key, lse, mask, out, heads, group, queries, keys, scale,
    q_batch, q_head, q_row, q_channel, k_batch, k_head, k_row, k_channel,
    mask_batch, mask_head, mask_query, mask_key,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program: some keys of one head, all queries; sums stay in registers until they are whole."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    columns, channels = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHANNELS)
    k_base = key + batch * k_batch + (head // group) * k_head
    k = _tile(k_base, columns, k_row, channels, k_channel, keys, WIDTH)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, queries, ROWS):
        rows = first + tl.arange(0, ROWS)
        q = _tile(query + batch * q_batch + head * q_head, rows, q_row, channels, q_channel, queries, WIDTH)
        s = _scores(q, k, rows, columns, mask, batch, head, queries, keys, scale,
                    mask_batch, mask_head, mask_query, mask_key, HAS_MASK, CAUSAL, EXACT)  # fmt: skip
        own = tl.load(lse + tl.program_id(1) * queries + rows, mask=rows < queries, other=float("inf"))
        total += tl.sum(tl.exp(s - own[:, None]), 0)  # rows that do not count have lse = inf
    tl.store(out + tl.program_id(1) * keys + columns, total, mask=columns < keys)


def column_sums(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    lse: Float[Tensor, "batch head query"],
    scale: float | int,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    real: Bool[Tensor, "#batch query"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head key"]:
    """Σ_i A[i, j] in float32; see column_sums.py. `key` may have fewer heads, each of which serves as many in order."""
    counted = torch.isfinite(lse) if real is None else torch.isfinite(lse) & real[:, None, :]
    own = torch.where(counted, lse, torch.inf).contiguous()
    out = torch.empty(*query.shape[:2], key.shape[2], dtype=torch.float32, device=query.device)
    _launch(_sums_kernel, (query, key, own), out, scale, mask, causal, tiles=key.shape[2], tile="key")
    return out


def log_sum_exp(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    scale: float | int,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head query"]:
    """log Σ_j exp(q_i · k_j · scale + mask[i, j]) in float32; −inf for a query that sees no key."""
    out = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    _launch(_lse_kernel, (query, key), out, scale, mask, causal, tiles=query.shape[2], tile="query")
    return out


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    out: Tensor,
    scale: float | int,
    mask: Tensor | None,
    causal: bool,
    tiles: int,
    tile: str,
) -> None:
    query, key, *_ = tensors
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    shown = query if mask is None else mask.expand(batch, heads, queries, keys)  # strides of 0, nothing is copied
    kernel[(triton.cdiv(tiles, TILE[tile]), batch * heads)](
        *tensors, shown, out, heads, heads // key.shape[1], queries, keys, float(scale),
        *query.stride(), *key.stride(), *shown.stride(),
        WIDTH=width, CHANNELS=max(16, triton.next_power_of_2(width)), ROWS=TILE["query"], COLUMNS=TILE["key"],
        HAS_MASK=mask is not None, CAUSAL=causal, EXACT=query.dtype == torch.float32,
    )  # fmt: skip
