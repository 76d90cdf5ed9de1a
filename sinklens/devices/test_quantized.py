"""Quantized weights: each method loads, passes the self-check, and computes with the matrices that it shows."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from sinklens.checkpoints.quantization import METHODS
from sinklens.devices import samples
from sinklens.hooks.offload import value_of
from sinklens.model import Model, load

LOOSE = 0.1  # root mean square, relative: kernels round inputs to bfloat16 or 8 bits, which may change an expert


def _check(name: str, method: str, device: torch.device) -> str:
    """Compare a quantized model with a plain one that has the matrices that the quantized one shows."""
    chosen = METHODS[method]
    if chosen.package and find_spec(chosen.package) is None:
        pytest.skip(f"{chosen.package} is not installed")
    if chosen.cuda_only and device.type != "cuda":
        pytest.skip(f"{method} needs a GPU")
    quantized = load(name, quantization=method, device=device)
    found = quantized.quantization
    assert found is not None
    plain = load(name, device=device, dtype=quantized.cfg.dtype)
    for place in found.quantized:
        plain.tree.hf.get_parameter(place).data.copy_(value_of(quantized.tree.hf, place))
    off = _difference(quantized, plain, device)
    assert off < LOOSE, f"logits differ by {off:.3g} of their size"
    return f"{found}; logits differ by {off:.2g} of their size"


def _difference(quantized: Model, plain: Model, device: torch.device) -> float:
    ids = samples.random_ids(2, 17).to(device)
    with torch.no_grad():
        wanted, found = plain(ids).float(), quantized(ids).float()
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("method", METHODS)
def test_dense(method: str, device: torch.device, finding: Callable[..., None]) -> None:
    """{method}: a dense model"""
    finding(_check("tiny-llada", method, device))


@pytest.mark.parametrize("method", METHODS)
def test_experts(method: str, device: torch.device, finding: Callable[..., None]) -> None:
    """{method}: a mixture of experts"""
    finding(_check("tiny-llada-moe", method, device))
