"""LLaDA-MoE, RND1 and Open-dCoder: sinklens reproduces the references' passes and every canvas, and opens the runs."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from building import plain_pass
from layouts import word_tokenizer
from published import Reference, assert_same_pass, assert_same_routing, largest_difference

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.families import family_named, translate
from sinklens.interventions import Suffix
from sinklens.model.loading import build_empty

TOLERANCE = 1e-4
RUNS = {"llada-moe": 5, "rnd1": 5, "open-dcoder": 9}
CASES = [(name, number) for name, count in RUNS.items() for number in range(count)]
WITH_EXPERTS = ["llada-moe", "rnd1"]
SAME_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
    "tie_word_embeddings", "max_position_embeddings", "hidden_act", "eos_token_id", "bos_token_id", "pad_token_id",
)  # fmt: skip


@cache
def reference_of(folder: Path) -> Reference:
    return Reference(folder)


@cache
def model_of(folder: Path, place: Path) -> sinklens.Model:
    family = "open-dcoder" if folder.name == "open-dcoder" else None
    return sinklens.load(reference_of(folder).write(place / folder.name), family=family)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("bidirectional")


@pytest.fixture(params=RUNS)
def name(request):
    return request.param


@pytest.fixture
def reference(conformance, name):
    return reference_of(conformance / name)


@pytest.fixture
def model(conformance, name, place):
    return model_of(conformance / name, place)


def test_every_run_of_the_reference_is_compared(reference, name):
    assert len(reference.runs) == RUNS[name]


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


def test_logits_patterns_and_sink_scores_equal_the_references(reference, model):
    assert_same_pass(model, reference, TOLERANCE)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_routing_equals_the_references(reference, model):
    assert_same_routing(model, reference, TOLERANCE)


def settings_of(name: str, stored: dict[str, Any]) -> dict[str, Any]:
    """The settings of a stored run under our names."""
    if name == "open-dcoder":
        found = dict(stored["settings"])
        found.pop("mask_token_id")
        return {"gen_length" if key == "max_new_tokens" else key: value for key, value in found.items()}
    if name == "rnd1":
        room = stored["seq_len"] - stored["prefix_length"] - stored["suffix_length"] - 1
        closing = "eos" if stored["add_eos_at_end"] else "pad"
        found = {"gen_length": min(stored["infill_length"] or room, room), "steps": stored["num_steps"]}
        found |= {key: stored[key] for key in ("temperature", "eb_gamma", "top_k", "greedy")}
        return found | {"closing": closing}
    known = ("cfg_scale", "temperature", "remasking", "steps", "gen_length", "block_length")
    return {key: stored[key] for key in known}


def infilled(reference: Reference, number: int) -> list[tuple[list[int], int, list[int]]]:
    """Prompt, number of masks and suffix of each row of a stored run."""
    mask, first = reference.facts["mask_token_id"], reference.tensors[f"gen{number}.canvas"][:, 0].tolist()
    gaps = [(row.index(mask), row.count(mask)) for row in first]
    return [(row[:start], count, row[start + count :]) for row, (start, count) in zip(first, gaps, strict=True)]


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_every_canvas_equals_the_references_token_for_token(reference, model, name, number, recording):
    tensors, settings = reference.tensors, settings_of(name, reference.runs[number])
    canvas, result = tensors[f"gen{number}.canvas"], tensors[f"gen{number}.result"]
    if "gen_length" in settings and f"gen{number}.suffix" not in tensors:
        run = sinklens.generate(model, tensors[f"gen{number}.prompt"], record_sinks=recording, **settings)
        assert torch.equal(run.canvas[:, :-1], canvas)
        assert torch.equal(run.tokens, result)
        return
    for row, (prompt, count, suffix) in enumerate(infilled(reference, number)):
        if name == "rnd1":
            suffix = suffix[:-1]  # the reserved place
        hooks = [Suffix(text=suffix)]
        settings["gen_length"] = count
        run = sinklens.generate(model, [prompt], record_sinks=recording, hooks=hooks, **settings)
        ran = run.steps_run  # alone, a row may end before the stored batch
        assert torch.equal(run.canvas[0, :ran], canvas[row, :ran])
        assert (canvas[row, ran:] == run.tokens[0]).all()
        assert torch.equal(run.tokens[0], result[row])


def test_path_planning_takes_decisions_back(conformance, place):
    folder = conformance / "open-dcoder"
    model, reference = model_of(folder, place), reference_of(folder)
    run = sinklens.generate(model, reference.tensors["gen4.prompt"], **settings_of("open-dcoder", reference.runs[4]))
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
    reference = reference_of(conformance / "open-dcoder")
    folder = reference.write(tmp_path)
    choices = (
        r"family=, as the model card says: .*'open-dcoder' \(bidirectional, predicts the next position\), .*'qwen2' "
    )
    with pytest.raises(CheckpointError, match=choices):
        sinklens.load(folder)
    assert sinklens.load(folder, family="qwen2").config.is_causal is True
    ordinary = {"auto_map": None, "mask_token_id": None}
    assert sinklens.load(reference.write(tmp_path, **ordinary)).family == "qwen2"


@pytest.mark.parametrize("closing", ["pad", "eos", "none"])
def test_rnd1_ends_its_canvas_with_the_closing_token(conformance, place, closing):
    folder = conformance / "rnd1"
    model = model_of(folder, place)
    run = sinklens.generate(model, prompts_of(reference_of(folder))[:1], gen_length=4, closing=closing)
    assert run.tokens[0, 13:].tolist() == {"pad": [310], "eos": [312], "none": []}[closing]
    assert (run.unmask_step[0, 13:] == -1).all()


def test_rnd1_commits_at_least_one_token_and_everything_within_the_bound(conformance, place):
    folder = conformance / "rnd1"
    model, prompt = model_of(folder, place), prompts_of(reference_of(folder))[:1]
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
    folder = reference_of(conformance / "llada-moe").write(tmp_path)
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
