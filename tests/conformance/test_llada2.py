"""LLaDA2: sinklens reproduces the reference's passes and routing, and every run of the samplers of 2.0 and 2.1."""

import pytest
import torch
from published import assert_same_canvases, assert_same_pass, largest_difference

import sinklens
from sinklens.families import family_named, translate
from sinklens.model.loading import build_empty

FOLDER = "llada2-moe"
TOLERANCE = 1e-4
VERSION_0 = range(8)
VERSION_1 = range(8, 13)
"""The runs of each sampler."""


@pytest.fixture(scope="module")
def model(load):
    """With the block length of the reference's single pass."""
    return load((), (("block_length", 8),))


def test_every_run_of_the_reference_is_compared(reference):
    samplers = [stored["sampler"] for stored in reference.runs]
    assert samplers == ["llada2.0"] * len(VERSION_0) + ["llada2.1"] * len(VERSION_1)


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


def run_of(reference, load, number, **settings):
    """The stored run `number`, with further settings."""
    stored = reference.runs[number]
    ends = stored["eos_id"] >= 0
    model = load((("eos_token_id", stored["eos_id"] if ends else None),), (("block_length", stored["block_length"]),))
    given = {"gen_length": stored["gen_length"], "threshold": stored["threshold"]}
    if number in VERSION_1:
        given |= {name: stored[name] for name in ("editing_threshold", "max_post_steps", "num_to_transfer")}
        given |= {"sampler": "llada2.1", "stop": stored["eos_early_stop"]}
    else:
        given |= {"denoising_steps": stored["steps"], "minimal_topk": stored["minimal_topk"]}
        given |= {"eos_early_stop": stored["eos_early_stop"], "stop": ends}
    return sinklens.generate(model, reference.tensors[f"gen{number}.prompt"], **given | settings)


@pytest.mark.parametrize(("recording", "cached"), [(True, False), (False, True)])
@pytest.mark.parametrize("number", [*VERSION_0, *VERSION_1])
def test_every_canvas_equals_the_references_token_for_token(reference, load, number, recording, cached):
    run = run_of(reference, load, number, record_sinks=recording, use_cache=cached)
    tensors = reference.tensors
    final, result = tensors[f"gen{number}.final"], tensors[f"gen{number}.result"]
    there = final >= 0
    assert torch.equal(run.tokens[:, : final.shape[1]][there], final[there])
    assert_same_canvases(run, tensors[f"gen{number}.canvas"], run.tokens)
    answer = run.tokens[0, run.prompt_length :].tolist()[: result.shape[1]]
    assert answer == result[0].tolist()


def test_the_track_and_the_points_say_which_tokens_were_edited_in_which_step(reference, load):
    """Run 8 edits tokens while masks are left, and after."""
    shown = {"hook_commit": [], "hook_edit": []}

    def keep(value, hook):
        shown[hook.name.partition(".")[2]].append(value.clone())

    hooks = [(f"denoise.{name}", keep) for name in shown]
    run = run_of(reference, load, 8, hooks=hooks)
    canvas, mask = reference.tensors["gen8.canvas"], reference.facts["mask_token_id"]
    edits, commits = torch.stack(shown["hook_edit"], 1), torch.stack(shown["hook_commit"], 1)
    for step in range(run.steps_run - 1):
        before, after = canvas[0, step], canvas[0, step + 1]
        there = (before >= 0) & (after >= 0)
        expected = there & (before != mask) & (before != after)
        assert torch.equal(edits[0, step, : len(there)][there], expected[there])
        assert torch.equal(commits[0, step, : len(there)][there], (there & (before == mask) & (after != mask))[there])
        assert torch.equal(torch.from_numpy(run.sinks.edited.to_numpy())[0, step + 1][there], expected[there])
    assert int(edits.sum()) == reference.runs[8]["committed_tokens_changed_later"]
    assert run.sinks.edited.isel(step=0).sum() == 0
    assert not run.sinks.renoised.any()


def test_edits_are_hidden_by_a_hook_and_a_replay_repeats_the_run(reference, load):
    """Without edits, every position keeps its first token, and each block ends as soon as no mask is left."""
    base = run_of(reference, load, 9, record_sinks=False)
    kept = run_of(
        reference, load, 9, record_sinks=False, hooks=[("denoise.hook_edit", lambda value, hook: value & False)]
    )
    changed = (kept.canvas[:, 1:] != kept.canvas[:, :-1]) & ~kept.undecided[:, :-1]
    assert not changed.any()
    assert base.steps_run > kept.steps_run
    again = run_of(reference, load, 9, replay=base)
    assert torch.equal(again.canvas, base.canvas)
    assert again.sinks.edited.any()


def test_a_proposed_mask_token_does_not_keep_a_run_of_2_1_from_ending(reference, load):
    """The reference never ends."""

    def propose(value, hook):
        return torch.where(torch.arange(value.shape[1]) == 20, 315, value)

    run = run_of(reference, load, 8, record_sinks=False, hooks=[("denoise.hook_candidates", propose)])
    assert run.steps_run <= run.settings.steps
    assert run.tokens[0, 20] == 315
    assert not run.undecided[0, -1, 24:].any()  # later blocks are decided


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
