"""SDAR: config, masks and block lengths, beside the stored runs (test_stored_runs.py)."""

import json

import pytest
import torch
from building import block_causal

import sinklens
from sinklens.errors import CheckpointError, SettingError

FOLDER = "sdar"


@pytest.fixture(scope="module")
def model(reference):
    """With the block length of the reference's single pass."""
    return reference.load(block_length=4)


def test_the_config_is_translated_key_by_key(reference, model):
    raw, config = reference.config(), model.config
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "hidden_act",
            "attention_bias", "sliding_window", "use_sliding_window", "bos_token_id", "eos_token_id")  # fmt: skip
    assert {key: getattr(config, key) for key in kept} == {key: raw[key] for key in kept}
    assert config.rope_parameters["rope_theta"] == raw["rope_theta"]
    assert config.model_type == "qwen3"
    assert config._attn_implementation == "sinklens"  # not the config's flex_attention
    assert (model.family, model.block_length, model.mask_token_id) == ("sdar", 4, 309)
    assert config.is_causal is False


def test_a_query_gives_nothing_to_later_blocks_and_edits_of_the_mask_reach_it(reference, model):
    ids = reference.tensors["input_ids"][:, :10]
    seen = block_causal(torch.ones_like(ids, dtype=torch.bool), 4)

    def hide(value, hook):
        hidden = value.clone()
        hidden[..., 5] = -torch.inf
        return hidden

    with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_mask", hide)]):
        _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith(("pattern", "sink_scores")))
    for layer in range(3):
        pattern = cache["pattern", layer]
        visible = seen.expand_as(pattern).clone()
        if layer == 1:
            visible[..., 5] = False
        assert (pattern[~visible] == 0).all()
        assert (pattern[visible] > 0).all()
        torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_sink_scores"], pattern.sum(2))


def test_only_masked_positions_are_written(reference):
    """generate.py overwrites prompt tokens if fewer masks than the share are left; see NOTES, gen 8 of sdar-heldout."""
    model, prompt = reference.load(block_length=8), reference.tensors["gen1.prompt"]
    run = sinklens.generate(
        model, prompt[:, :7], gen_length=9, denoising_steps=2, remasking_strategy="low_confidence_static"
    )
    assert torch.equal(run.tokens[:, :7], prompt[:, :7])
    assert run.unmask_step[0, 7] == 0


def test_a_proposed_mask_token_stays_masked_and_the_run_goes_on(reference, model):
    """generate.py raises IndexError there."""

    def propose(value, hook):
        value = value.clone()
        value[:, 13] = 309
        return value

    run = sinklens.generate(
        model, reference.tensors["gen0.prompt"], gen_length=14, stop=False, hooks=[("denoise.hook_candidates", propose)]
    )
    assert (run.tokens[0, 10:] == 309).nonzero()[:, 0].tolist() == [3]
    assert run.answers[0].masks == 1


def test_a_block_length_is_asked_for_and_checked(reference, tmp_path):
    folder = reference.write(tmp_path / "silent")
    with pytest.raises(CheckpointError, match=r"does not give the block length .* sinklens.load\(..., block_len"):
        sinklens.load(folder)
    with pytest.raises(SettingError, match="block_length must be an integer of at least 1 or None; got 0"):
        sinklens.load(folder, block_length=0)
    stated = reference.write(tmp_path / "stated", block_size=8)
    assert sinklens.load(stated).block_length == 8
    assert sinklens.load(stated, block_length=4).block_length == 4
    with pytest.raises(SettingError, match=r"block_length is 8, but this sdar model was loaded with blocks of 4"):
        sinklens.generate(reference.load(block_length=4), reference.tensors["gen0.prompt"], block_length=8)


def test_models_of_other_attention_have_no_block_length():
    with pytest.raises(CheckpointError, match="the llada family has bidirectional attention, which has no blocks"):
        sinklens.load("tiny-llada", block_length=4)


def test_the_block_length_is_part_of_the_fingerprint(reference):
    four, eight = (reference.load(block_length=length) for length in (4, 8))
    assert four.fingerprint != eight.fingerprint


def test_the_full_size_config_builds_with_the_published_sizes():
    """The 8B of the repository: 8.19 billion parameters, as Qwen3-8B."""
    from sinklens.families import family_named, translate
    from sinklens.model.loading import build_empty

    raw = {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rope_scaling": None, "attn_implementation": "flex_attention",
    }  # fmt: skip
    empty = build_empty(translate(raw, family_named("sdar"), "SDAR-8B-Chat"))
    assert sum(parameter.numel() for parameter in empty.parameters()) == 8_190_735_360
    assert json.dumps(raw)
