"""A fingerprint of a model's weights: two exact sums over the bits of every tensor.

Each value is taken as float32, its bits as a signed 32-bit number b, and per tensor

    plain = Σ b_i          weighted = Σ b_i · (i mod 65521 + 1)          both modulo 2⁶⁴.

Changing one value changes the first sum; exchanging two changes the second. Integer sums are exact in any order, so a
model has the same fingerprint on every device and in every dtype that represents its weights exactly.

In rows of `PERIOD` values, all values of a column have the same weight, so both follow from the sums of the columns.

Silent failure: 64-bit sums wrap around, which is the modulo 2⁶⁴; 32-bit sums would lose bits without an error.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

PERIOD = 65521  # the weights 1 to 65521 repeat
ROWS = 128  # rows of values that are converted to float32 at a time
MODULUS = 1 << 64


class BitSums(NamedTuple):
    """The two sums over a tensor, modulo 2⁶⁴."""

    plain: int
    weighted: int


def weights_fingerprint(weights: Iterable[tuple[str, Tensor]], described: str) -> str:
    """Sixteen hexadecimal digits for named tensors and a text that describes the rest of the model."""
    digest = hashlib.sha256(described.encode())
    for name, value in weights:
        digest.update(f"{name}{tuple(value.shape)}{tuple(bit_sums(value))}".encode())
    return digest.hexdigest()[:16]


def bit_sums(value: Tensor) -> BitSums:
    """Both sums of a tensor."""
    flat, plain, weighted = value.detach().flatten(), 0, 0
    weights = torch.arange(1, PERIOD + 1, device=flat.device)
    for part in flat.split(PERIOD * ROWS):
        bits = part.to(torch.float32).view(torch.int32)
        complete = len(bits) // PERIOD * PERIOD
        columns = bits[:complete].view(-1, PERIOD).sum(dim=0, dtype=torch.int64)
        columns[: len(bits) - complete] += bits[complete:]
        plain, weighted = plain + int(columns.sum()), weighted + int((columns * weights).sum())
    return BitSums(plain % MODULUS, weighted % MODULUS)
