"""Training: it resumes exactly, its objectives are the published ones, and it starts from the recipe's weights."""

import hashlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sinklens.errors import CheckpointError, SettingError
from sinklens.model.files import find_checkpoint
from training import RECIPES, loop, train
from training.corpus import ANSWER_LENGTH, build_corpus
from training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def weights(folder):
    return torch.load(folder / "state.pt", weights_only=True)["model"]


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada-moe", "tiny-canvas", "tiny-duo", "tiny-two-modes"])
def test_an_interrupted_run_resumes_after_its_last_state(name, small, tmp_path, monkeypatch):
    recipe = small(name)
    list(train(recipe, tmp_path / "complete", save_every=2))
    plain = loop.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", lambda recipe, step: 1 / (5 - step) and plain(recipe, step))
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            list(train(recipe, tmp_path / "stopped", save_every=2))
    assert torch.load(tmp_path / "stopped" / "state.pt", weights_only=True)["step"] == 4
    list(train(recipe, tmp_path / "stopped", save_every=2))
    for key, value in weights(tmp_path / "complete").items():
        assert torch.equal(weights(tmp_path / "stopped")[key], value)


def test_a_finished_run_can_be_resumed_with_another_cycle_of_mixed_rows(small, tmp_path):
    plain = replace(small("tiny-llada"), cycles=(4, 2))
    mixed = replace(plain, cycles=(4, 2, 4), peaks=(1.0, 0.5, 0.5), code=200, skills=60, problems_first=2)
    list(train(mixed, tmp_path / "complete", save_every=2, keep_every=2))
    list(train(plain, tmp_path / "further", save_every=2, keep_every=2))
    list(train(mixed, tmp_path / "further", save_every=2, keep_every=2))
    for key, value in weights(tmp_path / "complete").items():
        assert torch.equal(weights(tmp_path / "further")[key], value)
    list(train(replace(mixed, code=0, skills=0), tmp_path / "unmixed", save_every=2, keep_every=2))
    kept = [[torch.load(tmp_path / run / f"weights-{n}.pt") for n in (6, 8)] for run in ("complete", "unmixed")]
    assert [all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(*kept, strict=True)] == [True, False]


@pytest.fixture(scope="module")
def finished(small, tmp_path_factory):
    """A recipe, and its finished run."""
    recipe, run = replace(small("tiny-llada"), cycles=(4, 2)), tmp_path_factory.mktemp("finished")
    list(train(recipe, run, save_every=6))
    return recipe, run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, r"state.pt belongs to another recipe: .* step 6 it has seed 1, not 2\. Give this run another"),
        ({"cycles": (3,)}, r"it has cycles \(4, 2\), not \(3,\)"),
        ({"cycles": (4, 4)}, r"it has cycles \(4, 2\), not \(4, 4\)"),
        ({"cycles": (4, 2, 4), "peaks": (1.0, 1.0, 0.5)}, "it has peaks"),
        ({"cycles": (4, 2, 4), "code": 90}, "it has code 0, not 90"),
    ],
)
def test_a_run_resumes_only_if_its_steps_are_the_same_under_the_recipe(change, message, finished, monkeypatch):
    recipe, run = finished
    monkeypatch.setattr(loop, "build_corpus", lambda *_: pytest.fail("the rows were made"))
    with pytest.raises(SettingError, match=message):
        next(train(replace(recipe, **change), run))


def test_a_state_older_than_a_setting_has_its_default_and_a_truncated_one_is_rejected(finished, tmp_path):
    recipe, run = finished
    state = torch.load(run / "state.pt", weights_only=True)
    for newer in ("start_from", "start_token", "pictures"):
        del state["recipe"][newer]
    file = tmp_path / "state.pt"
    torch.save(state, file)
    assert list(train(recipe, tmp_path)) == []
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"state.pt is truncated or corrupt .*without state.pt a run starts"):
        next(train(recipe, tmp_path))


@pytest.mark.parametrize(
    ("name", "losses"),
    [("tiny-llada", (5.93079, 5.35433, 5.23274)), ("tiny-llama", (6.78158, 6.75802, 6.63838))],
)
def test_the_shipped_recipes_are_reproducible(name, losses):
    """Losses recorded when the shipped checkpoints were trained, with fewer problems and smaller batches."""
    recipe = replace(RECIPES[name].until(3), problems=2000, batch=16)
    tokenizer = loop.make_tokenizer(recipe)
    corpus = build_corpus(tokenizer, recipe)
    length, ids = corpus.batch(recipe.seed, 0, recipe.batch)
    assert (length, hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]) == (27, "ceef0bd85d1a3b8a")
    model = loop.build_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    seen = [loop._update(recipe, corpus, model, optimizer, tokenizer.mask_token_id, step) for step in range(3)]
    assert seen == pytest.approx(losses, rel=2e-3)


def test_masking_follows_t_and_spares_the_prompt_and_the_start_token():
    noisy, masked, t = loop.corrupt(torch.full((800, 60), 9), 36, 1, torch.Generator().manual_seed(0))
    assert torch.equal(noisy == 1, masked)
    ordinary = torch.arange(800) % 8 != 0
    assert not masked[ordinary, :36].any()
    assert not masked[:, 0].any()
    assert masked[~ordinary, 1:36].any()
    assert (masked[:, 36:].float().mean(dim=1, keepdim=True) - t).abs().mean() < 0.08
    assert float(t.min()) > 0


@pytest.mark.parametrize(("start_token", "ever"), [("kept", False), ("maskable", True), ("absent", True)])
def test_the_recipe_decides_whether_the_first_token_is_ever_masked(start_token, ever, small, tokenizer, monkeypatch):
    recipe = replace(small("tiny-llada"), start_token=start_token)
    model = loop.build_model(recipe, tokenizer)
    seen = []
    monkeypatch.setattr(model, "forward", lambda input_ids, use_cache: seen.append(input_ids) or _Uniform(input_ids))
    for step in range(30):
        loop._masked_loss(model, recipe, torch.full((8, 40), 9), 16, tokenizer.mask_token_id, step)
    assert bool((torch.cat(seen)[:, 0] == tokenizer.mask_token_id).any()) is ever


class _Uniform:
    """A model's output with uniform logits."""

    def __init__(self, ids):
        self.logits = torch.zeros(*ids.shape, 643)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_the_masked_loss_is_cross_entropy_over_t_summed_over_masked_tokens(name, small, tokenizer):
    recipe = replace(small(name), start_from=None)
    model = loop.build_model(recipe, tokenizer)
    ids = torch.randint(3, 600, (8, 40))
    loss = loop._masked_loss(model, recipe, ids, 16, tokenizer.mask_token_id, step=3)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + 3 + 500_000_003)
    noisy, masked, t = loop.corrupt(ids, 16, tokenizer.mask_token_id, generator)
    logits = model(input_ids=noisy).logits
    before = 1 if name == "tiny-dream" else 0
    expected = 0.0
    for row in range(8):
        for place in range(40):
            if masked[row, place]:
                weight = (recipe.prompt_weight if row == 0 else 1.0) / t[row].item()
                expected += weight * F.cross_entropy(logits[row, place - before], ids[row, place]).item()
    assert loss.item() == pytest.approx(expected / (8 * ANSWER_LENGTH), rel=1e-4)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-sdar", "tiny-canvas", "tiny-mdlm", "tiny-duo", "tiny-two-modes"])
def test_training_reaches_every_weight_that_a_pass_without_pictures_uses(name, noisy_toy):
    recipe, model, _ = noisy_toy(name)
    ids = torch.randint(3, 600, (8, 45), generator=torch.Generator().manual_seed(1))
    for step in range(6):  # some of them read a softmax of their own first pass
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loop.LOSSES[recipe.objective]
            loss(model, recipe, ids, 21, loop.make_tokenizer(recipe).mask_token_id, step).backward()
    idle = {key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()}
    model.zero_grad(set_to_none=True)
    vision = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
    assert {key for key in idle if not key.startswith(vision)} == set()


def test_tiny_dream_starts_as_tiny_llama_with_zero_biases(tokenizer, tiny_llama):
    model = loop.build_model(RECIPES["tiny-dream"], tokenizer)
    biases = {name for name, value in model.state_dict().items() if name.endswith(".bias")}
    assert len(biases) == 3 * RECIPES["tiny-dream"].n_layers
    assert not any(model.state_dict()[name].any() for name in biases)
    model.config.is_causal = True
    for layer in model.model.layers:
        layer.self_attn.is_causal = True
    ids = torch.randint(3, 600, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, tiny_llama(ids), atol=1e-4, rtol=1e-4)


def test_tiny_mmada_starts_as_tiny_llada_with_new_tokens_added():
    recipe = replace(RECIPES["tiny-mmada"], problems=400, pictures=200, batch=16)
    tokenizer = loop.make_tokenizer(recipe)
    model = loop.build_model(recipe, tokenizer)
    stored = load_file(find_checkpoint("tiny-llada", None) / "model.safetensors")["model.transformer.wte.weight"]
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding[: len(stored)], stored.float())
    assert len(embedding) == len(tokenizer) > len(stored)
    assert 0.01 < embedding[len(stored) :].std() < 0.03
    corpus = build_corpus(tokenizer, recipe)
    losses = {"problem": [], "draw": []}
    for (kind, length), rows in corpus.groups.items():
        if kind in losses and len(rows) >= 16:
            with torch.no_grad():
                loss = loop._masked_loss(model, recipe, rows[:16].long(), length, tokenizer.mask_token_id, 0)
            losses[kind].append(loss.item())
    assert max(losses["problem"]) < 0.5  # a uniform guess costs log(670) = 6.5
    assert min(losses["draw"]) > 3
