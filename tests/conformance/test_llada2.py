"""LLaDA2: config, answers and edits of tokens, beside the stored runs (test_stored_runs.py)."""

import pytest
import torch
from stored.runs import stored_runs

from sinklens.families import family_named, translate
from sinklens.model.loading import build_empty

FOLDER = "llada2-moe"


@pytest.fixture(scope="module")
def model(reference):
    return reference.load(block_length=8)


def run_of(reference, number, **more):
    """The stored run `number`, with further settings."""
    return reference.repeat(next(run for run in stored_runs(reference) if run.number == number), **more)


@pytest.mark.parametrize("number", range(13))
def test_the_answer_equals_the_references(reference, number):
    run, result = run_of(reference, number, record_sinks=False), reference.tensors[f"gen{number}.result"]
    assert run.tokens[0, run.prompt_length :].tolist()[: result.shape[1]] == result[0].tolist()


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


def test_the_track_and_the_points_say_which_tokens_were_edited_in_which_step(reference):
    """Run 8 edits tokens while masks are left, and after."""
    shown = {"hook_commit": [], "hook_edit": []}

    def keep(value, hook):
        shown[hook.name.partition(".")[2]].append(value.clone())

    hooks = [(f"denoise.{name}", keep) for name in shown]
    run = run_of(reference, 8, hooks=hooks)
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


def test_edits_are_hidden_by_a_hook_and_a_replay_repeats_the_run(reference):
    """Without edits, every position keeps its first token, and each block ends as soon as no mask is left."""
    base = run_of(reference, 9, record_sinks=False)
    kept = run_of(reference, 9, record_sinks=False, hooks=[("denoise.hook_edit", lambda value, hook: value & False)])
    changed = (kept.canvas[:, 1:] != kept.canvas[:, :-1]) & ~kept.undecided[:, :-1]
    assert not changed.any()
    assert base.steps_run > kept.steps_run
    again = run_of(reference, 9, replay=base)
    assert torch.equal(again.canvas, base.canvas)
    assert again.sinks.edited.any()


def test_a_proposed_mask_token_does_not_keep_a_run_of_2_1_from_ending(reference):
    """The reference never ends."""

    def propose(value, hook):
        return torch.where(torch.arange(value.shape[1]) == 20, 315, value)

    run = run_of(reference, 8, record_sinks=False, hooks=[("denoise.hook_candidates", propose)])
    assert run.steps_run <= run.settings.steps
    assert run.tokens[0, 20] == 315
    assert not run.undecided[0, -1, 24:].any()  # later blocks are decided


def test_a_fused_weight_is_split_into_queries_keys_and_values(reference, model):
    from safetensors.torch import load_file

    fused = load_file(reference.path / "model.safetensors")["model.layers.1.attention.query_key_value.weight"]
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
