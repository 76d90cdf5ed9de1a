"""The column sums of attention and the log-sum-exp of its rows as Triton kernels, for GPUs.

The formulas are those of column_sums.py. Scores are computed tile by tile in on-chip memory and never stored: a kernel
reads queries, keys and one number per row, and writes one number per key (or row). Products use the inputs' type
(tensor cores for bfloat16 and float16; float32 without TF32) and accumulate in float32. Grouped key heads are read
directly, without a copy for every query head.

There are three kinds of masks. *none*. *key*: one number per key, the same for all queries, as `MaskSinks` and padding
produce; it is read once per key and head and added inside the kernel, without any tensor of size [query, key]. *full*:
one number per query and key, read once.

`column_sums` and `log_sum_exp` have the arguments and results of the functions of the same names in column_sums.py,
which calls them for tensors on a GPU if Triton is installed and `trusted` finds that they agree with the plain version.
The tests compare the two; without a GPU they run in Triton's interpreter.

Pitfall: adding numbers in another order changes the last bits of a sum. All calls of one kind therefore use the same
tiles (tiles.py), independent of the rest of the batch.

Source: the online log-sum-exp is that of FlashAttention (Dao et al., arXiv 2205.14135).
"""

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sinklens.hooks.attention import tiles, trust
from sinklens.hooks.attention.tiles import Tile
from sinklens.utils.versions import versions

LOG2_E = math.log2(math.e)  # exponentials use base 2, which the hardware implements
PROBES = ((1, 17), (17, 17), (65, 63), (127, 300))  # queries and keys of the first-use test
LENGTHS = ["queries", "keys", "mask_batch", "mask_head", "mask_query"]  # one kernel for all values of these
NONE, KEY, FULL = 0, 1, 2  # kinds of masks


def _jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` of the unwrapped function, whose source it reads; run-time type checks wrap every function."""
    return triton.jit(inspect.unwrap(function), do_not_specialize=LENGTHS)


@_jit
def _tile(base, rows, row_stride, channels, channel_stride, count, WIDTH: tl.constexpr):
    """Rows of queries or keys; zeros beyond the last row and the last channel."""
    at = base + rows[:, None] * row_stride + channels[None, :] * channel_stride
    inside = rows[:, None] < count
    if channels.shape[0] > WIDTH:
        inside = inside & (channels[None, :] < WIDTH)
    return tl.load(at, mask=inside, other=0.0)


@_jit
def _key_bias(mask, columns, mask_key, keys, LOG2: tl.constexpr):
    """One number per key, in base 2; the same for all queries."""
    return tl.load(mask + columns.to(tl.int64) * mask_key, mask=columns < keys, other=0.0).to(tl.float32) * LOG2


@_jit
def _full_bias(mask, rows, columns, mask_query, mask_key, queries, keys, LOG2: tl.constexpr):
    """One number per query and key, in base 2; `rows` and `columns` are broadcast."""
    at = mask + rows.to(tl.int64) * mask_query + columns * mask_key
    return tl.load(at, mask=(rows < queries) & (columns < keys), other=0.0).to(tl.float32) * LOG2


@_jit
def _lse_kernel(
    query, key, mask, out, heads, group, queries, keys, scale,
    q_batch, q_head, q_row, q_channel, k_batch, k_head, k_row, k_channel,
    mask_batch, mask_head, mask_query, mask_key,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one head, all keys. Keeps the largest score and the running sum of each row."""
    tiles = tl.cdiv(queries, ROWS)
    place = (tl.program_id(0) // tiles).to(tl.int64)  # batch and head; 64 bits, as offsets in long masks exceed 2³¹
    batch, head = place // heads, place % heads
    first_row = (tl.program_id(0) % tiles) * ROWS
    rows, channels = first_row + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    q = _tile(query + batch * q_batch + head * q_head, rows, q_row, channels, q_channel, queries, WIDTH)
    k_base, mask_base = key + batch * k_batch + (head // group) * k_head, mask + batch * mask_batch + head * mask_head
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    end = keys
    if CAUSAL:  # no query of this tile sees later keys
        end = tl.minimum(keys, tl.maximum(0, first_row + ROWS + keys - queries))
    for first in range(0, end, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        k = _tile(k_base, columns, k_row, channels, k_channel, keys, WIDTH)
        s = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * scale
        if KIND == 1:
            s += _key_bias(mask_base, columns, mask_key, keys, LOG2)[None, :]
        if KIND == 2:
            s += _full_bias(mask_base, rows[:, None], columns[None, :], mask_query, mask_key, queries, keys, LOG2)
        seen = columns[None, :] < keys
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None] + (keys - queries))
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # without a key so far: 2 ** -inf, not NaN
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = higher
    lse = tl.where(top == float("-inf"), float("-inf"), (top + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2)
    tl.store(out + place * queries + rows, lse, mask=rows < queries)


@_jit
def _sums_kernel(
    query, key, lse, mask, out, heads, group, queries, keys, scale,
    q_batch, q_head, q_row, q_channel, k_batch, k_head, k_row, k_channel,
    mask_batch, mask_head, mask_query, mask_key,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    """One program: some keys of one head, all queries. Sums stay in registers until they are complete.

    Keys are the rows of a tile, so that its sums along queries stay within a warp. An exponential takes one product and
    addition: keys and queries out of range need no test, as such keys are not stored and such queries have lse = inf.
    """
    tiles = tl.cdiv(keys, COLUMNS)
    place = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = place // heads, place % heads
    first_column = (tl.program_id(0) % tiles) * COLUMNS
    columns, channels = first_column + tl.arange(0, COLUMNS), tl.arange(0, CHANNELS)
    q_base, mask_base = query + batch * q_batch + head * q_head, mask + batch * mask_batch + head * mask_head
    k_base = key + batch * k_batch + (head // group) * k_head
    k = _tile(k_base, columns, k_row, channels, k_channel, keys, WIDTH)
    bias = tl.zeros([COLUMNS], tl.float32)
    if KIND == 1:
        bias = _key_bias(mask_base, columns, mask_key, keys, LOG2)
    total = tl.zeros([COLUMNS], tl.float32)
    begin = 0
    if CAUSAL:  # earlier queries do not see the keys of this tile
        begin = tl.maximum(0, first_column - (keys - queries)) // ROWS * ROWS
    for first in range(begin, queries, ROWS):
        rows = first + tl.arange(0, ROWS)
        q = _tile(q_base, rows, q_row, channels, q_channel, queries, WIDTH)
        row_lse = tl.load(lse + place * queries + rows, mask=rows < queries, other=float("inf"))
        row_lse = tl.where(tl.abs(row_lse) < float("inf"), row_lse * LOG2, float("inf"))  # those that do not count: inf
        s = tl.dot(k, tl.trans(q), input_precision="ieee" if EXACT else "tf32") * scale - row_lse[None, :]
        if KIND == 1:
            s += bias[:, None]
        if KIND == 2:
            s += _full_bias(mask_base, rows[None, :], columns[:, None], mask_query, mask_key, queries, keys, LOG2)
        if CAUSAL:
            s = tl.where(columns[:, None] <= rows[None, :] + (keys - queries), s, float("-inf"))
        total += tl.sum(tl.exp2(s), 1)
    tl.store(out + place * keys + columns, total, mask=columns < keys)


def column_sums(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    lse: Float[Tensor, "batch head query"],
    scale: float | int,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    real: Bool[Tensor, "#batch query"] | None = None,
    causal: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "batch head key"]:
    """Σ_i A[i, j] in float32; see column_sums.py. `key` may have fewer heads, shared by consecutive query heads."""
    row_lse = lse if real is None else lse.masked_fill(~real[:, None, :], torch.inf)
    out = torch.empty(*query.shape[:2], key.shape[2], dtype=torch.float32, device=query.device)
    _launch(_Call(_sums_kernel, (query, key, row_lse.contiguous()), out, scale, mask, causal), tile)
    return out


def log_sum_exp(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    scale: float | int,
    mask: Float[Tensor, "#batch #head #query key"] | None = None,
    causal: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "batch head query"]:
    """log Σ_j exp(q_i · k_j · scale + mask[i, j]) in float32; −inf for a query that sees no key."""
    out = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    _launch(_Call(_lse_kernel, (query, key), out, scale, mask, causal), tile)
    return out


def usable(query: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether the kernels agree with the formulas in float64, on this device and for this kind of operands."""
    kind = _kind(mask)
    place = (str(query.device), query.dtype, f"width {query.shape[-1]}", ("no mask", "key mask", "full mask")[kind])
    return trust.trusted("the Triton kernel for sink scores", (*place, causal), lambda: _probe(query, kind, causal))


class _Call(NamedTuple):
    """One launch: the kernel, the tensors it reads before the mask, its output, and the rest of the formula."""

    kernel: Any
    tensors: tuple[Tensor, ...]
    out: Tensor
    scale: float | int
    mask: Tensor | None
    causal: bool

    @property
    def channels(self) -> int:
        """The head width, rounded up for the tensor cores.

        Rows of two-byte numbers take at least 128 bytes. With heads of 32, bfloat16 failed the first-use test on an
        H100 (Triton 3.6); the layout of its shorter rows in on-chip memory is where its code differs from wider heads.
        """
        query = self.tensors[0]
        return max(16 if query.element_size() > 2 else 64, triton.next_power_of_2(query.shape[-1]))


def _kind(mask: Tensor | None) -> int:
    if mask is None:
        return NONE
    return KEY if mask.shape[2] == 1 or mask.stride(2) == 0 else FULL


def _launch(call: _Call, tile: Tile | None) -> None:
    tile = _chosen(call) if tile is None else tile
    query, key = call.tensors[:2]
    batch, heads, queries, width = query.shape
    keys, mask = key.shape[2], call.mask
    full_mask = query if mask is None else mask.expand(batch, heads, queries, keys)  # strides of 0, not a copy
    n_tiles = triton.cdiv(keys, tile.columns) if call.kernel is _sums_kernel else triton.cdiv(queries, tile.rows)
    on_device = torch.cuda.device(query.device) if query.is_cuda else nullcontext()  # Triton uses the current GPU
    with on_device:
        call.kernel[(n_tiles * batch * heads,)](
            *call.tensors, full_mask, call.out, heads, heads // key.shape[1], queries, keys, float(call.scale) * LOG2_E,
            *query.stride(), *key.stride(), *full_mask.stride(),
            WIDTH=width, CHANNELS=call.channels, ROWS=tile.rows, COLUMNS=tile.columns,
            KIND=_kind(mask), CAUSAL=call.causal, EXACT=query.dtype == torch.float32, LOG2=LOG2_E,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


_CHOSEN: dict[str, Tile] = {}


def _chosen(call: _Call) -> Tile:
    """The tile for this kind of call; for long calls, tiles are timed once (tiles.py)."""
    query, key = call.tensors[:2]
    if call.channels * query.element_size() > (512 if query.element_size() == 2 else 128):
        return tiles.SMALL  # larger tiles do not fit on-chip memory, or in float32 the registers of an H100
    if not query.is_cuda or query.shape[2] * key.shape[2] < tiles.LONG:
        return tiles.DEFAULT
    place = " | ".join([
        "sums" if call.kernel is _sums_kernel else "lse", torch.cuda.get_device_name(query.device),
        *(f"{name} {number}" for name, number in versions("torch", "triton").items()),
        str(query.dtype), f"width {query.shape[-1]}", f"mask {_kind(call.mask)}", f"causal {call.causal}",
    ])  # fmt: skip
    if place not in _CHOSEN:
        _CHOSEN[place] = tiles.fastest(place, tiles.TILES, lambda tile: _seconds(call, tile))
    return _CHOSEN[place]


def _seconds(call: _Call, tile: Tile, launches: int = 10) -> float:
    """Seconds per launch on the GPU, after a first one that compiles; infinity if the tile does not fit."""
    try:
        _launch(call, tile)
    except OutOfResources:
        return math.inf
    with torch.cuda.device(call.out.device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(launches):
            _launch(call, tile)
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3 / launches


def _probe(like: Tensor, kind: int, causal: bool) -> None:
    """Raise if a kernel differs from softmax written out in float64; two key heads are shared by four query heads."""
    for queries, keys in PROBES:
        query, key = (
            trust.numbers(2, heads, n, like.shape[-1], like=like, seed=n) for heads, n in ((4, queries), (2, keys))
        )
        mask = None if kind == NONE else trust.numbers(2, 4, queries if kind == FULL else 1, keys, like=like)
        if mask is not None:
            mask[..., 1::3] = -torch.inf
        scale = like.shape[-1] ** -0.5
        scores = trust.explicit_scores(query, key.repeat_interleave(2, dim=1), scale, mask, causal)
        lse = log_sum_exp(query, key, scale, mask, causal)
        torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1), atol=1e-3, rtol=1e-3)
        found = column_sums(query, key, lse, scale, mask, None, causal)
        sums = scores.softmax(-1).nan_to_num(0.0).sum(-2)
        torch.testing.assert_close(found.cpu().double(), sums, atol=1e-3, rtol=1e-3)
