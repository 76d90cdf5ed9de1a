"""Complete runs: the same tokens as on the CPU except for tied decisions, and the same results when run twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import samples
from gpu.agreement import same_tokens

from sinklens.model import Model
from sinklens.runs import Generation, generate

CPU = torch.device("cpu")
RANDOM = "random weights"
SHORT = {"gen_length": 8, "steps": 8, "block_length": 8}
GREEDY = {"temperature": 0.0, "alg": "maskgit_plus"}


def _model(name: str, device: torch.device) -> Model:
    return samples.random_model("llama", False, device) if name == RANDOM else samples.shipped(name, device)


def _run(model: Model, prompt: Any, **given: Any) -> Generation:
    return generate(model, prompt, progress=False, **given)


@pytest.mark.parametrize(("name", "kind", "given"), [
    pytest.param("tiny-llada", "three short answers", {"gen_length": 8, "steps": 8}, marks=pytest.mark.small),
    pytest.param("tiny-llama", "three short answers", {"gen_length": 8}, marks=pytest.mark.small),
    pytest.param("tiny-llada", "three prompts", {}, marks=pytest.mark.large),
    pytest.param("tiny-llama", "three prompts", {}, marks=pytest.mark.large),
    pytest.param("tiny-dream", "three prompts", GREEDY, marks=pytest.mark.large),
    pytest.param(RANDOM, "two blocks", {"gen_length": 32, "block_length": 16, "steps": 8}, marks=pytest.mark.large),
    (RANDOM, "guidance", {"gen_length": 16, "block_length": 16, "steps": 8, "cfg_scale": 1.5}),
])  # fmt: skip
def test_tokens(
    name: str, kind: str, given: dict[str, Any], device: torch.device, finding: Callable[..., None]
) -> None:
    """{name}, {kind}: the tokens of the CPU's run"""
    prompt = samples.random_ids(3, 33) if name == RANDOM else samples.PROMPTS
    finding(same_tokens(_model(name, CPU), _model(name, device), prompt, given))


def test_unrecorded(device: torch.device, finding: Callable[..., None]) -> None:
    """a run without recorded sinks: the tokens of the recorded run"""
    model = _model("tiny-llada", device)
    recorded, plain = (_run(model, samples.PROMPTS, record_sinks=record, **SHORT) for record in (True, False))
    assert torch.equal(recorded.canvas, plain.canvas), "recording sinks changed the run"
    finding("all canvases the same")


def test_twice(device: torch.device, finding: Callable[..., None]) -> None:
    """the same run twice: canvases and sink scores, bit for bit"""
    model, given = _model("tiny-llada", device), {"gen_length": 8, "steps": 8} if device.type == "cpu" else {}
    first, second = (_run(model, samples.PROMPTS, **given) for _ in range(2))
    assert torch.equal(first.canvas, second.canvas), "canvases differ"
    assert first.sinks is not None
    assert second.sinks is not None
    assert first.sinks.scores().equals(second.sinks.scores()), "sink scores differ"
    finding(f"{first.steps_run} steps")


@pytest.mark.large
def test_sampled(device: torch.device, finding: Callable[..., None]) -> None:
    """a sampled run twice: the same tokens from one seed"""
    model = _model("tiny-llada", device)
    first, second, other = (_run(model, samples.PROMPTS, seed=seed, temperature=1.0, **SHORT) for seed in (3, 3, 4))
    assert torch.equal(first.canvas, second.canvas), "the same seed gave different tokens"
    finding(f"another seed gives {'the same' if torch.equal(first.canvas, other.canvas) else 'different'} tokens")


@pytest.mark.large
def test_alone(device: torch.device, finding: Callable[..., None]) -> None:
    """a row alone: the same tokens as in a batch"""
    model = _model("tiny-llada", device)
    batch, alone = _run(model, samples.PROMPTS), _run(model, samples.PROMPTS[:1])
    found = batch.canvas[:1, : alone.canvas.shape[1], -alone.canvas.shape[2] :]
    if torch.equal(found, alone.canvas):
        finding("the same")
    else:
        finding(f"differs: {same_tokens(_model('tiny-llada', CPU), model, samples.PROMPTS[:1], {})}")


@pytest.mark.large
def test_bfloat16(device: torch.device, finding: Callable[..., None]) -> None:
    """a run in bfloat16 ends, with finite sink scores of mean 1"""
    run = _run(samples.shipped("tiny-llada", device, torch.bfloat16), samples.PROMPTS, **SHORT | {"steps": 4})
    assert run.sinks is not None
    scores = torch.from_numpy(run.sinks.scores().to_numpy())
    real = run.real[:, None, None, None, :].expand_as(scores)
    mean = scores.masked_fill(~real, 0.0).sum(-1) / real.sum(-1)
    off = float((mean - 1).abs().max())
    assert off < 0.05, f"the mean score of a row is off by {off:.2g}"
    finding(f"the mean score of a row is off by {off:.2g} at most")
