"""Evaluations, recorded scores and masked sinks work in every family that is not plain Llama or Qwen."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import arguments, write_family, write_tokenizer
from torch import Tensor

import sinklens
from sinklens.evaluation import LedgerRun, evaluate, masking
from sinklens.evaluation.protocols import find_protocol
from sinklens.interventions import MaskSinks

SETTINGS: dict[str, dict[str, Any]] = {
    "sdar": {"stop": False},
    "bd3lm-qwen3": {"stop": False},
    "fast-dllm-v2": {"stop": False},
    "llada2": {"sampler": "llada2.1", "stop": False, "max_post_steps": 1},
    "llada-moe": {},
    "rnd1": {"steps": 5},
    "open-dcoder": {"alg": "p2", "steps": 5},
    "diffusion-gemma": {"max_denoising_steps": 4, "entropy_bound": 1.5, "pad_token_id": 0},
    "duo": {"steps": 4},
    "gidd": {"steps": 5},
    "sedd": {"steps": 5},
    "mdlm": {"sampler": "remdm", "steps": 5, "low_mode": "max-capped-0.3"},
}
STORED = ("diffusion-gemma", "duo", "gidd", "mdlm", "sedd")
"""Families whose reference weights are read, with this file's tokenizer."""
PROMPTS = ["w5 w9 w13 w21 w30", "w7 w8 w30 w31 w9 w12 w40"]
LENGTH = 8


@cache
def model_of(name: str, folder: Path, conformance: Path) -> sinklens.Model:
    place = folder / name
    if name not in STORED:
        write_family(place, name)
        return sinklens.load(write_tokenizer(place), **arguments(name))
    write_tokenizer(place)
    config = json.loads((conformance / name / "config.json").read_text())
    config |= {"gidd": {"max_seq_len": 64}, "mdlm": {"model_length": 64}}.get(name, {})
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").symlink_to(conformance / name / "model.safetensors")
    if name == "diffusion-gemma":
        (place / "generation_config.json").symlink_to(conformance / name / "generation_config.json")
    return sinklens.load(place, family=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(params=SETTINGS)
def family(request):
    return request.param


@pytest.fixture
def model(family, folder, conformance):
    return model_of(family, folder, conformance)


def patterns_of(model: sinklens.Model, family: str, **more: Any) -> tuple[Any, dict[tuple[int, int], Tensor]]:
    """A run, and the patterns of its steps and layers on the canvas's positions."""
    seen: dict[tuple[int, int], Tensor] = {}

    def keep(value, hook):
        seen[hook.step, hook.layer()] = torch.nn.functional.pad(value, (hook.key_positions.start, 0), value=-1.0)

    points = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(model.cfg.n_layers)]
    hooks = [*more.pop("hooks", []), *points]
    return sinklens.generate(model, PROMPTS, gen_length=LENGTH, hooks=hooks, **SETTINGS[family], **more), seen


base_of = cache(patterns_of)


@pytest.mark.fast_cases(3)
def test_masked_sinks_hide_the_strongest_key_of_the_step_before_and_no_other(model, family):
    base, plain = base_of(model, family)
    _, masked = patterns_of(model, family, hooks=[MaskSinks(top_k=1)], replay=base)
    assert masked.keys() == plain.keys()
    kept = {}  # by layer; a row that waits keeps the sinks of its own last step
    for before, step in pairwise([None, *range(base.steps_run)]):
        for layer in range(model.cfg.n_layers):
            hidden = plain[step, layer] == 0
            if before is not None:
                found = masked[before, layer].clamp(min=0).sum(2).argmax(-1)
                strongest = torch.where(base.active[:, before, None], found, kept.get(layer, found))
                kept[layer] = strongest
                hidden |= torch.zeros_like(hidden).scatter(-1, strongest[:, :, None, None].expand(
                    -1, -1, hidden.shape[2], 1), True) & (plain[step, layer] >= 0)  # fmt: skip
            assert torch.equal(masked[step, layer] == 0, hidden), (step, layer)


@pytest.mark.fast_cases(3)
def test_recorded_scores_are_the_column_sums_of_the_patterns(model, family):
    base, patterns = base_of(model, family)
    score = torch.from_numpy(base.sinks["score"].to_numpy())
    for (step, layer), pattern in patterns.items():
        found = score[:, step, layer, :, : pattern.shape[-1]].nan_to_num(0.0)
        torch.testing.assert_close(found, pattern.clamp(min=0).sum(2), atol=1e-4, rtol=1e-4)


@pytest.mark.extended
def test_an_evaluation_gives_a_row_the_same_answer_in_any_batch(model, family, tmp_path):
    records = []
    for batch in (1, 2):
        protocol = find_protocol("tiny-gsm").with_settings({"gen_length": LENGTH, **SETTINGS[family]})
        evaluate(model, protocol, masking([1]), tmp_path / str(batch), limit=2, batch_size=batch)
        runs = LedgerRun.all(tmp_path / str(batch))
        records.append({(run.name, record["sample"]): record["tokens"] for run in runs for record in run.records()})
    assert records[0] == records[1]
    assert len(records[0]) == 4
