"""LLaDA-MoE, RND1 and Open-dCoder: configs, experts, fills and endings, beside the stored runs."""

import pytest
import torch
from building import plain_pass
from layouts import word_tokenizer
from stored.folders import largest_difference
from stored.runs import open_folder, stored_runs

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.families import family_named, translate
from sinklens.interventions import Suffix
from sinklens.model.loading import build_empty

TOLERANCE = 1e-4
NAMES = ("llada-moe", "rnd1", "open-dcoder")
WITH_EXPERTS = ["llada-moe", "rnd1"]
SAME_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
    "tie_word_embeddings", "max_position_embeddings", "hidden_act", "eos_token_id", "bos_token_id", "pad_token_id",
)  # fmt: skip


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def reference(conformance, name):
    return open_folder(conformance / name)


@pytest.fixture
def model(reference):
    return reference.load()


def test_the_config_is_translated_key_by_key(reference, model, name):
    raw, config = reference.config(), model.config
    assert {key: getattr(config, key) for key in SAME_KEYS if key in raw} == {
        key: raw[key] for key in SAME_KEYS if key in raw
    }
    assert config.rope_parameters["rope_theta"] == raw["rope_theta"]
    assert (model.family, model.mask_token_id) == (name, reference.facts["mask_token_id"])
    assert config.is_causal is False
    assert model.family_record.shift is (name != "llada-moe")
    if name in WITH_EXPERTS:
        assert config.moe_intermediate_size == raw.get("moe_intermediate_size", raw.get("expert_intermediate_size"))
        assert (config.num_experts, config.num_experts_per_tok) == (raw["num_experts"], raw["num_experts_per_tok"])
        assert config.norm_topk_prob is (name == "rnd1")
        assert config.head_dim == raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])


@pytest.mark.parametrize("name", ["open-dcoder"])
def test_path_planning_takes_decisions_back(reference):
    run = reference.repeat(next(run for run in stored_runs(reference) if run.number == 4))
    again = ~run.undecided[:, :-1] & run.undecided[:, 1:]
    assert int(again.sum()) == reference.runs[4]["written_tokens_masked_again"] == 135


SHORT = {"llada-moe": {"block_length": 4}, "rnd1": {"steps": 4}, "open-dcoder": {"alg": "p2", "steps": 4}}


def prompts_of(reference) -> list[list[int]]:
    mask = reference.facts["mask_token_id"]
    first, second = ([token for token in row if token != mask] for row in reference.tensors["input_ids"].tolist())
    return [first[:9], second[:4], second[5:12]]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_an_expert_is_ablated_in_every_step_of_a_run(reference, model, name):
    prompt, chosen, logits = prompts_of(reference)[:1], {}, {}
    base = sinklens.generate(model, prompt, gen_length=4, **SHORT[name])
    at = "blocks.1.mlp"

    def without_expert_3(weights, hook):
        return weights.masked_fill(chosen[hook.step] == 3, 0.0)

    hooks = [
        (f"{at}.hook_expert_indices", lambda value, hook: chosen.update({hook.step: value})),
        (f"{at}.hook_expert_weights", without_expert_3),
        ("denoise.hook_logits", lambda value, hook: logits.update({hook.step: value})),
    ]
    sinklens.generate(model, prompt, gen_length=4, hooks=hooks, replay=base, **SHORT[name])
    assert any((indices == 3).any() for indices in chosen.values())
    for step in range(base.steps_run):
        without = {f"{at}.hook_expert_weights": lambda value, step=step: value.masked_fill(chosen[step] == 3, 0.0)}
        with torch.no_grad():
            plain = plain_pass(model, base.canvas[:, step], base.real, without).logits
        if model.family_record.shift:
            plain = torch.cat([plain[:, :1], plain[:, :-1]], dim=1)
        assert largest_difference(logits[step], plain) < 1e-3


def test_open_dcoder_and_qwen2_are_told_apart_by_the_caller_alone(conformance, tmp_path):
    reference = open_folder(conformance / "open-dcoder")
    folder = reference.write(tmp_path)
    choices = r"family=, .* says: (?=.*'open-dcoder' \(bidirectional, predicts the next position\)).*'qwen2' \(causal\)"
    with pytest.raises(CheckpointError, match=choices):
        sinklens.load(folder)
    assert sinklens.load(folder, family="qwen2").config.is_causal is True
    ordinary = {"auto_map": None, "mask_token_id": None}
    assert sinklens.load(reference.write(tmp_path, **ordinary)).family == "qwen2"


@pytest.mark.parametrize("name", ["rnd1"])
@pytest.mark.parametrize("closing", ["pad", "eos", "none"])
def test_rnd1_ends_its_canvas_with_the_closing_token(reference, model, closing):
    run = sinklens.generate(model, prompts_of(reference)[:1], gen_length=4, closing=closing)
    assert run.tokens[0, 13:].tolist() == {"pad": [310], "eos": [312], "none": []}[closing]
    assert (run.unmask_step[0, 13:] == -1).all()


@pytest.mark.parametrize("name", ["rnd1"])
def test_rnd1_commits_at_least_one_token_and_everything_within_the_bound(reference, model):
    prompt = prompts_of(reference)[:1]
    one = sinklens.generate(model, prompt, gen_length=6, eb_gamma=0.0)
    assert (one.undecided.sum(dim=2)[0].diff() <= -1).all()
    everything = sinklens.generate(model, prompt, gen_length=6, eb_gamma=1e6)
    assert everything.steps_run == 1


def test_a_suffix_is_refused_where_the_answer_does_not_see_it(tiny_llama, tiny_llada):
    with pytest.raises(SettingError, match=r"does not see text after its answer, so it cannot fill a gap"):
        sinklens.generate(tiny_llama, "Question", gen_length=2, hooks=[Suffix(text="end")])
    with pytest.raises(SettingError, match=r"the suffix contains the mask token"):
        sinklens.generate(tiny_llada, "Question", gen_length=2, hooks=[Suffix(text=[tiny_llada.mask_token_id])])
    run = sinklens.generate(tiny_llada, "Question:", gen_length=8, hooks=[Suffix(text=" left?")])
    assert tiny_llada.tokenizer.decode(run.tokens[0, -3:]).endswith("left?")


def test_a_folder_with_a_tokenizer_loads_without_the_checkpoints_code(conformance, tmp_path):
    folder = open_folder(conformance / "llada-moe").write(tmp_path)
    word_tokenizer(folder)
    assert (folder / "tokenizer.json").is_file()
    run = sinklens.generate(sinklens.load(folder), "w7 w8", gen_length=4)
    assert isinstance(run.text, str)


FULL_SIZE = {
    "rnd1": {
        "model_type": "rnd1", "architectures": ["RND1LM"], "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "vocab_size": 151936, "mask_token_id": 151669,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, "rope_scaling": False, "sliding_window": False,
    },
    "open-dcoder": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu",
        "use_sliding_window": False,
    },
}  # fmt: skip
PARAMETERS = {"rnd1": 30_532_122_624, "open-dcoder": 494_032_768}


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_full_size_config_builds_with_the_published_size(name):
    """As many as the models they were made from: Qwen3-30B-A3B and Qwen2.5-Coder-0.5B."""
    empty = build_empty(translate(FULL_SIZE[name], family_named(name), "here"))
    assert sum(parameter.numel() for parameter in empty.parameters()) == PARAMETERS[name]
