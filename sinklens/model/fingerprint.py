"""A fingerprint of a model's weights: two exact sums over the bits of every tensor.

Each value is taken as float32, its bits as a signed 32-bit number b, and per tensor

    plain = Σ b_i          weighted = Σ b_i · (i mod 65521 + 1)          both modulo 2⁶⁴.

Changing one value changes the first sum; exchanging two changes the second. Integer sums are exact in any order, so a
model has the same fingerprint on every device and in every dtype that represents its weights exactly.

On a CPU both sums are computed from column sums: in rows of `PERIOD` values, all values of a column have the same
weight. The inner loop adds 32-bit words in 32-bit arithmetic, which runs at memory bandwidth: Σ w modulo 2³² and
Σ (w >> 16) together give the sums of both halves of the words. A word is two bfloat16 values or one float32 value.

Silent failure: 32-bit sums overflow beyond `ROWS` rows. A block never has more.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

PERIOD = 65521  # the weights 1 to 65521 repeat
ROWS = 128  # rows per block; at most 2¹⁵
CHUNK = 1 << 22  # values converted to float32 at a time if their bits cannot be read in place
MODULUS = 1 << 64


class BitSums(NamedTuple):
    """The two sums over a tensor, or over part of it, modulo 2⁶⁴."""

    plain: int
    weighted: int


def weights_fingerprint(weights: Iterable[tuple[str, Tensor]], described: str) -> str:
    """Sixteen hexadecimal digits for named tensors and a text that describes the rest of the model."""
    digest = hashlib.sha256(described.encode())
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for name, value in weights:
            sums = bit_sums(value, pool)
            digest.update(f"{name}{tuple(value.shape)}{tuple(sums)}".encode())
    return digest.hexdigest()[:16]


def bit_sums(value: Tensor, pool: ThreadPoolExecutor) -> BitSums:
    """Both sums of a tensor; the threads of `pool` share the blocks of rows."""
    flat = value.detach().flatten()
    if flat.device.type != "cpu":
        return _total(_sums_by_formula(flat[at : at + CHUNK], at) for at in range(0, len(flat), CHUNK))
    paired = len(flat) // (2 * PERIOD) * (2 * PERIOD) if flat.dtype is torch.bfloat16 else 0
    pairs, values = flat[:paired].split(2 * PERIOD * ROWS), flat[paired:].split(PERIOD * ROWS)
    return _total([*pool.map(_sums_of_pairs, pairs), *pool.map(_sums_of_values, values)])


def _total(parts: Iterable[BitSums]) -> BitSums:
    plain, weighted = 0, 0
    for part in parts:
        plain, weighted = plain + part.plain, weighted + part.weighted
    return BitSums(plain % MODULUS, weighted % MODULUS)


def _sums_by_formula(part: Tensor, start: int) -> BitSums:
    """Both sums of values whose first has index `start`; fast on a GPU."""
    bits = part.to(torch.float32).view(torch.int32).long()
    weight = torch.arange(start, start + len(bits), device=bits.device) % PERIOD + 1
    return BitSums(int(bits.sum()), int((bits * weight).sum()))


def _sums_of_values(part: Tensor) -> BitSums:
    """Both sums of a block's values as float32, one per word; the last row may be shorter."""
    rows = (row.to(torch.float32).view(torch.int32).numpy() for row in part.split(PERIOD))
    high, low = _halves(rows, flip=0)
    return _weigh((high << 16) + low)


def _sums_of_pairs(part: Tensor) -> BitSums:
    """Both sums of full rows of bfloat16 values, two per word, the first in the low half.

    As float32, each value is followed by 16 zero bits. Flipping its sign bit makes the low half an unsigned number,
    larger by 2¹⁵.
    """
    rows = part.view(torch.int16).numpy().view(np.int32).reshape(-1, PERIOD)
    high, low = _halves(rows, flip=0x8000)
    values = np.stack([low - (len(rows) << 15), high], axis=-1).reshape(2, PERIOD)
    return _weigh(values.sum(axis=0) << 16)


def _weigh(columns: Int64[np.ndarray, " column"]) -> BitSums:
    """Both sums, from the sum of each column; 64-bit integers wrap around, which is the modulo 2⁶⁴."""
    return BitSums(int(columns.sum()), int(columns @ np.arange(1, PERIOD + 1)))


def _halves(
    rows: Iterable[Int32[np.ndarray, " column"]], flip: int
) -> tuple[Int64[np.ndarray, " column"], Int64[np.ndarray, " column"]]:
    """Column sums of the signed high and unsigned low halves of ``row ^ flip``; rows may be shorter than `PERIOD`."""
    total, high = np.zeros((2, PERIOD), dtype=np.int32)
    words = np.empty(PERIOD, dtype=np.int32)
    for row in rows:
        word = np.bitwise_xor(row, np.int32(flip), out=words[: len(row)])
        total[: len(row)] += word  # modulo 2³²
        np.right_shift(word, 16, out=word)
        high[: len(row)] += word
    wide = high.astype(np.int64)
    low = total.astype(np.int64) - (wide << 16)
    return wide, low % (1 << 32)
