"""sinklens reproduces the models' reference code: logits, patterns, and every canvas of every run."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from published import largest_difference
from safetensors.torch import load_file
from torch import Tensor

import sinklens
from sinklens.families import SAMPLERS

TOLERANCE = 1e-4
RUNS = {"llada-mha": 5, "llada-gqa": 5, "dream-gqa": 4, "mmada": 2, "llada-moe": 5}
EXPERTS = ["llada-moe"]
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
    """The model of a folder; a mask token that the public config leaves to the tokenizer is written into a copy."""
    config = json.loads((folder / "config.json").read_text())
    mask = json.loads((folder / "expected.json").read_text()).get("mask_token_id")
    if mask is None or "mask_token_id" in config:
        return sinklens.load(folder)
    with TemporaryDirectory() as copy:
        (Path(copy) / "config.json").write_text(json.dumps(config | {"mask_token_id": mask}))
        (Path(copy) / "model.safetensors").symlink_to(folder / "model.safetensors")
        return sinklens.load(copy)


def _settings(model: sinklens.Model, run: dict[str, Any]) -> dict[str, Any]:
    """The sampler's settings of a run; the others describe it."""
    known = SAMPLERS[model.family_record.sampler].setting_names()
    renamed = {"gen_length" if key == "max_new_tokens" else key: value for key, value in run.items()}
    return {key: value for key, value in renamed.items() if key in known}


@cache
def _expected(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "expected.safetensors")


def _runs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "expected.json").read_text())["generate"]


@pytest.fixture(params=RUNS)
def folder(request: pytest.FixtureRequest, conformance: Path) -> Path:
    return conformance / request.param


def test_every_run_of_the_reference_is_compared(folder):
    assert len(_runs(folder)) == RUNS[folder.name]


def test_logits_equal_the_references(folder):
    expected = _expected(folder)
    with torch.no_grad():
        logits = _model(folder)(expected["input_ids"])
    assert largest_difference(logits, expected["logits"]) < TOLERANCE


def test_patterns_equal_the_references(folder):
    expected, model = _expected(folder), _model(folder)
    with torch.no_grad():
        logits, cache = model.run_with_cache(expected["input_ids"], names_filter=lambda name: "hook_pattern" in name)
    patterns = torch.stack([cache["pattern", layer] for layer in range(model.cfg.n_layers)], dim=1)
    assert largest_difference(patterns, expected["pattern"]) < TOLERANCE
    assert largest_difference(logits, expected["logits"]) < TOLERANCE  # from the pass with explicit attention maps


def test_sink_scores_are_the_column_sums_of_the_references_patterns(folder):
    expected, model = _expected(folder), _model(folder)
    with torch.no_grad():
        _, cache = model.run_with_cache(expected["input_ids"], names_filter=lambda name: "sink_scores" in name)
    scores = torch.stack([cache[f"blocks.{layer}.attn.hook_sink_scores"] for layer in range(model.cfg.n_layers)], dim=1)
    assert largest_difference(scores, expected["pattern"].sum(dim=3)) < TOLERANCE


@pytest.mark.parametrize("name", EXPERTS)
def test_the_routing_equals_the_references(conformance, name):
    folder = conformance / name
    expected, model = _expected(folder), _model(folder)
    with torch.no_grad():
        _, cache = model.run_with_cache(expected["input_ids"], names_filter=lambda name: ".mlp." in name)
    layers = [layer for layer, parts in enumerate(model.tree.parts) if parts.experts]
    assert [f"router.{layer}.logits" in expected for layer in layers] == [True] * len(layers) != []
    for layer in layers:
        logits, weights, experts = (expected[f"router.{layer}.{what}"] for what in ("logits", "weights", "experts"))
        found, order = cache[f"blocks.{layer}.mlp.hook_expert_indices"].sort(dim=-1)  # the reference's are ascending
        assert torch.equal(found, experts.long())
        assert largest_difference(cache[f"blocks.{layer}.mlp.hook_router_logits"], logits) < TOLERANCE
        weighed = cache[f"blocks.{layer}.mlp.hook_expert_weights"].gather(-1, order)
        assert largest_difference(weighed, weights) < TOLERANCE


@pytest.mark.parametrize("name", ["llada-mha", "llada-gqa", "llada-moe"])
def test_logits_of_a_padded_batch_equal_the_references_at_real_tokens(conformance, name):
    folder = conformance / name
    expected = _expected(folder)
    mask = expected["padded_attention_mask"]
    assert (mask == 0).any()
    with torch.no_grad():
        logits = _model(folder)(expected["input_ids"], attention_mask=mask)
    real = mask.bool()
    assert largest_difference(logits[real], expected["padded_logits"][real]) < TOLERANCE


@pytest.mark.fast_cases(21)
@pytest.mark.parametrize("watching", WATCHING)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_canvas_equals_the_references_token_for_token(conformance, name, number, watching):
    folder = conformance / name
    expected, settings = _expected(folder), _settings(_model(folder), _runs(folder)[number])
    run = sinklens.generate(_model(folder), expected[f"gen{number}.prompt"], **settings, **WATCHING[watching])
    if f"gen{number}.history" in expected:  # Dream's reference keeps the canvas after each step
        assert torch.equal(run.canvas[:, 1:], expected[f"gen{number}.history"])
    else:
        assert torch.equal(run.canvas[:, :-1], expected[f"gen{number}.canvas"])
    assert torch.equal(run.tokens, expected[f"gen{number}.result"])
