"""Memory: what recording adds to an unrecorded run, whether plans are right, and what happens when memory runs out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu import samples

from benchmarks.measuring import peak
from sinklens.errors import DeviceMemoryError
from sinklens.evaluation.run_memory import plan_run
from sinklens.model import Model
from sinklens.runs import generate

GIVEN: dict[str, Any] = {"gen_length": 16, "block_length": 16, "steps": 2, "progress": False}


@pytest.fixture(scope="module")
def model(device: torch.device) -> Model:
    """Two layers with eight heads of 64."""
    return samples.random_model("llama", False, device, heads=8, kv_heads=8)


@pytest.fixture(scope="module")
def length(device: torch.device) -> int:
    """Positions of a run."""
    return 128 if device.type == "cpu" else 1000


def test_no_map(model: Model, length: int, device: torch.device, finding: Callable[..., None]) -> None:
    """recording sinks keeps no tensor of the size of an attention map"""
    ids = samples.random_ids(1, length - 16)
    recorded, plain = (partial(generate, model, ids, record_sinks=record, **GIVEN) for record in (True, False))
    recorded(), plain()
    extra = peak(recorded, device) - peak(plain, device)
    layer, blocks = 8 * length * length * 4 / 1e6, 3 if device.type == "cpu" else 0  # the plain version's, of 2 MiB
    found = f"{extra:.1f} MB more, where the map of one layer takes {layer:.1f} MB"
    assert extra < blocks + layer, found
    finding(found)


@pytest.mark.parametrize("watch", [[], ["patterns"]], ids=["nothing watched", "patterns watched"])
def test_planned(watch: list[str], length: int, device: torch.device, finding: Callable[..., None]) -> None:
    """the planned peak of a run of tiny-llada ÷ the measured one"""
    length = min(length, 112)
    given: dict[str, Any] = {"gen_length": 16, "block_length": 16, "steps": 2}
    planned = plan_run(
        "tiny-llada", batch_size=8, prompt_length=length - 16, watch=watch, dtype=torch.float32, **given
    ).working / 1e6  # fmt: skip
    tiny, ids = samples.shipped("tiny-llada", device), samples.random_ids(8, length - 16) + 10
    hooks = [(lambda name: name.endswith("hook_pattern"), lambda value, hook: None)] * len(watch)
    generate(tiny, ids, hooks=hooks, progress=False, **given)
    measured = peak(lambda: generate(tiny, ids, hooks=hooks, progress=False, **given), device)
    finding(f"{planned:.1f} MB planned, {measured:.1f} MB measured", value=planned / measured)
    assert 0.9 < planned / measured < (1.1 if device.type == "cpu" else 4), "a plan that is too small does not fit"


@pytest.mark.cuda("it fills the memory of a CUDA device")
def test_filled(model: Model, device: torch.device, finding: Callable[..., None]) -> None:
    """running out of the device's memory does the same, and the model runs again"""
    ids = samples.random_ids(8, 1000)
    before = generate(model, ids[:1], **GIVEN)
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + 128e6) / total), device)
    patterns = [(lambda name: name.endswith("hook_pattern"), lambda value, hook: None)]  # 2 × 264 MB for the map
    try:
        with pytest.raises(DeviceMemoryError, match="hook_pattern"):
            generate(model, ids, hooks=patterns, **GIVEN)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    kept = torch.cuda.memory_allocated(device)
    assert torch.equal(generate(model, ids[:1], **GIVEN).canvas, before.canvas), "the next run differs"
    finding(f"{kept / 1e6:.0f} MB allocated after the error, {reserved / 1e6:.0f} MB reserved before")
