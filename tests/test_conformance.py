"""sinklens reproduces the models' reference code: logits, patterns, and every canvas of every run."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sinklens

TOLERANCE = 1e-4
RUNS = {"llada-mha": 5, "llada-gqa": 5, "dream-gqa": 4, "mmada": 2}
CASES = [(name, number) for name, count in RUNS.items() for number in range(count)]


def _unchanged(value: Tensor, hook: Any) -> None:
    """A hook that watches its point and changes nothing."""


WATCHING = {
    "recording sinks": {},
    "watching nothing": {"record_sinks": False},
    "watching the logits": {"record_sinks": False, "hooks": [("denoise.hook_logits", _unchanged)]},
}


@cache
def _model(folder: Path) -> sinklens.Model:
    return sinklens.load(folder)


@cache
def _expected(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "expected.safetensors")


def _runs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "expected.json").read_text())["generate"]


def _max_difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


@pytest.fixture(params=RUNS)
def folder(request: pytest.FixtureRequest, shared: Path) -> Path:
    return shared / "conformance" / request.param


def test_every_run_of_the_reference_is_compared(folder):
    assert len(_runs(folder)) == RUNS[folder.name]


def test_logits_equal_the_references(folder):
    expected = _expected(folder)
    with torch.no_grad():
        logits = _model(folder)(expected["input_ids"])
    assert _max_difference(logits, expected["logits"]) < TOLERANCE


def test_patterns_equal_the_references(folder):
    expected, model = _expected(folder), _model(folder)
    with torch.no_grad():
        logits, cache = model.run_with_cache(expected["input_ids"], names_filter=lambda name: "hook_pattern" in name)
    patterns = torch.stack([cache["pattern", layer] for layer in range(model.cfg.n_layers)], dim=1)
    assert _max_difference(patterns, expected["pattern"]) < TOLERANCE
    assert _max_difference(logits, expected["logits"]) < TOLERANCE  # from the pass with explicit attention maps


def test_sink_scores_are_the_column_sums_of_the_references_patterns(folder):
    expected, model = _expected(folder), _model(folder)
    with torch.no_grad():
        _, cache = model.run_with_cache(expected["input_ids"], names_filter=lambda name: "sink_scores" in name)
    scores = torch.stack([cache[f"blocks.{layer}.attn.hook_sink_scores"] for layer in range(model.cfg.n_layers)], dim=1)
    assert _max_difference(scores, expected["pattern"].sum(dim=3)) < TOLERANCE


@pytest.mark.parametrize("name", ["llada-mha", "llada-gqa"])
def test_logits_of_a_padded_batch_equal_the_references_at_real_tokens(shared, name):
    folder = shared / "conformance" / name
    expected = _expected(folder)
    mask = expected["padded_attention_mask"]
    assert (mask == 0).any()
    with torch.no_grad():
        logits = _model(folder)(expected["input_ids"], attention_mask=mask)
    real = mask.bool()
    assert _max_difference(logits[real], expected["padded_logits"][real]) < TOLERANCE


@pytest.mark.parametrize("watching", WATCHING)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_canvas_equals_the_references_token_for_token(shared, name, number, watching):
    folder = shared / "conformance" / name
    expected, settings = _expected(folder), _runs(folder)[number]
    if "max_new_tokens" in settings:
        settings["gen_length"] = settings.pop("max_new_tokens")
    run = sinklens.generate(_model(folder), expected[f"gen{number}.prompt"], **settings, **WATCHING[watching])
    if f"gen{number}.history" in expected:  # Dream's reference keeps the canvas after each step
        assert torch.equal(run.canvas[:, 1:], expected[f"gen{number}.history"])
    else:
        assert torch.equal(run.canvas[:, :-1], expected[f"gen{number}.canvas"])
    assert torch.equal(run.tokens, expected[f"gen{number}.result"])
