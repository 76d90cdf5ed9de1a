"""Compare logits and patterns on the device with the CPU in float64, and with reference data.

Canvases of reference runs are compared token for token, except for tied decisions (agreement.py).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from building import NEEDS_BASE, left_padding
from gpu import samples
from gpu.agreement import EXACT, near, near_logits, same_tokens
from stored.folders import ReferenceFolder, StoredRun
from stored.runs import FOLDERS, open_folder, stored_pass, stored_runs
from torch import Tensor

from sinklens.model import Model
from sinklens.model.fetching import ARMS

CPU = torch.device("cpu")
FIRST, *OTHERS = FOLDERS


def _logits(model: Model, ids: Tensor, real: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids.to(model.cfg.device), attention_mask=real.to(model.cfg.device))
    return logits.cpu()[real]


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.large),
])  # fmt: skip
@pytest.mark.parametrize("name", [
    samples.SHIPPED[0], *(pytest.param(name, marks=pytest.mark.large) for name in samples.SHIPPED[1:]),
    *(pytest.param(name, marks=[pytest.mark.large, NEEDS_BASE]) for name in ARMS),
])  # fmt: skip
def test_shipped(name: str, dtype: torch.dtype, device: torch.device, finding: Callable[..., None]) -> None:
    """{name}, {dtype}, padded batch"""
    exact = samples.shipped(name, CPU, torch.float64)
    ids, real = samples.random_ids(3, 65, min(exact.cfg.d_vocab, 600)), left_padding(3, 65, 5)
    found = _logits(samples.shipped(name, device, dtype), ids, real)
    finding(near_logits(found, _logits(exact, ids, real), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "order", "d_head"), [
    ("llama", "bidirectional", 64),
    pytest.param("qwen2", "bidirectional", 32, marks=pytest.mark.large),
    pytest.param("llama", "causal", 128, marks=pytest.mark.large),
    pytest.param("qwen3", "causal", 64, marks=pytest.mark.large),
    pytest.param("llama", "bidirectional", 96, marks=pytest.mark.large),
])  # fmt: skip
def test_random(
    architecture: str, order: str, d_head: int, dtype: torch.dtype, device: torch.device, finding: Callable[..., None]
) -> None:
    """random {architecture}, {order}, heads of {d_head}, {dtype}"""
    ids, real = samples.random_ids(2, 127), left_padding(2, 127, 9)
    exact = samples.random_model(architecture, order == "causal", CPU, torch.float64, d_head)
    found = samples.random_model(architecture, order == "causal", device, dtype, d_head)
    finding(near_logits(_logits(found, ids, real), _logits(exact, ids, real), dtype))


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.large) for name in OTHERS)])
def test_reference_pass(name: str, references: Path, device: torch.device, finding: Callable[..., None]) -> None:
    """{name}: logits and patterns of the reference code"""
    case = open_folder(references / name)
    model, stored = case.load(device, block_length=case.pass_block_length), stored_pass(case)
    with torch.no_grad():
        ids, given = stored.ids.to(device), stored.arguments(device)
        logits, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"), **given)
    difference, patterns = near(logits, stored.logits, EXACT), "not stored"
    for layer, pattern in enumerate(stored.patterns):
        patterns = near(cache["pattern", layer], pattern, EXACT)
    finding(f"logits: {difference}; patterns of the last layer: {patterns}")


@pytest.mark.large
@pytest.mark.parametrize("name", FOLDERS)
def test_reference_runs(name: str, references: Path, device: torch.device, finding: Callable[..., None]) -> None:
    """{name}: canvases of the reference runs, token for token"""
    case = open_folder(references / name)
    runs = stored_runs(case)
    tied = [text for run in runs if (text := _compare_run(case, run, device))]
    finding(f"{len(runs)} runs; {len(tied)} with tied decisions {'; '.join(tied)}".rstrip())


def _compare_run(case: ReferenceFolder, stored: StoredRun, device: torch.device) -> str:
    """Check that a stored run has the same canvases on `device`; what was tied if they differ there."""
    run = case.repeat(stored, device)
    equal, model = stored.equal(run), run.model
    if all(equal):
        return ""
    assert model.family_record.masked, (
        f"run {stored.number}: {equal.count(False)} of {len(equal)} canvases differ; "
        "ties are not examined on a canvas of random tokens"
    )
    on_cpu = case.load(CPU, stored.changes, stored.block_length or case.pass_block_length)
    return f"run {stored.number}: {same_tokens(on_cpu, model, stored.prompt, stored.settings)}"
