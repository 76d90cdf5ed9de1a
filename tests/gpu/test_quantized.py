"""Quantized weights: each method loads, passes the self-check, and computes nearly what the full model computes."""

from collections.abc import Callable

import pytest
import torch
from gpu import samples

from sinklens.model import load
from sinklens.model.quantization import METHODS

LOOSE = {"bnb-int8": 0.1, "bnb-nf4": 0.4}  # of the norm of the logits
MIXTURE = [("tiny-llada-moe", "bnb-int8")]  # 4 bits choose other experts


@pytest.mark.parametrize(("name", "method"), [*(("tiny-llada", method) for method in METHODS), *MIXTURE])
def test_methods(name: str, method: str, device: torch.device, finding: Callable[..., None]) -> None:
    """{method} of {name}"""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    quantized, full = load(name, quantization=method, device=device), load(name, device=device)
    ids = samples.random_ids(2, 17).to(device)
    with torch.no_grad():
        wanted, found = full(ids).float(), quantized(ids).float()
    off = float((found - wanted).norm() / wanted.norm())
    assert off < LOOSE[method], f"logits differ by {off:.3g}"
    finding(f"{len(quantized.quantization)} weights are quantized; logits differ by {off:.2g}")
