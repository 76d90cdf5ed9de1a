"""Exported runs: what their configs and cards say."""

import json
import re
from dataclasses import replace

import pytest

import sinklens
from sinklens.model.files import shipped_names
from sinklens.utils.estimates import proportion
from training import RECIPES, train
from training.export import export, write_card, write_text_card
from training.scores import Score

MODEL_TYPES = {
    "dream": "Dream",
    "llada-moe": "llada",
    "diffusion-gemma": "diffusion_gemma",
    "nemotron-diffusion": "nemotron_labs_diffusion",
}
PUBLIC = {"tiny-llada": "llada-8b", "tiny-dream": "dream-7b", "tiny-mmada": "mmada-8b"}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_config_has_the_keys_of_the_public_checkpoint(name, noisy_toy, conformance):
    config = json.loads((noisy_toy(name)[2] / "config.json").read_text())
    public = json.loads((conformance / "configs" / f"{PUBLIC[name]}.json").read_text())
    assert set(config) - {"torch_dtype"} <= set(public)  # MMaDA-8B's config has no element type
    assert (config["model_type"], config["architectures"]) == (public["model_type"], public["architectures"])
    fixed = ("hidden_act", "rope_scaling", "use_sliding_window", "block_type", "activation_type", "include_qkv_bias")
    assert {key: config.get(key) for key in fixed} == {key: public.get(key) for key in fixed}


def test_an_unfinished_run_is_not_exported(small, tmp_path):
    recipe = small("tiny-llada")
    with pytest.raises(sinklens.SinklensError, match=r"has no state.pt; train first"):
        export(recipe, tmp_path, tmp_path / "out")
    list(train(recipe, tmp_path, save_every=6))
    with pytest.raises(sinklens.SinklensError, match=r"at step 6 of 9; let `python -m training` finish it"):
        export(replace(recipe, cycles=(9,)), tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("tiny-dream", "Dream format, shifted prediction"),
        ("tiny-mmada", "Pictures are 4 × 4 cells of 8 colours"),
        ("no-start", "It differs from tiny-llada in cycles = (6,)"),
        ("no-start", "start_token = absent"),
        ("tiny-sdar", "A block-causal masked-diffusion (SDAR format)"),
        ("tiny-two-modes", "An autoregressive and block-diffusion (Nemotron-Labs-Diffusion format)"),
        ("tiny-llada-moe", "with 3.8 million parameters, of which a token uses 1.6 million"),
        ("tiny-canvas", "It differs from tiny-llada in objective = uniform"),
        ("tiny-mdlm", "(tokens drawn at random with seed 0, in 24 steps)"),
        ("tiny-mdlm", "tiny-mdlm and tiny-duo are twins"),
        ("tiny-duo", "uniform noise instead of a mask token; it reads the noise level"),
        ("tiny-duo", "in objective = duo"),
        ("tiny-canvas", "(tokens drawn at random with seed 0, accepted by their entropy, in at most 24 steps)"),
    ],
)
def test_the_card_describes_the_model(name, statement, small, tmp_path):
    recipe = small(name)
    list(train(recipe, tmp_path, save_every=6))
    card = write_card(
        recipe, tmp_path, tmp_path, [Score("word problems", proportion(1, 2), 0.25)], {6: {"right": 1, "total": 4}}
    )
    text = card.read_text()
    assert statement in text
    assert re.search(r"\| 6 \| \d+\.\d{4} \| 0\.250 \[0\.046, 0\.699\] of 4 \|", text)
    assert "| word problems | 0.500 [0.095, 0.905] of 2 | 0.25 |" in text
    assert (f"It started from the weights of {recipe.start_from}" in text) is (recipe.start_from is not None)


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_checkpoints_are_small_and_in_the_public_layout(name):
    from sinklens.model.files import find_checkpoint

    folder = find_checkpoint(name, None)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == MODEL_TYPES.get(RECIPES[name].family, RECIPES[name].family)
    assert (folder / "README.md").is_file()


@pytest.mark.parametrize(
    ("name", "kind"), [("tiny-text", "an estimate of the bound"), ("tiny-text-causal", "(exact; ")]
)
def test_the_card_of_a_model_of_text_has_its_loss(name, kind, tmp_path):
    records = [{"step": 400, "loss": 5.0, "seconds": 60.0}, {"step": 1200, "loss": 4.0, "seconds": 180.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    scores = {1200: {"nats": 4.27, "low": 4.2, "high": 4.3, "documents": 779, "windows": 2646}}
    text = write_text_card(RECIPES[name], tmp_path, tmp_path, scores).read_text()
    assert "9.8 million tokens" in " ".join(text.split())
    assert "Loss on 779 documents of five sources that it was not trained on: 4.270 [4.200, 4.300] nats" in text
    assert kind in text
    assert "| 1200 | 4.0000 | 4.270 [4.200, 4.300] |" in text
    assert "| 400 | 5.0000 |  |" in text
