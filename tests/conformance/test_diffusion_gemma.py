"""DiffusionGemma equals transformers' own class: logits, patterns, routing, and every pass of every stored run."""

import pytest
import torch
from stored.folders import largest_difference
from stored.runs import stored_run
from torch import Tensor

FOLDER = "diffusion-gemma"
TOLERANCE = 2e-4
PASSES = (0, 1, 2)


def _text(expected: dict[str, Tensor], number: int, *parts: str) -> tuple[Tensor, Tensor]:
    """Prompt and canvas of a stored pass, and its attention mask."""
    ids = expected[f"fwd{number}.input_ids"]
    text = torch.cat([ids, *(expected[f"fwd{number}.{part}"] for part in parts)], dim=1)
    mask = torch.ones_like(text)
    mask[:, : ids.shape[1]] = expected.get(f"fwd{number}.attention_mask", torch.ones_like(ids))
    return text, mask


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("number", PASSES)
def test_logits_equal_the_references(reference, number):
    expected, model = reference.tensors, reference.load()
    text, mask = _text(expected, number, "canvas")
    with torch.no_grad():
        plain = model(text, attention_mask=mask)
        conditioned = model(text, attention_mask=mask, self_conditioning=expected[f"fwd{number}.sc_logits"])
    assert largest_difference(plain, expected[f"fwd{number}.decoder.logits"]) < TOLERANCE
    assert largest_difference(conditioned, expected[f"fwd{number}.decoder_sc.logits"]) < TOLERANCE


def test_a_longer_text_gives_the_logits_of_an_extended_cache(reference):
    expected = reference.tensors
    extended = [number for number in PASSES if f"fwd{number}.ext.canvas" in expected]
    assert extended
    for number in extended:
        text, mask = _text(expected, number, "ext.tokens", "ext.canvas")
        with torch.no_grad():
            logits = reference.load()(text, attention_mask=mask)
        assert largest_difference(logits, expected[f"fwd{number}.ext.decoder.logits"]) < TOLERANCE


@pytest.mark.parametrize("number", PASSES)
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_patterns_streams_and_routing_equal_the_references(reference, number, part):
    expected, model = reference.tensors, reference.load()
    text, mask = _text(expected, number, "canvas")
    prefix = "encoder." if part == "encoder" else ""
    with torch.no_grad():
        _, cache = model.run_with_cache(text, attention_mask=mask)
    canvas = expected[f"fwd{number}.canvas"].shape[1]
    real = mask[:, :-canvas].bool() if part == "encoder" else mask[:, -canvas:].bool()
    for layer in range(model.cfg.n_layers):
        if part == "decoder":
            sums = expected[f"fwd{number}.decoder.pattern.{layer}"].sum(dim=2)
            assert largest_difference(cache[f"blocks.{layer}.attn.hook_sink_scores"], sums) < TOLERANCE
        pattern = cache[f"{prefix}blocks.{layer}.attn.hook_pattern"].transpose(1, 2)[real]
        assert largest_difference(pattern, expected[f"fwd{number}.{part}.pattern.{layer}"].transpose(1, 2)[real]) < 1e-4
        stream = cache[f"{prefix}blocks.{layer}.hook_resid_post"][real]
        assert largest_difference(stream, expected[f"fwd{number}.{part}.hidden"][layer + 1][real]) < TOLERANCE
        experts = cache[f"{prefix}blocks.{layer}.mlp.hook_expert_indices"][real]
        assert torch.equal(experts, expected[f"fwd{number}.{part}.router_index"][layer][real])
        weights = cache[f"{prefix}blocks.{layer}.mlp.hook_expert_weights"][real]
        assert largest_difference(weights, expected[f"fwd{number}.{part}.router_weight"][layer][real]) < TOLERANCE
        logits = cache[f"{prefix}blocks.{layer}.mlp.hook_router_logits"][real]
        assert largest_difference(logits.softmax(-1), expected[f"fwd{number}.{part}.router_probs"][layer][real]) < 1e-4


@pytest.mark.parametrize("number", range(8))
def test_every_pass_accepts_what_the_reference_accepts(reference, number):
    expected, size = reference.tensors, reference.tensors[f"gen{number}.canvas_in"].shape[-1]
    run = reference.repeat(stored_run(reference, number), record_sinks=False)
    finished = torch.zeros(len(run.canvas), dtype=torch.bool)
    for step, block in enumerate(expected[f"gen{number}.block"].tolist()):
        place = slice(run.prompt_length + block * size, run.prompt_length + (block + 1) * size)
        last = step + 1 == run.steps_run or int(expected[f"gen{number}.block"][step + 1]) != block
        if not last:
            accepted = expected[f"gen{number}.accepted_mask"][step]
            assert torch.equal(~run.undecided[~finished, step + 1, place], accepted[~finished])
        finished = torch.zeros_like(finished) if last else expected[f"gen{number}.finished_denoising"][step]
