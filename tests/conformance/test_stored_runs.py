"""Every folder of reference data: sinklens has the passes of the model's own code, and every canvas of its runs.

One table for all families: tests/stored translates the runs. What else a family's reference shows has its own file.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stored.folders import largest_difference
from stored.runs import FOLDERS, open_folder, stored_pass, stored_runs
from torch import Tensor

TOLERANCE = 1e-4
RUNS = {
    "llada-mha": 5, "llada-gqa": 5, "dream-gqa": 4, "llada-cached": 20, "dream-cached": 14, "mmada": 2, "llada-moe": 5,
    "rnd1": 5, "open-dcoder": 9, "sdar": 12, "sdar-moe": 8, "bd3lm": 12, "fast-dllm-v2": 9, "llada2-moe": 13,
    "nemotron-diffusion": 14, "diffullama": 8, "diffugpt": 7, "diffusion-gemma": 8, "mdlm": 8, "bd3lm-owt": 6,
    "sedd": 5, "duo": 7, "gidd": 5,
}  # fmt: skip
LEFT_OUT = {"bd3lm": {6, 7}, "fast-dllm-v2": {7, 8}, "nemotron-diffusion": {7}}
"""Runs that depend on the batch or show a defect, or that are the reference's batched sampler."""
CASES = [(name, number) for name, count in RUNS.items() for number in range(count)]
CASES = [(name, number) for name, number in CASES if number not in LEFT_OUT.get(name, ())]
CACHED = {("bd3lm", number) for number in (8, 9, 10, 11)} | {(name, number) for name, number in CASES if name in (
    "llada2-moe", "nemotron-diffusion",
)}  # fmt: skip
"""Runs that are repeated with a key/value cache too, which must change nothing."""
PADDED = ("llada-mha", "llada-gqa", "llada-moe")


@pytest.fixture
def folder(conformance, name):
    """The folder of this name."""
    return open_folder(conformance / name)


def _unchanged(value: Tensor, hook: Any) -> None:
    """A hook that watches its point and changes nothing."""


def ways(name: str, number: int) -> Iterator[dict[str, Any]]:
    """How a run is watched besides its sinks: not at all, the logits; and with a cache where there is one."""
    yield {"record_sinks": False}
    if name in ("llada-mha", "llada-gqa", "dream-gqa", "mmada", "llada-moe"):
        yield {"record_sinks": False, "hooks": [("denoise.hook_logits", _unchanged)]}
    if (name, number) in CACHED:
        yield {"record_sinks": False, "use_cache": True}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_stored_run_is_repeated_or_known_to_be_left_out(folder, name):
    assert len(folder.runs) == RUNS[name]
    assert {run.number for run in stored_runs(folder)} == set(range(RUNS[name])) - LEFT_OUT.get(name, set())


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_pass_equals_the_references(folder, name):
    """With nothing watched, patterns and sink scores, which use other code paths."""
    model, stored = folder.load(block_length=folder.pass_block_length), stored_pass(folder)
    given = stored.arguments("cpu")
    with torch.no_grad():
        plain = model(stored.ids, **given)
        explicit, cache = model.run_with_cache(stored.ids, **given)
        fused, sinks = model.run_with_cache(stored.ids, names_filter=lambda name: name.endswith("sink_scores"), **given)
    for logits in (plain, explicit, fused):
        assert largest_difference(logits, stored.logits) < (2e-4 if name == "diffusion-gemma" else TOLERANCE)
    assert bool(stored.patterns) is not name.endswith("-cached")
    for layer, pattern in enumerate(stored.patterns):
        assert largest_difference(cache["pattern", layer], pattern) < TOLERANCE
        scores = sinks[f"blocks.{layer}.attn.hook_sink_scores"]
        assert largest_difference(scores, pattern.sum(dim=2)) < (2e-4 if name == "diffusion-gemma" else TOLERANCE)
    if name in ("diffullama", "diffugpt"):
        stream = [cache[f"blocks.{layer}.hook_resid_post"] for layer in range(model.cfg.n_layers)]
        for ours, theirs in zip([cache["blocks.0.hook_resid_pre"], *stream], folder.tensors["resid"], strict=True):
            assert largest_difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize(("name", "layers"), [("llada-moe", 0), ("rnd1", 0), ("sdar-moe", 0), ("llada2-moe", 1)])
def test_the_routing_equals_the_references(folder, layers):
    """Router logits, chosen experts and their weights; the reference orders experts by number."""
    model = folder.load(block_length=folder.pass_block_length)
    assert [parts.experts for parts in model.tree.parts] == [layer >= layers for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        _, kept = model.run_with_cache(folder.tensors["input_ids"], names_filter=lambda name: ".mlp." in name)
    for layer in range(layers, model.cfg.n_layers):
        stored = {what: folder.tensors[f"router.{layer}.{what}"] for what in ("logits", "weights", "experts")}
        found, order = kept[f"blocks.{layer}.mlp.hook_expert_indices"].sort(dim=-1)
        assert torch.equal(found, stored["experts"].long())
        assert largest_difference(kept[f"blocks.{layer}.mlp.hook_router_logits"], stored["logits"]) < TOLERANCE
        weights = kept[f"blocks.{layer}.mlp.hook_expert_weights"].gather(-1, order)
        assert largest_difference(weights, stored["weights"]) < TOLERANCE


@pytest.mark.parametrize("name", [*PADDED, "bd3lm"])
def test_logits_of_a_padded_batch_equal_the_references_at_real_tokens(folder, name):
    """Blocks are counted by columns, padding included."""
    expected = folder.tensors
    if name in PADDED:
        ids, logits, real = expected["input_ids"], expected["padded_logits"], expected["padded_attention_mask"].bool()
    else:
        ids, logits = expected["padded.input_ids"], expected["padded.logits"]
        real = expected["padded.attention_mask"].diagonal(dim1=1, dim2=2).bool()
    with torch.no_grad():
        found = folder.load(block_length=folder.pass_block_length)(ids, attention_mask=real.long())
    assert not real.all()
    assert largest_difference(found[real], logits[real]) < TOLERANCE


@pytest.mark.fast_cases(10)
@pytest.mark.parametrize(("name", "number", "more"), [(*case, more) for case in CASES for more in (False, True)])
def test_every_canvas_equals_the_references_token_for_token(folder, name, number, more):
    """With its sinks recorded, and in other ways."""
    for stored in stored_runs(folder):
        if stored.number == number:
            for way in ways(name, number) if more else [{}]:
                assert stored.equal(folder.repeat(stored, **way)) == [True] * (stored.canvases.shape[1] + 1), way


@pytest.mark.parametrize("name", FOLDERS)
def test_another_token_than_the_stored_one_is_noticed(folder):
    stored = min(stored_runs(folder), key=lambda run: run.canvases.shape[1:].numel() or 10**6)
    run, passes = folder.repeat(stored, record_sinks=False), stored.canvases.shape[1]
    canvases = stored.canvases.clone()
    row = range(len(canvases))[stored.rows or slice(None)][0]
    canvases[row, -1, (canvases[row, -1] >= 0).nonzero()[-1]] += 1
    assert stored._replace(canvases=canvases).equal(run) == [*[True] * (passes - 1), False, True]
