"""Layers on several GPUs, in main memory or on disk; and one process per GPU through Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from gpu import samples
from gpu.agreement import near

from sinklens.interventions import MaskSinks
from sinklens.model import Model, load
from sinklens.runs import generate

GIVEN: dict[str, Any] = {"gen_length": 4, "steps": 4, "block_length": 4, "progress": False}
LAYERS = 4


@pytest.mark.parametrize("place", ["main memory", pytest.param("disk", marks=pytest.mark.large)])
def test_offloaded(place: str, device: torch.device, tmp_path: Path, finding: Callable[..., None]) -> None:
    """a model offloaded to {place} shows every point"""
    plain = samples.random_model("llama", False, device)
    copy = type(plain.tree.hf)(plain.config).to(device="cpu", dtype=torch.float32).eval()
    copy.load_state_dict({name: value.cpu() for name, value in plain.tree.hf.state_dict().items()})
    if place == "disk":
        accelerate.disk_offload(copy, str(tmp_path), device)
    else:
        accelerate.cpu_offload(copy, device)
    finding(_compare(load(copy), plain, samples.random_ids(2, 17)))


def _compare(model: Model, plain: Model, ids: torch.Tensor) -> str:
    """Check that every point of a pass shows the same values, and that a run with masked sinks has the same tokens."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids.to(model.cfg.device))
        wanted, wanted_cache = plain.run_with_cache(ids.to(plain.cfg.device))
    for name, value in wanted_cache.items():
        near(cache[name], value, 1e-4, name)
    runs = [generate(each, ids, hooks=MaskSinks(top_k=1), **GIVEN) for each in (model, plain)]
    assert torch.equal(runs[0].canvas, runs[1].canvas), "a run with masked sinks has different tokens"
    return f"{len(wanted_cache)} points; logits: {near(logits, wanted, 1e-4)}"


def _placed(device: torch.device, places: dict[str, Any]) -> dict[str, Any]:
    """A device_map: modules on `device`, except those at other `places`."""
    here = device.index or 0 if device.type == "cuda" else str(device)
    names = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    return dict.fromkeys([*names, *(f"model.layers.{n}" for n in range(LAYERS))], here) | places


OFFLOADED = {"model.layers.1": "disk", "model.layers.2": "cpu"}
LAST = dict.fromkeys(["model.layers.2", "model.layers.3", "model.norm", "lm_head"], 1)


@pytest.mark.parametrize(("where", "places"), [
    pytest.param("'auto'", None, marks=pytest.mark.large),
    ("layers in main memory and on disk", OFFLOADED),
    ("layers over several GPUs", LAST),
])  # fmt: skip
def test_mapped(where: str, places: dict[str, Any] | None, device: torch.device, finding: Callable[..., None]) -> None:
    """device_map with {where}: points, sinks and masks"""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if places is LAST and count < 2:
        pytest.skip(f"it takes two GPUs; there {'is' if count == 1 else 'are'} {count or 'none'}")
    plain = samples.shipped("tiny-llada", device)
    model = load("tiny-llada", device_map="auto" if places is None else _placed(device, places), dtype=torch.float32)
    ids, _ = plain.encode(samples.PROMPTS[0])
    found = getattr(model.tree.hf, "hf_device_map", {})
    finding(f"{_compare(model, plain, ids)}; on {', '.join(sorted({str(place) for place in found.values()}))}")


@pytest.mark.cuda("no GPU; the tests run Ray with simulated GPUs")
def test_ray(tmp_path: Path, finding: Callable[..., None]) -> None:
    """Ray: a worker on a GPU writes the ledger of this process"""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'sinklens[ray]')")
    from sinklens.evaluation import OnRay, evaluate, masking

    given: dict[str, Any] = {"limit": 2, "batch_size": 2}
    runs = [
        evaluate("tiny-llada", "tiny-gsm", masking([0]), tmp_path / name, engine=engine, **given)[0]
        for name, engine in (("ray", OnRay(workers=1, gpus_per_worker=1)), ("alone", None))
    ]
    timed = ("seconds", "batch")  # these depend on timing and batching
    records = [[{n: v for n, v in record.items() if n not in timed} for record in run.records()] for run in runs]
    assert records[0] == records[1], "the worker's records differ from those of this process"
    finding(f"{len(records[0])} records, the same")
