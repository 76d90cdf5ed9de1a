"""GPT-2: the points of learned positions, norms with biases and one projection for queries, keys and values."""

import pytest
import torch
from stored.folders import largest_difference
from transformers import GPT2Config, GPT2LMHeadModel

import sinklens
from sinklens.errors import CheckpointError, PromptError, SettingError
from sinklens.experiments import path_patching_effects
from sinklens.families import family_named, translate
from sinklens.hooks.rotary import rotations
from sinklens.model.loading import build_empty

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 40, "vocab_size": 67}


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    made = GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3, bos_token_id=0, eos_token_id=66)).eval()
    for name, value in made.named_parameters():
        if name.endswith("bias") or "ln_" in name:
            torch.nn.init.normal_(value, std=0.5)
    return made


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    reference.save_pretrained(folder)
    return sinklens.load(folder)


@pytest.fixture
def ids():
    return torch.randint(1, 66, (2, 9), generator=torch.Generator().manual_seed(1))


def test_logits_and_patterns_equal_transformers(reference, model, ids):
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        expected = reference(ids, output_attentions=True, output_hidden_states=True)
    logits, points = model.run_with_cache(ids)
    assert largest_difference(logits, expected.logits) < 1e-4
    for layer in range(SIZES["n_layer"]):
        assert largest_difference(points[f"blocks.{layer}.attn.hook_pattern"], expected.attentions[layer]) < 1e-5
        assert largest_difference(points[f"blocks.{layer}.hook_resid_pre"], expected.hidden_states[layer]) < 1e-4


def test_the_stream_begins_with_tokens_and_positions(model, ids):
    _, points = model.run_with_cache(ids)
    assert largest_difference(points["hook_pos_embed"], model.W_pos[: ids.shape[1]].expand(2, -1, -1)) == 0
    assert largest_difference(points["blocks.0.hook_resid_pre"], points["hook_embed"] + points["hook_pos_embed"]) == 0
    assert model.tree.resolve("pos_embed.hook_out") == "hook_pos_embed"


def test_padding_on_the_left_does_not_move_the_positions(model, ids):
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    real = torch.ones_like(padded)
    real[:, :3] = 0
    assert largest_difference(model(padded, attention_mask=real)[:, 3:], model(ids)) < 1e-4


def test_weights_multiply_from_the_right_as_in_transformer_lens(reference, model, ids):
    _, points = model.run_with_cache(ids)
    for layer in range(SIZES["n_layer"]):
        block, read = model.blocks[layer], points[f"blocks.{layer}.ln1.hook_normalized"]
        x = read * block.ln1.w + block.ln1.b
        for letter in "QKV":
            made = torch.einsum("bpd,hde->bphe", x, getattr(model, f"W_{letter}")[layer])
            made = made + getattr(model, f"b_{letter}")[layer]
            assert largest_difference(points[f"blocks.{layer}.attn.hook_{letter.lower()}"], made) < 1e-4
        heads = points[f"blocks.{layer}.attn.hook_result"].sum(dim=2) + model.b_O[layer]
        assert largest_difference(heads, points[f"blocks.{layer}.hook_attn_out"]) < 1e-4
        x = points[f"blocks.{layer}.ln2.hook_normalized"] * block.ln2.w + block.ln2.b
        assert (
            largest_difference(points[f"blocks.{layer}.mlp.hook_pre"], x @ model.W_in[layer] + model.b_in[layer]) < 1e-4
        )
        out = points[f"blocks.{layer}.mlp.hook_post"] @ model.W_out[layer] + model.b_out[layer]
        assert largest_difference(points[f"blocks.{layer}.hook_mlp_out"], out) < 1e-4


def test_releasing_the_model_restores_the_projection(reference, tmp_path, ids):
    reference.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    before = again(ids).logits
    names = list(again.state_dict())
    model = sinklens.load(again)
    assert list(again.state_dict()) == names
    model.release()
    assert type(again.transformer.h[0].attn.c_attn).__name__ == "Conv1D"
    assert not list(again.transformer.h[0].attn.c_attn.children())
    assert torch.equal(again(ids).logits, before)


def test_a_run_with_a_cache_equals_one_without(model):
    plain, full = (sinklens.generate(model, [[1, 2, 3]], gen_length=6, use_cache=cached) for cached in (True, False))
    assert torch.equal(plain.canvas, full.canvas)


def test_a_direct_path_is_what_the_changed_stream_gives(model, ids):
    """The effect of one path on the logits, by a forward pass written out."""
    clean, corrupted = ids[:1], ids[1:]
    found = path_patching_effects(
        model, clean, corrupted, lambda logits: logits[0, -1, 5], senders=["L0H1"], receivers=["logits"]
    )
    _, kept = model.run_with_cache(clean)
    _, base = model.run_with_cache(corrupted)
    change = kept["blocks.0.attn.hook_result"][:, :, 1] - base["blocks.0.attn.hook_result"][:, :, 1]
    logits = model.tree.head(model.ln_final(base[f"blocks.{SIZES['n_layer'] - 1}.hook_resid_post"] + change))
    moved = float(logits[0, -1, 5]) - float(model(corrupted)[0, -1, 5])
    assert float(found["effect"].squeeze()) == pytest.approx(moved, abs=1e-3)


CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}


def test_the_public_size_is_that_of_gpt2_small():
    empty = build_empty(translate(CONFIG, family_named("gpt2"), "gpt2"))
    assert sum(value.numel() for value in empty.parameters()) == 124_439_808


@pytest.mark.parametrize(("call", "error", "text"), [
    (
        lambda model: model(torch.full((1, model.cfg.n_ctx + 1), 3), allow_longer=True),
        PromptError,
        "no embedding for further positions",
    ),
    (
        lambda model: rotations(model.tree, torch.arange(2)),
        SettingError,
        "a gpt2 model does not rotate queries and keys",
    ),
    (
        lambda model: translate({**CONFIG, "add_cross_attention": True}, family_named("gpt2"), "gpt2"),
        CheckpointError,
        "has add_cross_attention = True; the gpt2 family can express only False",
    ),
])  # fmt: skip
def test_what_the_architecture_does_not_have_is_refused(model, call, error, text):
    with pytest.raises(error, match=text):
        call(model)
