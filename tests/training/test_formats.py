"""The layouts of checkpoints: public names, and the trained function."""

import json
import re

import pytest
import torch
from safetensors import safe_open

import sinklens

REFERENCES = {
    "tiny-sdar": "sdar",
    "tiny-llada-moe": "llada-moe",
    "tiny-canvas": "diffusion-gemma",
    "tiny-mdlm": "mdlm",
    "tiny-duo": "duo",
    "tiny-two-modes": "nemotron-diffusion",
}
PLAIN = ("tiny-llada", "tiny-llama", "tiny-dream", "tiny-mmada", "no-start", "sigmoid", "off-by-one")
"""Recipes whose class of transformers computes their attention itself."""
ADDED = {
    "tiny-sdar": {"block_size", "mask_token_id", "pad_token_id"},
    "tiny-llada-moe": {"mask_token_id"},
    "tiny-two-modes": {"pad_token_id"},
}


@pytest.fixture(scope="module", params=REFERENCES)
def written(request, noisy_toy):
    return noisy_toy(request.param)


def expected_logits(recipe, hf, ids):
    """What the class of transformers computes, with the family's attention written out."""
    if recipe.name in PLAIN:
        return hf(input_ids=ids).logits
    if recipe.objective == "uniform":
        return hf(input_ids=ids[:, :-24], decoder_input_ids=ids[:, -24:]).logits
    if recipe.objective == "modes":  # a pass without a mode sees all tokens
        return hf(input_ids=ids, attention_mask=torch.ones(1, 1, ids.shape[1], ids.shape[1]).bool()).logits
    block = torch.arange(ids.shape[1]) // (recipe.block_length or ids.shape[1])
    return hf(input_ids=ids, attention_mask=(block[None] <= block[:, None])[None, None]).logits


@pytest.mark.parametrize("name", [*REFERENCES, *PLAIN])
def test_a_reloaded_checkpoint_computes_what_the_trained_model_does(name, noisy_toy):
    recipe, hf, folder = noisy_toy(name)
    model = sinklens.load(folder)
    assert model.family == recipe.family
    ids = torch.randint(3, 600, (2, 44))
    ids[:, 40] = model.mask_token_id or 1  # without a mask token sinklens warns
    timed = {"time": torch.tensor([0.2, 1.7])} if recipe.objective == "duo" else {}
    with torch.no_grad():
        expected = hf(ids, **timed).logits if recipe.d_cond else expected_logits(recipe, hf, ids)
        torch.testing.assert_close(model(ids, **timed)[:, -expected.shape[1] :], expected, atol=2e-5, rtol=2e-5)
    assert expected.std() > 0.1


def test_a_reloaded_checkpoint_generates_with_the_sampler_and_lengths_of_its_family(written):
    recipe, _, folder = written
    model = sinklens.load(folder)
    done = sinklens.generate(model, "Question: Tom has 5 pens.\nAnswer:", record_sinks=False)
    assert type(done.settings).__name__ == {
        "sdar": "SdarSettings", "llada-moe": "LladaSettings", "diffusion-gemma": "DiffusionGemmaSettings",
        "mdlm": "MdlmSettings", "duo": "DuoSettings",
        "nemotron-diffusion": "NemotronDiffusionSettings",
    }[recipe.family]  # fmt: skip
    assert done.settings.gen_length == 24
    if recipe.objective == "uniform":
        assert (done.settings.canvas_length, done.settings.max_denoising_steps) == (24, 24)
    elif recipe.d_cond:
        found = (done.settings.steps, model.mask_token_id, model.config.vocab_size)
        assert found == (24, 643 if recipe.objective == "mdlm" else None, 644)
    else:
        changed = (done.canvas[0].diff(dim=0) != 0).sum(dim=1)
        assert set(changed.tolist()) <= {0, 1}  # one token per step
        assert done.settings.block_length == (8 if recipe.objective in ("blocks", "modes") else 24)


def names(file):
    """The names of the weights, with a letter for every number, without the vision tower's."""
    with safe_open(file, "pt") as stored:
        return {re.sub(r"\.\d+\.", ".N.", name) for name in stored.keys() if "vision" not in name}  # noqa: SIM118


def test_weights_and_config_have_the_names_of_the_public_checkpoints(written, conformance):
    recipe, _, folder = written
    reference = conformance / REFERENCES[recipe.name]
    assert names(folder / "model.safetensors") == names(reference / "model.safetensors")
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, reference))
    assert set(ours) - set(theirs) <= ADDED.get(recipe.name, set())
    assert (ours["model_type"], ours["architectures"]) == (theirs["model_type"], theirs["architectures"])
    if recipe.objective == "uniform":
        assert set(ours["text_config"]) == set(theirs["text_config"])
        generation = [json.loads((place / "generation_config.json").read_text()) for place in (folder, reference)]
        assert set(generation[0]) - set(generation[1]) == {"bos_token_id"}
        fixed = ("sampler_config", "t_max", "t_min", "stability_threshold", "confidence_threshold")
        assert {key: generation[0][key] for key in fixed} == {key: generation[1][key] for key in fixed}
