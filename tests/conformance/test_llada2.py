"""LLaDA2: sinklens reproduces the reference's passes and routing, and the runs of 2.0 that do not stop early."""

import pytest
import torch
from published import assert_same_canvases, assert_same_pass, largest_difference

import sinklens
from sinklens.checkpoints import build_empty, family_named, translate

FOLDER = "llada2-moe"
TOLERANCE = 1e-4
COMPARED = [0, 1, 2, 3, 4, 6, 7]
"""Runs of sampler 2.0; run 5 stops early, and the others are runs of 2.1, which edits committed tokens."""


@pytest.fixture(scope="module")
def model(load):
    """With the block length of the reference's single pass."""
    return load((), (("block_length", 8),))


def test_the_runs_that_are_not_compared_need_another_sampler(reference):
    left = [stored for number, stored in enumerate(reference.runs) if number not in COMPARED]
    assert {stored["sampler"] for stored in left[1:]} == {"llada2.1"}
    assert left[0]["covers"].startswith("eos_early_stop inside a block")


def test_the_config_is_translated_key_by_key(reference, model):
    raw, config = reference.config(), model.config
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "first_k_dense_replace", "n_group",
            "topk_group", "routed_scaling_factor", "rms_norm_eps", "max_position_embeddings", "pad_token_id",
            "tie_word_embeddings", "hidden_act")  # fmt: skip
    assert {key: getattr(config, key) for key in same} == {key: raw[key] for key in same}
    assert (config.n_routed_experts, config.n_shared_experts) == (raw["num_experts"], raw["num_shared_experts"])
    assert config.rope_parameters["partial_rotary_factor"] == raw["partial_rotary_factor"] == 0.5
    assert config.rope_parameters["rope_theta"] == raw["rope_theta"]
    assert (config.use_qk_norm, config.norm_topk_prob, config.attention_bias) == (True, True, False)
    assert (model.family, model.block_length, model.mask_token_id) == ("llada2", 8, 315)


def test_logits_patterns_and_sink_scores_equal_the_references(reference, model):
    assert_same_pass(model, reference, TOLERANCE)


def test_the_routing_equals_the_references(reference, model):
    with torch.no_grad():
        _, kept = model.run_with_cache(reference.tensors["input_ids"], names_filter=lambda name: ".mlp." in name)
    assert [parts.experts for parts in model.tree.parts] == [False, True, True]
    assert all(parts.shared for parts in model.tree.parts[1:])
    for layer in (1, 2):
        stored = {what: reference.tensors[f"router.{layer}.{what}"] for what in ("logits", "weights", "experts")}
        found, order = kept[f"blocks.{layer}.mlp.hook_expert_indices"].sort(dim=-1)  # the reference's are ascending
        assert torch.equal(found, stored["experts"].long())
        assert largest_difference(kept[f"blocks.{layer}.mlp.hook_router_logits"], stored["logits"]) < TOLERANCE
        weights = kept[f"blocks.{layer}.mlp.hook_expert_weights"].gather(-1, order)
        assert largest_difference(weights, stored["weights"]) < TOLERANCE


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("number", COMPARED)
def test_canvases_of_sampler_2_0_equal_the_references_token_for_token(reference, load, number, recording):
    stored, tensors = reference.runs[number], reference.tensors
    ends = stored["eos_id"] >= 0
    model = load((("eos_token_id", stored["eos_id"] if ends else None),), (("block_length", stored["block_length"]),))
    steps = min(stored["steps"], stored["gen_length"] // stored["minimal_topk"])
    run = sinklens.generate(
        model, tensors[f"gen{number}.prompt"], gen_length=stored["gen_length"], stop=ends, record_sinks=recording,
        denoising_steps=min(steps, stored["block_length"]), threshold=stored["threshold"],
        remasking_strategy="low_confidence_dynamic",
    )  # fmt: skip
    final = tensors[f"gen{number}.final"]
    there = final >= 0
    assert torch.equal(run.tokens[:, : final.shape[1]][there], final[there])
    assert_same_canvases(run, tensors[f"gen{number}.canvas"], run.tokens)


def test_a_fused_weight_is_split_into_queries_keys_and_values(reference, model):
    from safetensors.torch import load_file

    fused = load_file(reference.folder / "model.safetensors")["model.layers.1.attention.query_key_value.weight"]
    attn = model.tree.hf.model.layers[1].self_attn
    q, k, v = fused.split([64, 32, 32])
    assert torch.equal(attn.q_proj.weight, q)
    assert torch.equal(attn.k_proj.weight, k)
    assert torch.equal(attn.v_proj.weight, v)


PARAMETERS = {"mini": 16_255_638_528, "flash": 102_889_697_280}


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_full_size_config_builds_with_the_published_size(size):
    mini = size == "mini"
    raw = {
        "model_type": "llada2_moe", "num_hidden_layers": 20 if mini else 32, "hidden_size": 2048 if mini else 4096,
        "num_attention_heads": 16 if mini else 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 5120 if mini else 9216, "first_k_dense_replace": 1,
        "moe_intermediate_size": 512 if mini else 1024, "num_experts": 256, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "rope_theta": 600000,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "use_bias": False, "use_qkv_bias": False,
        "vocab_size": 157184, "max_position_embeddings": 16384, "pad_token_id": 156892, "tie_word_embeddings": False,
    }  # fmt: skip
    empty = build_empty(translate(raw, family_named("llada2"), "here"))
    assert sum(parameter.numel() for parameter in empty.parameters()) == PARAMETERS[size]  # the router's bias aside
