"""Facts about the device, its memory and package versions, and two basic claims about the device."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

PACKAGES = ("sinklens", "torch", "triton", "transformers", "nnsight", "transformer-lens", "accelerate", "numpy")


def facts(device: torch.device) -> dict[str, str]:
    """Facts that measured figures depend on."""
    found = {"python": platform.python_version(), "system": platform.platform(), "device": str(device)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device.type != "cuda":
        return found | {"threads": str(torch.get_num_threads())}
    card = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return found | {
        "card": card.name, "cards": str(torch.cuda.device_count()), "capability": f"{card.major}.{card.minor}",
        "processors": str(card.multi_processor_count), "memory": f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
        "cuda": str(torch.version.cuda or torch.version.hip), "cudnn": str(torch.backends.cudnn.version()),
    }  # fmt: skip


def test_products(device: torch.device, finding: Callable[..., None], record_property: Callable[..., None]) -> None:
    """the device multiplies matrices as the CPU does, in float32 without TF32"""
    for name, fact in facts(device).items():
        record_property(name, fact)
    left, right = (torch.randn(65, 65, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    found = (left.to(device) @ right.to(device)).cpu().double()
    off = float((found - left.double() @ right.double()).abs().max())
    assert off < 1e-4, f"a dot product of 65 numbers differs by {off:.2g}: TF32 is on, or the device is faulty"
    finding(f"differs by {off:.2g}")


@pytest.mark.cuda("no CUDA device; the kernels run in Triton's interpreter")
def test_triton(device: torch.device, finding: Callable[..., None]) -> None:
    """Triton compiles for this device"""
    from sinklens.hooks.attention import column_sums_triton

    query = torch.zeros(1, 1, 16, 64, device=device)
    found = float(column_sums_triton.log_sum_exp(query, query, 1.0)[0, 0, 0])
    assert abs(found - 2.7725887) < 1e-5, f"log 16 was computed as {found}"
    finding(f"log-sum-exp of 16 equal scores is {found:.6f}")
