"""Quantized weights: each method loads, passes the self-check, and computes with the matrices that it shows."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from gpu import samples

from sinklens.hooks.offload import value_of
from sinklens.model import Model, load
from sinklens.model.quantization import METHODS

LOOSE = 0.1  # of the logits: kernels round inputs to bfloat16 or 8 bits


def _check(name: str, method: str, device: torch.device, order: float) -> str:
    """Compare a quantized model with a plain one that has the matrices that the quantized one shows.

    Args:
        order: of the norm of the difference, relative to that of the logits: inf for the largest, 2 for the root mean
            square of a mixture of experts, in which a rounded input may choose another expert.
    """
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
    off = _difference(quantized, plain, device, order)
    assert off < LOOSE, f"logits differ by {off:.3g}, in a norm of order {order}"
    return f"{found}; logits differ by {off:.2g}, in a norm of order {order}"


def _difference(quantized: Model, plain: Model, device: torch.device, order: float) -> float:
    ids = samples.random_ids(2, 17).to(device)
    with torch.no_grad():
        wanted, found = plain(ids).float().flatten(), quantized(ids).float().flatten()
    return float((found - wanted).norm(order) / wanted.norm(order))


@pytest.mark.parametrize("method", METHODS)
def test_dense(method: str, device: torch.device, finding: Callable[..., None]) -> None:
    """{method}: a dense model"""
    finding(_check("tiny-llada", method, device, torch.inf))


@pytest.mark.parametrize("method", METHODS)
def test_experts(method: str, device: torch.device, finding: Callable[..., None]) -> None:
    """{method}: a mixture of experts"""
    finding(_check("tiny-llada-moe", method, device, 2))
