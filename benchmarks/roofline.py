"""Roofline: the least time of a pass, from the card's peak arithmetic or its memory bandwidth, whichever is slower.

The peaks are the vendors' figures (`sinklens.evaluation.cards`). A card that is not listed is measured with a large
product and a large copy.
"""

from typing import NamedTuple

import torch

from benchmarks.measuring import seconds
from sinklens.evaluation.cards import CARDS


class Peak(NamedTuple):
    """Peak performance of a card.

    Attributes:
        flops: FLOPs per second.
        bytes: bytes per second, from and to its memory.
        source: "data sheet" or "measured".
    """

    flops: float
    bytes: float
    source: str = "data sheet"


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak of `device`, looked up by its name or measured."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for card in CARDS.values():
            if card.reported in name.replace("NVIDIA ", ""):
                return Peak(card.peak, card.bandwidth)
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> Peak:
    side = 1024 if device.type == "cpu" else 8192
    left = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(left)
    product = min(seconds(lambda: torch.matmul(left, left, out=out), device) for _ in range(repeats))
    source = torch.empty(1 << (24 if device.type == "cpu" else 30), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    copy = min(seconds(lambda: into.copy_(source), device) for _ in range(repeats))
    return Peak(2 * side**3 / product, 2 * source.numel() / copy, "measured")


def pass_of(sizes: dict[str, int], rows: int, length: int, answer: int, itemsize: int) -> tuple[float, float]:
    """FLOPs and bytes of one pass that decides `answer` positions of each row.

    FLOPs are those of products: per layer and token 2·(4·d² + 3·d·d_mlp), and 4·S·d for attention; the head runs only
    at the answer's positions. Bytes are those of the weights, read once, and of each layer's activations, written and
    read once.
    """
    d, mlp, layers = sizes["d_model"], sizes.get("d_mlp") or int(sizes["d_model"] * 8 / 3) // 64 * 64, sizes["n_layers"]
    weights = layers * (4 * d * d + 3 * d * mlp)
    tokens = rows * length
    flops = 2 * weights * tokens + 4 * layers * tokens * length * d + 2 * rows * answer * d * sizes["vocab"]
    activations = tokens * layers * (8 * d + 3 * mlp) * 2
    return float(flops), float(itemsize * (weights + d * sizes["vocab"] + activations))
