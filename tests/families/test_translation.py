"""A public config becomes the transformers config of the same model, or the error names what it cannot express."""

from functools import partial
from typing import Any

import pytest
from building import random_hf
from layouts import ARCHITECTURES, SETTINGS, causal, public_config
from transformers.utils import logging

from sinklens.errors import CheckpointError
from sinklens.families import FAMILIES, family_named, translate
from sinklens.families.registry import named_family
from sinklens.model.loading import build_empty

# For each key that can require a model that the class does not compute, a value that does.
LLADA: dict[str, Any] = {
    "alibi": True,
    "rope": False,
    "block_type": "sequential",
    "block_group_size": 4,
    "activation_type": "swiglu",
    "layer_norm_type": "default",
    "layer_norm_with_affine": False,
    "attention_layer_norm": True,
    "input_emb_norm": True,
    "include_bias": True,
    "include_qkv_bias": True,
    "bias_for_layer_norm": True,
    "multi_query_attention": True,
    "rope_full_precision": False,
    "scale_logits": True,
    "clip_qkv": 8.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
ROTATION = {"partial_rotary_factor": 0.5}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
WINDOW = {"use_sliding_window": True, **ROTATION}
DREAM = WINDOW | {"hidden_act": "gelu", **LINEAR}
BIASED = DREAM | {"attention_bias": True}
LLADA_MOE = DREAM | {
    "shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "clip_qkv": 8.0,
    "qk_layernorm": False,
    "attention_bias": True,
    "moe_router_score_function": "sigmoid",
    "routed_scaling_factor": 2.5,
    "router_num_group": 2,
    "router_topk_group": 1,
}
LLADA2 = {key: value for key, value in DREAM.items() if key not in ROTATION} | {
    "use_bias": True,
    "use_qk_norm": False,
    "using_split_qkv_in_self_attention": True,
    "norm_topk_prob": False,
    "score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "norm_head": True,
    "norm_softmax": True,
    "use_rmsnorm": False,
    "router_dtype": "bf16",
}
RND1 = BIASED | {"sliding_window": 4096, "is_causal": True, "decoder_sparse_step": 2, "mlp_only_layers": [0]}
UNSUPPORTED = {
    "llada": LLADA, "mmada": LLADA, "dream": DREAM, "sdar": BIASED, "fast-dllm-v2": DREAM,
    "a2d-qwen2": WINDOW, "bd3lm-qwen2": DREAM, "a2d-qwen3": WINDOW, "bd3lm-qwen3": BIASED,
    "a2d-llama": ROTATION, "bd3lm-llama": ROTATION | LINEAR, "llama": ROTATION, "qwen2": ROTATION, "qwen3": ROTATION,
    "qwen3-moe": ROTATION, "llada-moe": LLADA_MOE, "llada2": LLADA2, "rnd1": RND1, "open-dcoder": DREAM,
    "sdar-moe": BIASED, "diffullama": ROTATION,
}  # fmt: skip


def _config(family: str, **changes: Any) -> dict[str, Any]:
    """A small public config with keys changed."""
    hf = random_hf(ARCHITECTURES[family], causal(family), **SETTINGS.get(family, {}))
    return public_config(family, hf) | changes


def _without(family: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in _config(family).items() if key not in keys}


def _translated(config: dict[str, Any], family: str | None = None) -> Any:
    return translate(config, named_family(config, "here") if family is None else family_named(family), "here")


MISSING = [
    *(("llada", [key], key) for key in
      ("d_model", "n_heads", "n_layers", "rms_norm_eps", "rope_theta", "max_sequence_length")),
    ("llada", ["vocab_size", "embedding_size"], "vocab_size"),
    ("llada", ["mlp_hidden_size", "mlp_ratio"], "mlp_hidden_size"),
    *(("llada-moe", [key], key) for key in (
        "hidden_size", "num_experts", "num_experts_per_tok", "expert_intermediate_size", "dense_intermediate_size",
        "rope_theta", "rms_norm_eps", "vocab_size",
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llada", {"rope_theta": 70_000.0}, {"rope_parameters": {"rope_theta": 70_000.0, "rope_type": "default"}}),
        ("llada", {"n_kv_heads": None}, {"num_key_value_heads": 6}),
        ("llada", {"mlp_hidden_size": None, "mlp_ratio": 5}, {"intermediate_size": 5 * 24}),
        ("llada", {"embedding_size": 64, "vocab_size": 61}, {"vocab_size": 64}),
        ("llada", {"embedding_size": None, "vocab_size": 61}, {"vocab_size": 61}),
        # transformers' defaults, 1 and 2, refer to Llama's vocabulary
        ("llada", {"eos_token_id": None, "pad_token_id": None},
         {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}),
        *(("llada-moe", {"norm_topk_prob": said}, {"norm_topk_prob": False}) for said in (True, False, None)),
        ("llada-moe", {"moe_layer_freq": [0, 1, 0]}, {"mlp_only_layers": [0, 2]}),
        ("llada-moe", {"moe_layer_freq": 1}, {"mlp_only_layers": []}),
        ("llada", {"hidden_act": "gelu"}, {"hidden_act": "silu"}),  # LLaDA's key is activation_type
        ("llada2", {"num_experts_per_tok": 1}, {"norm_topk_prob": False}),  # a single expert's weight is not divided
    ],
)  # fmt: skip
def test_a_key_has_the_meaning_that_the_familys_code_gives_it(family, changes, expected):
    public = {key: value for key, value in _config(family, **changes).items() if value is not None}
    config = _translated(public, family)
    assert {name: getattr(config, name) for name in expected} == expected


def test_an_unusual_rotation_of_a_published_model_prints_nothing(capfd):
    """Nemotron's base model has a factor below 1, of which transformers warns whatever a user does."""
    config = _config("nemotron-diffusion")
    config["rope_parameters"] = config["rope_parameters"] | {"factor": 0.25}
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    try:
        build_empty(_translated(config, "nemotron-diffusion"))
        assert logging.get_verbosity() == logging.WARNING
    finally:
        logging.set_verbosity(before)
    assert capfd.readouterr() == ("", "")


def test_a_default_of_transformers_that_the_family_cannot_express_is_rejected_too(families):
    from sinklens.families import Family, register
    from sinklens.hooks import Architecture

    known = Family("mist", ("mist",), "mistral", "llada", "no", required={"sliding_window": (None,)}, mask_token_id=3)
    register(known, Architecture())
    sizes = {
        "model_type": "mist", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 9,
    }  # fmt: skip
    assert translate({**sizes, "sliding_window": None}, known, "here").sliding_window is None
    with pytest.raises(CheckpointError, match=r"no sliding_window, and transformers' class for mistral then uses 4096"):
        translate(sizes, known, "here")


def test_every_key_that_can_be_rejected_is_tested_here():
    own = {"nemotron-diffusion"}  # and those without an entry in ARCHITECTURES have files of their own
    standard = [one for one in FAMILIES.values() if one.name in ARCHITECTURES and one.name not in own]
    assert {one.name: set(one.required) for one in standard} == {name: set(keys) for name, keys in UNSUPPORTED.items()}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_value_that_cannot_be_expressed_is_rejected_and_a_missing_key_means_the_usual_one(family):
    usual = _config(family)
    made = _translated(usual, family).to_dict()
    for key, value in UNSUPPORTED[family].items():
        message = rf"here: config\.json has {key} = .*the {family} family can express only"
        with pytest.raises(CheckpointError, match=message):
            _translated(usual | {key: value}, family)
        without = {name: one for name, one in usual.items() if name != key}
        if key in family_named(family).defaults:
            message = rf"has no {key}, and its published code then uses .*can express only"
            with pytest.raises(CheckpointError, match=message):
                _translated(without, family)
        else:
            assert _translated(without, family).to_dict() == made


NORMALIZERS = [
    ({"sinklens_attention": "sigmoyd"}, r"= 'sigmoyd'; known attention normalizers are softmax, .*\. Nearest: sigmoid"),
    ({"sinklens_attention": ["sigmoid"]}, r"sinklens_attention = \['sigmoid'\]; known attention normalizers"),
    ({"sinklens_atention": "sigmoid"}, "has 'sinklens_atention'; sinklens reads only sinklens_attention"),
]


@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe", "llada2", "rnd1", "nemotron-diffusion"])
def test_the_attention_normalizer_is_kept_and_that_of_the_weights_left_out(family):
    assert _translated(_config(family, sinklens_attention="sigmoid")).sinklens_attention == "sigmoid"
    for changes, message in NORMALIZERS:
        with pytest.raises(CheckpointError, match=message):
            _translated(_config(family, **changes))
    given = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    made = [_translated(_config(family, quantization_config=each)) for each in (None, given)]
    assert made[0].to_dict() == made[1].to_dict()


INVALID = [
    ("llada", {"n_heads": 0}, r"here: config\.json has n_heads = 0; it must be a whole number above 0\."),
    ("llada", {"n_kv_heads": 0}, r"n_kv_heads = 0; it must be a whole number above 0"),
    ("llama", {"head_dim": 0}, r"head_dim = 0; it must be a whole number above 0"),
    ("dream", {"num_attention_heads": 0}, r"num_attention_heads = 0; it must be a whole number above 0"),
    ("dream", {"vocab_size": -62}, r"vocab_size = -62; it must be a whole number above 0"),
    ("sdar", {"num_hidden_layers": True}, r"num_hidden_layers = True; it must be a whole number above 0"),
    ("qwen2", {"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan; it must be a number above 0, such as 1e-06"),
    ("qwen3", {"rope_theta": None}, r"rope_theta = None; it must be a number above 0, such as 500000\.0"),
    ("llada2", {"topk_group": 4}, r"num_experts_per_tok = 3 of num_experts = 6 in topk_group = 4 of n_group = 3"),
    ("rnd1", {"num_experts_per_tok": 7}, r"num_experts_per_tok = 7 of num_experts = 6 .* which is impossible"),
    ("llada2", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor = 1\.5; it must be a share, above 0"),
    (
        "llada",
        {"rope_theta": "x"},
        r"here: config\.json has rope_theta = 'x'; it must be a number above 0, such as",
    ),
    (
        "llada",
        {"rope_theta": True},
        r"here: config\.json has rope_theta = True; it must be a number above 0, such as",
    ),
    ("llada", {"rope_theta": 0}, r"here: config\.json has rope_theta = 0; it must be a number above 0, such as"),
    (
        "llada",
        {"rope_theta": [1]},
        r"here: config\.json has rope_theta = \[1\]; it must be a number above 0, such as",
    ),
    ("llama", {"rope_theta": "x"}, r"config\.json has rope_theta = 'x'; it must be a number above 0"),
    ("llama", {"hidden_act": "swigloo"}, r"cannot build a llama model from this config: KeyError: 'swigloo'"),
    ("llada", {"n_heads": 5}, r"hidden size \(24\) is not a multiple of the number of attention heads"),
    ("llada", {"d_model": "24"}, r"here: config\.json has d_model = '24'; it must be a whole number above 0"),
    (
        "llada",
        {"weight_tying": "no"},
        r"does not describe a llama model: .*'tie_word_embeddings'.*got str.* weight_tying = 'no'",
    ),
    ("llada", {"n_heads": 5}, r"config\.json has d_model = 24, n_heads = 5, "),
    ("llama", {"hidden_size": 25}, r"config\.json has .*hidden_size = 25, .*num_attention_heads = 6"),
    ("llada", {"n_layers": 10**12}, r"n_layers = 1000000000000; it must be a whole number above 0, at most 2,000"),
    ("rnd1", {"num_experts": 10**12}, r"num_experts = 1000000000000; it must be a whole number .*at most 2,000"),
    ("dream", {"vocab_size": 10**12}, r"vocab_size = 1000000000000; .*at most 100,000,000"),
    ("dream", {"hidden_size": {}}, r"hidden_size = {}; it must be a whole number above 0\."),
    ("dream", {"rms_norm_eps": 1e300}, r"rms_norm_eps = 1e\+300; it must be a number above 0"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step = 0; it must be a whole number above 0"),
    ("llada2", {"partial_rotary_factor": None}, r"lacks partial_rotary_factor, which the llada2 family needs"),
    ("llada2", {"rotary_dim": 4}, r"rotary_dim = 4, but partial_rotary_factor = 0\.5 of head_dim = 4 rotates 2"),
    ("llada", {"include_qkv_bias": None}, r"include_qkv_bias = None; the llada family can express only False"),
    ("llada", {"block_group_size": None}, r"block_group_size = None; the llada family can express only 1"),
    ("llada", {"eos_token_id": "</s>"}, r"eos_token_id = '</s>'; it must be the id of a token"),
    (
        "dream",
        {"pad_token_id": 10**12},
        r"cannot build a qwen2 model from this config: AssertionError: Padding_idx",
    ),
]
UNKNOWN = [
    ({}, "model_type None is not a known family"),
    ({"model_type": ["llada"]}, r"model_type \['llada'\] is not a known family"),
    ({"model_type": {}}, "model_type {} is not a known family"),
    ({"model_type": "lada"}, r"here: model_type 'lada' is not a known family\. Known: llada, .*Nearest: llada"),
    ({"model_type": "own", "auto_map": {"AutoModel": "modeling_own.OwnModel"}},
     r"'own' is not .* code in its repository \(auto_map\), which sinklens never runs"),
    ({"model_type": "wedlm"}, r"model_type 'wedlm' belongs to WeDLM, which moves decided tokens in front of"),
    ({"model_type": "qwen3", "architectures": ["WeDLMForCausalLM"]},
     r"the class 'WeDLMForCausalLM' in architectures belongs to WeDLM"),
    ({"model_type": "refusion"}, r"model_type 'refusion' belongs to ReFusion, which moves decided slots in front"),
    ({"model_type": "qwen3", "architectures": ["ReFusionForCausalLM"]},
     r"the class 'ReFusionForCausalLM' in architectures belongs to ReFusion.* is not supported\."),
    ({"model_type": "llada", "architectures": 3}, "architectures = 3; it is a list of names"),
    ({"model_type": "llada", "architectures": {"a": "b"}}, "architectures = {'a': 'b'}; it is a list of names"),
    ({"model_type": "nemotron_labs_diffusion_vlm"}, r"has a vision tower"),
]  # fmt: skip
PARTS = [  # whose sizes transformers' class would read instead, or not at all
    (family, key, part)
    for family in ("llada", "dream", "llama", "qwen2", "qwen3", "llada-moe", "rnd1")
    for key in ("text_config", "llm_config")
    for part in ({"vocab_size": 9}, {}, [], 3)
]
REFUSED = [
    *((partial(named_family, config, "here"), text) for config, text in UNKNOWN),
    (partial(family_named, "a2d-qwen4"), r"no family is called 'a2d-qwen4'; known: llada, .*Nearest: a2d-qwen"),
    *(
        (
            lambda family=family, keys=keys: _translated(_without(family, *keys)),
            rf"config\.json lacks .*\b{named}\b.*, which the {family} family needs",
        )
        for family, keys, named in MISSING
    ),
    *(
        (lambda family=family, changes=changes: build_empty(_translated(_config(family, **changes))), text)
        for family, changes, text in INVALID
    ),
    *(
        (
            lambda family=family, changes={key: part}: _translated(_config(family, **changes), family),
            f"has {key}, .* of several parts.*Load the checkpoint of the text",
        )
        for family, key, part in PARTS
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_config_that_is_unknown_incomplete_or_impossible_is_refused_with_the_reason(call, text):
    with pytest.raises(CheckpointError, match=text):
        call()


def test_a_family_is_named_with_hyphens_or_underscores():
    assert family_named("diffusion_gemma") is family_named("diffusion-gemma")
