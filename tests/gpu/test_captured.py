"""Captured passes: runs with and without CUDA graphs, and their memory."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import samples

from sinklens.hooks import captured
from sinklens.interventions import MaskSinks
from sinklens.model import Model
from sinklens.runs import Generation, generate

pytestmark = pytest.mark.cuda("CUDA graphs are for CUDA devices")


def _model(name: str, device: torch.device) -> Model:
    if name == "tiny-llada":
        return samples.shipped(name, device)
    return samples.random_model("llama", False, device, torch.bfloat16, d_head=128, heads=8, kv_heads=8)


def _run(model: Model, length: int, seed: int = 0, rows: int = 2, **given: Any) -> Generation:
    """A run over `length` positions; the second row is shorter, so it has padding."""
    drawn = torch.randint(3, 90, (rows, length - 32), generator=torch.Generator().manual_seed(seed))
    prompts = [row[3 * place :].tolist() for place, row in enumerate(drawn)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph")
        return generate(model, prompts, progress=False, gen_length=32, block_length=32, steps=8, **given)


def _captures(model: Model) -> list[captured.Captured]:
    return list(model.tree.captures._kept.values())


@pytest.mark.parametrize(("what", "given", "kinds"), [
    ("nothing watched", {"record_sinks": False}, 1),
    ("sinks recorded", {}, 1),
    ("MaskSinks(5), recorded", {"hooks": MaskSinks(5)}, 2),
    ("MaskSinks(5), not recorded", {"hooks": MaskSinks(5), "record_sinks": False}, 2),
    ("guided", {"cfg_scale": 1.5}, 1),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("name", "length"), [("tiny-llada", 128), ("random bfloat16", 512)])
def test_same(
    name: str, length: int, rows: int, what: str, given: dict[str, Any], kinds: int, device: torch.device,
    finding: Callable[..., None],
) -> None:  # fmt: skip
    """{name}, {length} positions, {rows} rows, {what}: tokens with and without graphs"""
    model = _model(name, device)
    model.tree.captures.clear()
    others = []
    for seed in (0, 1):
        found = _run(model, length, seed, rows, **given)  # a warning that a replay disagrees is an error here
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(captured, "DEVICES", ())
            plain = _run(model, length, seed, rows, **given)
        others.append(int((found.canvas != plain.canvas).sum()))
    assert len(_captures(model)) == kinds, f"{len(_captures(model))} captured passes"
    assert not any(others) or name != "tiny-llada", f"{others} tokens of the canvases differ"
    finding(f"{others} of {plain.canvas.numel()} tokens of the canvases differ")


def test_failure(device: torch.device, finding: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """a pass that waits for the device is not captured, and the model runs on"""
    model = _model("random bfloat16", device)
    model.tree.captures.clear()
    monkeypatch.setattr(captured, "_is_known", lambda _function: True)
    reading = lambda _module, _args, output: output.sum().item() and None  # noqa: E731
    handle = model.tree.hf.model.layers[1].mlp.register_forward_hook(reading)
    with pytest.warns(RuntimeWarning, match="without a CUDA graph") as warned:
        generate(model, [[5, 6, 7]], progress=False, gen_length=32, block_length=32, steps=8)
    handle.remove()
    monkeypatch.undo()
    _run(model, 128)
    assert len(_captures(model)) == 1, "no captures after it"
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device), "another stream is in use"
    finding(str(warned[0].message)[-200:])


def test_memory(device: torch.device, finding: Callable[..., None]) -> None:
    """20 runs of four kinds: memory stays as after the second of each"""
    model = _model("random bfloat16", device)
    model.tree.captures.clear()
    sizes = []
    for _ in range(20):
        for given in ({}, {"record_sinks": False}, {"hooks": MaskSinks(5)}):
            _run(model, 512, **given)
        torch.cuda.synchronize(device)
        sizes.append((torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)))
    (allocated, reserved), (allocated_last, reserved_last) = sizes[2], sizes[-1]
    assert allocated_last <= allocated + 2**20, f"allocated: {sizes}"
    assert reserved_last <= reserved + 2**26, f"reserved: {sizes}"
    finding(f"{reserved_last / 2**20:.0f} MiB reserved")
