"""Configs of the public repositories: translated key by key, built at full size, and refused by name."""

import json
from typing import Any

import pytest
import torch
from layouts import change_config
from safetensors.torch import load_file, save_file
from stored.folders import largest_difference
from stored.runs import open_folder

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.families import family_named, translate
from sinklens.model.loading import build_empty

KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "hidden_act", "attention_bias",
    "eos_token_id", "bos_token_id", "pad_token_id", "use_sliding_window", "moe_intermediate_size", "num_experts",
    "num_experts_per_tok", "mlp_only_layers", "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
MADE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llada-moe": (
        {"family": "llada-moe", "mask_token_id": 315, "causal": False, "block_length": None},
        {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "intermediate_size": 128, "norm_topk_prob": False,
         "head_dim": 16},
    ),
    "rnd1": ({"family": "rnd1", "mask_token_id": 315, "causal": False}, {"norm_topk_prob": True}),
    "open-dcoder": ({"family": "open-dcoder", "mask_token_id": 285, "causal": False}, {"model_type": "qwen2"}),
    "sdar": (
        {"family": "sdar", "block_length": 4, "mask_token_id": 309},
        {"model_type": "qwen3", "is_causal": False, "_attn_implementation": "sinklens", "sliding_window": None},
    ),
    "sdar-moe": (
        {"family": "sdar-moe", "block_length": 4, "mask_token_id": 289},
        {"model_type": "qwen3_moe", "is_causal": False, "norm_topk_prob": True},
    ),
    "llada2-moe": (
        {"family": "llada2", "block_length": 8, "mask_token_id": 315},
        {"n_routed_experts": 8, "n_shared_experts": 1, "use_qk_norm": True, "norm_topk_prob": True,
         "attention_bias": False},
    ),
    "fast-dllm-v2": ({"family": "fast-dllm-v2", "block_length": 8, "mask_token_id": 309}, {"model_type": "qwen2"}),
    "nemotron-diffusion": (
        {"family": "nemotron-diffusion", "mask_token_id": 100, "causal": False, "block_length": None},
        {"model_type": "ministral3", "_attn_implementation": "sinklens", "use_cache": True, "sliding_window": None},
    ),
}  # fmt: skip
"""Folder -> attributes of the model, and what its config has besides the keys of `KEPT`."""


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", MADE)
def test_the_config_is_translated_key_by_key(conformance, name):
    reference, (of_model, of_config) = open_folder(conformance / name), MADE[name]
    raw, model = reference.config(), reference.load(block_length=reference.pass_block_length)
    kept = {key: raw[key] for key in KEPT if key in raw and key not in of_config and hasattr(model.config, key)}
    assert {key: getattr(model.config, key) for key in kept | of_config} == kept | of_config
    assert {key: getattr(model, key) for key in of_model} == of_model
    assert model.family_record.shift is (name in ("rnd1", "open-dcoder", "fast-dllm-v2"))
    rotation = raw.get("rope_parameters", {"rope_theta": raw.get("rope_theta")})
    assert {key: model.config.rope_parameters[key] for key in rotation} == rotation
    assert model.config.rope_parameters.get("partial_rotary_factor", 1) == raw.get("partial_rotary_factor", 1)


# Full size


DIT_SMALL = {"n_blocks": 12, "hidden_dim": 768, "n_heads": 12, "cond_dim": 128, "model_length": 1024}
DIT_MEDIUM = DIT_SMALL | {"n_blocks": 24, "hidden_dim": 1024, "n_heads": 16}
BD3LM_OWT = {"time_conditioning": False, "block_size": 16, "causal": False, "cross_attn": True, "adaln": True}
GIDD = {"max_seq_len": 512, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "timestep_cond_dim": 128, "p_uniform": 0.1, "t_eps": 1e-4}  # fmt: skip
GIDD_MEDIUM = GIDD | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
SEDD = {"hidden_size": 768, "n_blocks": 12, "n_heads": 12, "cond_dim": 128, "length": 1024, "scale_by_sigma": True}
QWEN3_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN25 = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
          "num_key_value_heads": 2, "vocab_size": 151936, "layer_types": ["full_attention"] * 28}  # fmt: skip
MINI = {
    "num_hidden_layers": 20, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 256, "n_group": 8, "topk_group": 4,
    "vocab_size": 157184, "num_experts_per_tok": 8, "rotary_dim": 64,
}  # fmt: skip
NEMOTRON = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
NEMOTRON_3B = NEMOTRON | {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26}
NEMOTRON_BASE = NEMOTRON_3B | {"rope_parameters": NEMOTRON["rope_parameters"] | {"factor": 0.25}}
FULL_SIZE: list[tuple[str, str, dict[str, Any], int]] = [
    ("llada-8b", "llada", {}, 8_015_581_184),
    ("mmada-8b", "mmada", {}, 8_082_690_048),
    ("dream-7b", "dream", {}, 7_615_616_512),
    ("llama-3.1-8b", "llama", {}, 8_030_261_248),
    ("bd3lm", "bd3lm-qwen3",
     {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
      "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "layer_types": ["full_attention"] * 28},
     596_049_920),
    ("llada-moe", "llada-moe",
     {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
      "num_experts": 64, "num_experts_per_tok": 8, "expert_intermediate_size": 1024, "moe_layer_freq": [1] * 16,
      "dense_intermediate_size": 8192, "vocab_size": 157184}, 7_356_880_896),
    ("rnd1", "rnd1", QWEN3_MOE, 30_532_122_624),
    ("sdar-moe", "sdar-moe", QWEN3_MOE, 30_532_122_624),
    ("open-dcoder", "open-dcoder",
     {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
      "num_key_value_heads": 2, "vocab_size": 151936}, 494_032_768),
    ("diffullama", "diffullama",
     {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
      "num_key_value_heads": 32, "vocab_size": 32000}, 6_738_415_616),
    ("diffugpt", "diffugpt",
     {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257},
     124_439_808),
    ("fast-dllm-v2", "fast-dllm-v2", QWEN25, 1_543_714_304),
    ("fast-dllm-v2", "fast-dllm-v2",
     QWEN25 | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
               "vocab_size": 152064, "tie_word_embeddings": False}, 7_615_616_512),
    ("llada2-moe", "llada2", MINI, 16_255_638_528),
    ("llada2-moe", "llada2",
     MINI | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 9216,
             "moe_intermediate_size": 1024}, 102_889_697_280),
    ("sdar", "sdar",
     {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
      "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}, 8_190_735_360),
    ("nemotron-diffusion", "nemotron-diffusion", NEMOTRON, 8_489_807_872),
    ("nemotron-diffusion", "nemotron-diffusion", NEMOTRON_3B, 3_830_000_000),
    ("nemotron-diffusion", "nemotron-diffusion", NEMOTRON_BASE, 3_830_000_000),
    *((folder, folder, {"vocab_size": 50258} | size | own, number)
      for folder, own in (("mdlm", {"time_conditioning": False}), ("bd3lm-owt", BD3LM_OWT), ("duo", {}))
      for size, number in ((DIT_SMALL, 169_627_218), (DIT_MEDIUM, 424_477_010))),
    ("gidd", "gidd", GIDD | {"vocab_size": 50258}, 169_627_218),
    ("gidd", "gidd", GIDD_MEDIUM | {"vocab_size": 50258}, 424_477_010),
    ("sedd", "sedd", {"tokens": 50257, "model": SEDD}, 169_627_218),
    ("sedd", "sedd", {"tokens": 50257, "model": SEDD | {"hidden_size": 1024, "n_blocks": 24, "n_heads": 16}},
     424_477_010),
]  # fmt: skip
"""A config, its family, the sizes of a published model, and its number of parameters as its authors give it."""


@pytest.mark.parametrize(("name", "family", "sizes", "parameters"), FULL_SIZE)
def test_a_full_size_model_has_the_published_number_of_parameters(conformance, name, family, sizes, parameters):
    file = conformance / "configs" / f"{name}.json"
    raw = json.loads(file.read_text()) if file.is_file() else open_folder(conformance / name).config()
    made = translate(raw | sizes, family_named(family), "here")
    values = list(build_empty(made).parameters())
    found = sum(value.numel() for value in values)
    assert found == pytest.approx(parameters, rel=1e-3 if name == "nemotron-diffusion" else 0)
    assert found in family_named(family).parameters
    assert {value.device.type for value in values} == {"meta"}
    if rotation := sizes.get("rope_parameters"):
        assert made.rope_parameters["factor"] == rotation["factor"]


GEMMA = {
    "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "intermediate_size": 2112,
    "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8, "vocab_size": 262_144, "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "max_position_embeddings": 262_144,
}  # fmt: skip
"""Sizes of the 26B model as third-party loaders list them; its config.json was not read."""


def test_the_text_model_of_diffusion_gemma_builds_at_full_size(conformance):
    """By arithmetic; each layer has attention, a dense MLP, a router, experts and seven norms."""
    raw, family = open_folder(conformance / "diffusion-gemma").config(), family_named("diffusion-gemma")
    raw["text_config"] |= GEMMA
    empty = build_empty(translate(raw | {"canvas_length": 256}, family, "here"), family.model_class)
    width, experts = 2816, 128
    sliding = width * 256 * (16 + 8 + 8) + 256 * 16 * width + 2 * 256
    full = width * 512 * (16 + 2) + 512 * 16 * width + 2 * 512  # values are the keys
    dense, mixture = 3 * width * 2112, experts * 3 * width * 704
    layers = 25 * sliding + 5 * full + 30 * (dense + mixture + width * experts + width + experts + 7 * width)
    expected = 262_144 * width + layers + width + dense + width  # then the last norm and self-conditioning
    text = dict(empty.model.decoder.named_parameters())
    assert (sum(value.numel() for value in text.values()),) == (expected,) == family.parameters
    assert "layers.5.self_attn.v_proj.weight" not in text


# Refused


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("mdlm", {"cond_dim": None}, {}, "lacks cond_dim, which the mdlm family needs"),
    ("mdlm", {"time_conditioning": None}, {}, "lacks time_conditioning, which the mdlm family needs"),
    ("duo", {"causal": True}, {}, "has causal = True; the duo family can express only False"),
    ("duo", {"time_conditioning": False}, {}, "has time_conditioning = False; the duo family can express only True"),
    ("mdlm", {"causal": True}, {}, "has causal = True; the mdlm family can express only False"),
    ("mdlm", {"adaln": False}, {}, "has adaln = False; the mdlm family can express only True"),
    ("gidd", {"rope_theta": 5.0}, {}, "has rope_theta = 5.0; the gidd family can express only 10000"),
    ("gidd", {"p_uniform": 1.5}, {}, "p_uniform = 1.5 and t_eps = .* must be shares"),
    ("mdlm", {"n_heads": -3}, {}, "has n_heads = -3; it must be a whole number above 0"),
    ("mdlm", {"n_heads": 5}, {}, "does not divide into 5 heads .*n_heads = 5"),
    ("mdlm", {"n_blocks": 1500}, {}, "hold [0-9]+ weights, too few for 1500 layers.* n_blocks = 1500"),
    ("mdlm", {"n_blocks": 2}, {}, "weights have no place in the model .*config.json has .*n_blocks = 2"),
    ("mdlm", {"cond_dim": 19}, {}, "the config requires .*config.json has .*cond_dim = 19"),
    ("bd3lm-owt", {"block_size": 10**12}, {}, "block_size = 1000000000000; it must be .*at most 100,000,000"),
    ("bd3lm-owt", {"block_size": "x"}, {}, "config.json has block_size = 'x': block_length must be an integer"),
    ("diffusion-gemma", {"canvas_length": 0}, {}, "canvas_length = 0; it must be a whole number above 0"),
    ("llada-gqa", {"embedding_size": 7}, {}, r"Padding_idx must be within num_embeddings.* embedding_size = 7"),
    ("nemotron-diffusion", {"mask_id": 3}, {}, "mask_token_id = 100, but mask_id = 3; pass mask_token_id="),
    ("nemotron-diffusion", {"rope_parameters": {"rope_type": "yarn", "factor": 0, "rope_theta": 1e6,
      "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}}, {}, "factor = 0; it must be a number"),
    ("nemotron-diffusion", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "mscale": "x",
      "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}}, {}, "rope_scaling.mscale = 'x'; it must"),
    ("nemotron-diffusion", {"mask_token_id": True}, {}, "no usable mask token .found True"),
    ("bd3lm-owt", {"cross_attn": False}, {}, "has cross_attn = False; the bd3lm-owt family can express only True"),
    ("bd3lm-owt", {"block_size": None}, {}, "does not give the block length"),
    ("gidd", {"p_uniform": None}, {}, "lacks p_uniform, which the gidd family needs"),
    ("sedd", {"graph": {"type": "uniform"}}, {"family": "sedd"}, "graph.type = 'uniform'; the sedd family can express"),
    ("sedd", {"graph": None}, {"family": "sedd"}, "lacks graph.type, which the sedd family needs"),
    ("sedd", {"model": {}}, {"family": "sedd"}, "lacks model.hidden_size, .*model.scale_by_sigma, which the sedd"),
    ("sedd", {}, {}, r"looks like SEDD.*pass family='sedd'"),
    ("bd3lm", {}, {}, r"model_type 'a2d-qwen3' does not say how the checkpoint was trained.* family='a2d-qwen3', "
     r"trained by masked diffusion .*family='bd3lm-qwen3', trained by block diffusion"),
    ("bd3lm", {}, {"family": "bd3lm-qwen3"}, "does not give the block length of this bd3lm-qwen3 checkpoint"),
    ("sdar", {}, {}, r"does not give the block length .* sinklens.load\(..., block_len"),
    ("open-dcoder", {}, {}, r"family=, .* says: (?=.*'open-dcoder' \(bidirectional, predicts the next position\))"
     r".*'qwen2' \(causal\)"),
    ("open-dcoder", {"auto_map": None, "dlm_paradigm": "bidirectional"}, {}, "has dlm_paradigm, which causal models"),
    ("diffugpt", {"mask_token_id": None}, {}, r"\(denoise_model\..* one of diffugpt, pass family="),
    ("diffugpt", {"mask_token_id": None}, {"family": "diffugpt"},
     r"no usable mask token \(found None, vocabulary 287\); pass mask_token_id="),
    ("sdar-moe", {"mask_token_id": None}, {}, r"no usable mask token \(found None, .*\); pass mask_token_id="),
    ("sdar-moe", {}, {"mask_token_id": 300}, r"no usable mask token \(found 300, vocabulary 300\)"),
    ("nemotron-diffusion", {"model_type": "nemotron_labs_diffusion_vlm", "architectures": None}, {}, "a vision tower"),
    ("nemotron-diffusion", {"dlm_paradigm": "block_diff"}, {}, "dlm_paradigm = 'block_diff'"),
    ("nemotron-diffusion", {"dlm_type": "dream"}, {}, "dlm_type = 'dream'; .* can express only 'llada'"),
    ("nemotron-diffusion", {"attention_bias": True}, {}, "attention_bias = True"),
    ("nemotron-diffusion", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {},
     "lacks rope_scaling.rope_type"),
    ("mdlm", {"model_type": "dit", "architectures": None, "max_seq_len": 20, "hidden_size": 36, "timestep_cond_dim": 18,
              "num_hidden_layers": 3, "num_attention_heads": 3, "p_uniform": 0.1, "t_eps": 1e-4}, {},
     r"weights \(backbone\..*another family than gidd"),
    ("gidd", {"model_type": "mdlm", "architectures": None}, {}, r"weights \(blocks\..*another family than mdlm"),
    ("bd3lm-owt", {"model_type": "mdlm", "architectures": None}, {}, r"sampling_eps_max, .*another family than mdlm"),
    ("sdar", {"model_type": "llada", "architectures": None, "auto_map": None}, {}, "another family than llada"),
    ("rnd1", {"model_type": "nemotron_labs_diffusion", "architectures": None}, {}, "than nemotron-diffusion"),
    ("sdar-moe", {"model_type": "llada2_moe", "architectures": None}, {}, "another family than llada2"),
    ("tiny-llama", {}, {"mask_token_id": 3}, "llama models have no mask token; leave mask_token_id= out"),
    ("tiny-llada", {}, {"block_length": 4}, "the llada family has bidirectional attention, which has no blocks"),
]  # fmt: skip
"""A folder or a shipped model, changes of its config, the arguments of `load`, and the error."""


@pytest.mark.parametrize(("name", "changes", "given", "message"), REFUSED)
def test_a_config_that_means_another_network_is_refused(conformance, tmp_path, name, changes, given, message):
    folder = name
    if not name.startswith("tiny"):
        folder = change_config(open_folder(conformance / name).write(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(folder, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, r"text_config\.num_hidden_layers = 1000000000000; it must be a whole number"),
        ({"head_dim": -8}, r"text_config\.head_dim = -8; it must be a whole number above 0"),
        ({"global_head_dim": None}, r"lacks text_config\.global_head_dim"),
        ({"final_logit_softcapping": None}, r"lacks text_config\.final_logit_softcapping"),
        ({"final_logit_softcapping": "x"}, r"text_config\.final_logit_softcapping = 'x'; it must be a number above 0"),
        ({"rms_norm_eps": -1.0}, r"text_config\.rms_norm_eps = -1\.0; it must be a number above 0"),
        ({"rope_parameters": {}}, r"lacks text_config\.rope_parameters\.full_attention\.rope_theta"),
        ({"top_k_experts": 0}, r"text_config\.top_k_experts = 0; it must be a whole number above 0"),
        ({"hidden_activation": "x"}, r"KeyError: 'x'"),
        ({"dtype": "x"}, r"does not describe a diffusion_gemma model: .*text_config\.dtype = 'x'"),
        ({"dtype": ["x"]}, r"text_config\.dtype = \['x'\]; it must be the name of a type"),
    ],
    ids=str,
)
def test_the_parts_of_a_config_are_checked_too(conformance, changes, message):
    raw, family = open_folder(conformance / "diffusion-gemma").config(), family_named("diffusion-gemma")
    raw["text_config"] |= changes
    with pytest.raises(CheckpointError, match=message):
        build_empty(translate(raw, family, "here"), family.model_class)


def test_what_the_config_leaves_open_the_caller_says(conformance, tmp_path):
    names = ("bd3lm", "sdar", "open-dcoder", "sdar-moe")
    bd3lm, sdar, dcoder, moe = (open_folder(conformance / name).write(tmp_path / name) for name in names)
    assert sinklens.load(bd3lm, family="a2d-qwen3").block_length is None
    assert sinklens.load(bd3lm, block_length=4).family == "bd3lm-qwen3"
    assert sinklens.load(dcoder, family="qwen2").config.is_causal is True
    assert sinklens.load(change_config(dcoder, auto_map=None, mask_token_id=None)).family == "qwen2"
    assert sinklens.load(change_config(moe, mask_token_id=None), mask_token_id=289).mask_token_id == 289
    with pytest.raises(SettingError, match="block_length must be an integer of at least 1 or None; got 0"):
        sinklens.load(sdar, block_length=0)
    assert sinklens.load(change_config(moe, mask_token_id=289, block_size=8)).block_length == 8
    assert sinklens.load(change_config(moe, mask_token_id=None, mask_id=288)).mask_token_id == 288
    assert sinklens.load(moe, mask_token_id=287).mask_token_id == 287
    change_config(sdar, block_size=8)
    eight, four = sinklens.load(sdar), sinklens.load(sdar, block_length=4)
    assert (eight.block_length, four.block_length) == (8, 4)
    assert eight.fingerprint != four.fingerprint
    with pytest.raises(SettingError, match=r"block_length is 8, but this sdar model was loaded with blocks of 4"):
        sinklens.generate(four, [[5, 6]], block_length=8)


def test_without_its_family_diffullama_is_an_autoregressive_model(conformance):
    """Nothing in config.json says otherwise, as diffullama.py warns."""
    model = sinklens.load(conformance / "diffullama")
    assert (model.family, model.causal) == ("llama", True)


def test_more_stored_rows_than_the_config_names_are_tokens(conformance, tmp_path):
    """DiffuGPT-m: a mask token was added to the embedding, while config.json kept its vocab_size."""
    reference = open_folder(conformance / "diffugpt")
    weights = load_file(reference.path / "model.safetensors")
    wide = torch.cat([weights["embed_tokens.weight"], torch.randn(2, 42)])
    save_file(weights | {"embed_tokens.weight": wide, "lm_head.weight": wide.clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(reference.config()))
    model = sinklens.load(tmp_path, family="diffugpt", mask_token_id=len(wide) - 1)
    assert model.cfg.d_vocab == len(wide) == reference.config()["vocab_size"] + 2
    with torch.no_grad():
        logits = model(reference.tensors["input_ids"])
    assert largest_difference(logits[..., :-2], reference.tensors["logits"]) < 1e-4
