"""Training: it resumes exactly, its objectives are the published ones, and the exported files load."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import sinklens
from sinklens.zoo import RECIPES, train, training
from sinklens.zoo.export import export
from sinklens.zoo.tokenizer import train_tokenizer

SMALL = {
    "cycles": (6,),
    "batch": 8,
    "problems": 400,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 2,
    "d_mlp": 48,
    "warmup": 2,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def weights(folder):
    return torch.load(folder / "state.pt", weights_only=True)["model"]


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(name, tmp_path):
    recipe = replace(RECIPES[name], **SMALL)
    list(train(recipe, tmp_path / "whole", save_every=2))
    run = tmp_path / "killed"
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from dataclasses import replace\nfrom pathlib import Path\nfrom sinklens.zoo import RECIPES, train\n"
        f"recipe = replace(RECIPES[{name!r}], **{SMALL!r})\n"
        "import sinklens.zoo.training as training\nimport time\n"
        "corrupt = training.learning_rate\n"
        "training.learning_rate = lambda recipe, step: (time.sleep(60) if step == 4 else 0, corrupt(recipe, step))[1]\n"
        f"list(train(recipe, Path({str(run)!r}), save_every=2))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 120
        while not (run / "state.pt").exists() or torch.load(run / "state.pt", weights_only=True)["step"] < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert torch.load(run / "state.pt", weights_only=True)["step"] == 4
    list(train(recipe, run, save_every=2))
    for key, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(run)[key], value, atol=1e-5, rtol=1e-4)


def test_a_folder_of_another_recipe_is_refused(tmp_path):
    recipe = replace(RECIPES["tiny-llada"], **SMALL)
    list(train(recipe, tmp_path, save_every=6))
    with pytest.raises(ValueError, match="belongs to another recipe; give this run a folder of its own"):
        list(train(replace(recipe, seed=2), tmp_path))


def test_masking_spares_prompt_and_start_token_and_follows_t(tokenizer):
    ids = torch.full((800, 60), 9)
    generator = torch.Generator().manual_seed(0)
    noisy, masked, t = training.corrupt(ids, 36, 1, generator)
    assert torch.equal(noisy == 1, masked)
    ordinary = torch.arange(800) % 8 != 0
    assert not masked[ordinary, :36].any()
    assert not masked[:, 0].any()
    assert masked[~ordinary, 1:36].any()
    share = masked[:, 36:].float().mean(dim=1, keepdim=True)
    assert (share - t).abs().mean() < 0.08
    assert float(t.min()) > 0


def test_the_masked_loss_is_cross_entropy_over_t_summed_over_masked_tokens(tokenizer):
    recipe = replace(RECIPES["tiny-llada"], **SMALL)
    model = training.build_model(recipe, tokenizer)
    ids = torch.randint(3, 600, (8, 40))
    loss = training._masked_loss(model, recipe, ids, 16, tokenizer.mask_token_id, step=3)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + 3 + 500_000_003)
    noisy, masked, t = training.corrupt(ids, 16, tokenizer.mask_token_id, generator)
    logits = model(input_ids=noisy).logits
    expected = 0.0
    for row in range(8):
        for place in range(40):
            if masked[row, place]:
                weight = (recipe.prompt_weight if row == 0 else 1.0) / t[row].item()
                expected += weight * F.cross_entropy(logits[row, place], ids[row, place]).item()
    assert loss.item() == pytest.approx(expected / (8 * training.ANSWER_LENGTH), rel=1e-4)


def test_the_twins_share_all_but_the_objective():
    diffusion, causal = RECIPES["tiny-llada"], RECIPES["tiny-llama"]
    assert replace(diffusion, name="", objective="causal") == replace(causal, name="")


def test_the_learning_rate_restarts_at_half_its_peak():
    recipe = replace(RECIPES["tiny-llada"], cycles=(100, 50), warmup=10)
    rates = [training.learning_rate(recipe, step) for step in range(150)]
    assert rates[9] == recipe.learning_rate == max(rates)
    assert rates[99] == pytest.approx(recipe.learning_rate * 0.01, rel=0.1)
    assert rates[109] == pytest.approx(recipe.learning_rate / 2)
    assert rates[55] == pytest.approx(recipe.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 0.5))))


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_an_exported_run_loads_and_computes_what_the_trained_model_does(name, tmp_path, tokenizer):
    recipe = replace(RECIPES[name], **SMALL)
    list(train(recipe, tmp_path, save_every=6))
    model = sinklens.load(export(recipe, tmp_path, tmp_path / "out"))
    trained = training.build_model(recipe, tokenizer)
    trained.load_state_dict({key: value.bfloat16().float() for key, value in weights(tmp_path).items()})
    ids = torch.randint(3, 600, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), trained(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert model.family == ("llada" if name == "tiny-llada" else "llama")


def test_an_unfinished_run_is_not_exported(tmp_path):
    recipe = replace(RECIPES["tiny-llada"], **SMALL)
    with pytest.raises(sinklens.SinklensError, match=r"has no state.pt; train first"):
        export(recipe, tmp_path, tmp_path / "out")
    list(train(recipe, tmp_path, save_every=6))
    with pytest.raises(sinklens.SinklensError, match=r"at step 6 of 9; let `sinklens train` finish it"):
        export(replace(recipe, cycles=(9,)), tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_shipped_checkpoints_are_small_and_in_the_public_layout(name):
    from sinklens.checkpoints.files import find

    folder = find(name, None)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == ("llada" if name == "tiny-llada" else "llama")
    assert (folder / "README.md").is_file()
