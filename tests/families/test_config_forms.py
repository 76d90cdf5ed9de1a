"""A config.json in any form that the hub has loads as the model that it describes, or is refused with the reason.

Each family's config.json is written with its keys present, absent, moved or contradicting each other. What it describes
is written out here, and computed in plain torch.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from building import plain_pass, random_hf, random_ids
from layouts import (
    ARCHITECTURES,
    BLOCK_CAUSAL,
    SETTINGS,
    arguments,
    causal,
    eager_logits,
    public_config,
    public_weights,
    write_checkpoint,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import sinklens
from sinklens.errors import CheckpointError, CheckpointWarning

Config = dict[str, Any]
REPOSITORY = {
    "llada": ("GSAI-ML/LLaDA-1.5", "modeling_llada.LLaDAModelLM"),
    "mmada": ("Gen-Verse/MMaDA-8B-Base", "modeling_mmada.MMadaModelLM"),
    "dream": ("apple/DiffuCoder-7B-Base", "modeling_dream.DreamModel"),
    "sdar": ("JetLM/SDAR-4B-Chat", "modeling_sdar.SDARForCausalLM"),
    "sdar-moe": ("JetLM/SDAR-30B-A3B-Chat", "modeling_sdar_moe.SDARMoeForCausalLM"),
    "diffullama": ("diffusionfamily/diffullama", "modeling_llama.LlamaForCausalLM"),
    "fast-dllm-v2": ("Efficient-Large-Model/Fast_dLLM_v2_7B", "modeling.Fast_dLLM_QwenForCausalLM"),
    "a2d-llama": ("dllm-hub/Llama-diffusion", "modeling_llama.A2DLlamaLMHeadModel"),
    "bd3lm-llama": ("dllm-hub/Llama-bd3lm", "modeling_llama.A2DLlamaLMHeadModel"),
    "a2d-qwen2": ("dllm-hub/Qwen2-diffusion", "modeling_qwen2.A2DQwen2LMHeadModel"),
    "bd3lm-qwen2": ("dllm-hub/Qwen2-bd3lm", "modeling_qwen2.A2DQwen2LMHeadModel"),
    "a2d-qwen3": ("dllm-hub/Qwen3-diffusion", "modeling_qwen3.A2DQwen3LMHeadModel"),
    "bd3lm-qwen3": ("dllm-hub/Qwen3-bd3lm", "modeling_qwen3.A2DQwen3LMHeadModel"),
    "llada-moe": ("inclusionAI/LLaDA-MoE-7B-A1B-Base", "modeling_lladamoe.LLaDAMoEModelLM"),
    "llada2": ("inclusionAI/LLaDA2.0-mini", "modeling_llada2_moe.LLaDA2MoeModelLM"),
    "rnd1": ("radicalnumerics/RND1-Base-0910", "modeling_rnd.RND1LM"),
    "open-dcoder": ("fredzzp/open-dcoder-0.5B", "modeling_qwen2.Qwen2ForCausalLM"),
    "llama": ("meta-llama/Llama-3.1-8B", "modeling_llama.LlamaForCausalLM"),
    "qwen2": ("Qwen/Qwen2.5-0.5B", "modeling_qwen2.Qwen2ForCausalLM"),
    "qwen3": ("Qwen/Qwen3-0.6B", "modeling_qwen3.Qwen3ForCausalLM"),
    "qwen3-moe": ("Qwen/Qwen3-30B-A3B", "modeling_qwen3_moe.Qwen3MoeForCausalLM"),
}
"""A repository of each family, and the file and class of its model."""
ORDINARY = ("llama", "qwen2", "qwen3", "qwen3-moe")
LLADAS = ("llada", "mmada")
NAMED = tuple(family for family in REPOSITORY if "family" in arguments(family))
"""Families whose config.json does not say which they are; `sinklens.load` always gets ``family=``."""
OWN_KEYS = ("llada", "mmada", "llada-moe", "llada2", "rnd1")
"""Families whose published code does not read ``layer_types``."""
OLDER = ("a2d-llama", "a2d-qwen2", "a2d-qwen3")  # transformers' own classes, whose rotation may be scaled
SCALED = {"rope_type": "linear", "factor": 4.0}


@dataclass(frozen=True)
class Described:
    """The model that a config.json describes, where it differs from the family's usual one.

    Attributes:
        rotation: changes of transformers' ``rope_parameters``.
        tied: whether the head is the embedding.
        window: how many tokens back a query sees; 0 for all.
        warning: the text of the warning that loading gives.
    """

    rotation: Config | None = None
    tied: bool = False
    window: int = 0
    warning: str = ""


@dataclass(frozen=True)
class Form:
    """One way to write a config.json.

    Attributes:
        change: changes the config of a family, in place; may also change the weights of the file.
        outcome: what it describes, or the text of the error, by family; "" is for those not listed.
        family: whether ``family=`` is passed to `sinklens.load` where it is not needed.
    """

    change: Callable[[Config, dict[str, Tensor]], Any]
    outcome: dict[str, Described | str]
    family: bool = False


def _theta(config: Config) -> Config:
    """``rope_parameters`` of a config, which loses the keys of their own."""
    moved = {key: config.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in config}
    return {"rope_type": "default", **moved}


def _head(config: Config, weights: dict[str, Tensor]) -> str:
    return "model.transformer.ff_out.weight" if "d_model" in config else "lm_head.weight"


def _tying(config: Config) -> str:
    return "weight_tying" if "d_model" in config else "tie_word_embeddings"


def _other_head(config: Config, weights: dict[str, Tensor]) -> None:
    config[_tying(config)] = True
    weights[_head(config, weights)] = torch.randn_like(weights[_head(config, weights)])


def _without(*keys: str) -> Callable[[Config, dict[str, Tensor]], Any]:
    return lambda config, weights: [config.pop(key, None) for key in keys]


def _with(**values: Any) -> Callable[[Config, dict[str, Tensor]], Any]:
    return lambda config, weights: config.update(values)


def _sliding(config: Config, weights: dict[str, Tensor]) -> None:
    layers = config.get("num_hidden_layers", config.get("n_layers"))
    config["layer_types"] = ["full_attention"] * (layers - 1) + ["sliding_attention"]


def _unless_named(text: str, *families: str) -> dict[str, Described | str]:
    """The error for all families, or for `families`, but not where ``family=`` is passed."""
    if families:
        return {"": USUAL, **dict.fromkeys(families, text)}
    return {"": text, **dict.fromkeys(NAMED, USUAL)}


USUAL = Described()
TIED = Described(tied=True)
UNUSED = Described(tied=True, warning="so the different value in the files is not used")
NO_SCALING = r"config\.json has rope_scaling = .*can express only None"
STRETCHED = dict.fromkeys((*ORDINARY, *OLDER, "diffullama"), Described(rotation=SCALED))
CODE = "its model may differ. Pass family=, as the model card says: "
WINDOWED = r"use_sliding_window = True; the [a-z0-9-]+ family can express only False"
FORMS = {
    "as published": Form(lambda config, weights: None, {"": USUAL}),
    "rotation in rope_parameters": Form(
        lambda config, weights: config.update(rope_parameters=_theta(config)), {"": USUAL}
    ),
    "rotation in both places": Form(
        lambda config, weights: config.update(rope_parameters=_theta(dict(config))), {"": USUAL}
    ),
    "two bases of the rotation": Form(
        lambda config, weights: config.update(rope_parameters={"rope_theta": 77.0}),
        {"": r"has rope_theta = 10000\.0, but 77\.0 in rope_parameters; keep one of them"},
    ),
    "scaled in rope_scaling": Form(_with(rope_scaling=SCALED), {"": NO_SCALING, **STRETCHED}),
    "scaled by type": Form(_with(rope_scaling={"type": "linear", "factor": 4.0}), {"": NO_SCALING, **STRETCHED}),
    "scaled in rope_parameters": Form(
        lambda config, weights: config.update(rope_parameters={**_theta(config), **SCALED}),
        {"": NO_SCALING, **STRETCHED},
    ),
    "scaling of type default": Form(_with(rope_scaling={"rope_type": "default"}), {"": USUAL}),
    "half of each head rotated": Form(
        _with(partial_rotary_factor=0.5),
        {"": r"partial_rotary_factor = 0\.5; .*can express only 1", "llada2": USUAL, **dict.fromkeys(LLADAS, USUAL)},
    ),
    "half rotated, in rope_parameters": Form(
        lambda config, weights: config.update(rope_parameters={**_theta(config), "partial_rotary_factor": 0.5}),
        {"": r"partial_rotary_factor = 0\.5; .*can express only 1", "llada2": USUAL, **dict.fromkeys(LLADAS, USUAL)},
    ),
    "no partial_rotary_factor": Form(_without("partial_rotary_factor", "rotary_dim"), {"": USUAL}),
    "all of each head rotated": Form(
        _with(partial_rotary_factor=1.0),
        {"": USUAL, "llada2": "rotary_dim = 2, but partial_rotary_factor = 1.0 of head_dim = 4 rotates 4"},
    ),
    "no rope_theta": Form(
        _without("rope_theta"),
        {
            "": r"config\.json lacks rope_theta",  # their checkpoints have another base than the published default
            **dict.fromkeys((*ORDINARY, "diffullama"), USUAL),
        },
    ),
    "no rope": Form(
        _without("rope"),
        {"": USUAL, **dict.fromkeys(LLADAS, r"has no rope, and its published code then uses False")},
    ),
    "no layer_norm_type": Form(
        _without("layer_norm_type"),
        {"": USUAL, **dict.fromkeys(LLADAS, r"has no layer_norm_type, and its published code then uses 'default'")},
    ),
    "another head stored, tied": Form(_other_head, {"": UNUSED}),
    "no head stored, tied": Form(
        lambda config, weights: (config.update({_tying(config): True}), weights.pop(_head(config, weights))),
        {"": TIED},
    ),
    "no key for tying": Form(
        _without("tie_word_embeddings", "weight_tying"), {"": USUAL, **dict.fromkeys(LLADAS, UNUSED)}
    ),
    "no head_dim": Form(
        _without("head_dim"),
        {
            "": USUAL,
            **dict.fromkeys(("sdar", "a2d-qwen3", "bd3lm-qwen3", "qwen3"), r"the config requires \[128\]"),
            "qwen3-moe": USUAL,
            "llada2": "lacks head_dim", "rnd1": "lacks head_dim",
        },
    ),
    "no keys for biases": Form(
        _without("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "include_bias", "include_qkv_bias"),
        {"": USUAL, "llada2": r"has no use_bias, and its published code then uses True"},
    ),
    "no torch_dtype but dtype": Form(
        lambda config, weights: (config.pop("torch_dtype", None), config.update(dtype="bfloat16")), {"": USUAL}
    ),
    "no window keys": Form(_without("use_sliding_window", "sliding_window", "max_window_layers"), {"": USUAL}),
    "a window that is off": Form(
        _with(use_sliding_window=False, sliding_window=4),
        {"": USUAL, "rnd1": "sliding_window = 4; the rnd1 family can express only None or False"},
    ),
    "layer_types, all full": Form(
        lambda config, weights: (_sliding(config, weights), config["layer_types"].__setitem__(-1, "full_attention")),
        {"": USUAL},
    ),
    "layer_types with a window that is off": Form(
        lambda config, weights: (_sliding(config, weights), config.update(use_sliding_window=False)),
        {
            "": r"layer_types in config\.json has sliding_attention; the .* can express only full_attention",
            **dict.fromkeys(OWN_KEYS, USUAL),
        },
    ),
    "layer_types with a window": Form(
        lambda config, weights: (
            config.update(layer_types=["sliding_attention"] * 3, use_sliding_window=True, sliding_window=3)
        ),
        {
            "": WINDOWED,
            "rnd1": "sliding_window = 3; the rnd1 family can express only None or False",
            **dict.fromkeys(("qwen2", "qwen3", "qwen3-moe"), Described(window=3)),
            **dict.fromkeys(("llama", "a2d-llama", "bd3lm-llama", "diffullama"), "layer_types in config"),
            **dict.fromkeys(LLADAS, USUAL),
        },
    ),
    "code, by file": Form(
        lambda config, weights: config.update(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}),
        _unless_named(rf"auto_map names code of its own .*{CODE}", *ORDINARY),
    ),
    "code, by repository": Form(
        lambda config, weights: config.update(
            auto_map={"AutoModelForCausalLM": "someone/own-0.5B--modeling_qwen2.Qwen2ForCausalLM"}
        ),
        _unless_named(rf"\(someone/own-0.5B--modeling.*{CODE}", *ORDINARY),
    ),
    "code, and its family named": Form(
        lambda config, weights: config.update(auto_map={"AutoModel": "a/b--modeling_own.OwnModel"}), {"": USUAL}, True
    ),
    "code of the tokenizer alone": Form(
        lambda config, weights: config.update(auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}),
        {"": USUAL},
    ),
    "another class": Form(
        lambda config, weights: config.update(architectures=["_A2DQwen3LMHeadModel"]),
        _unless_named(rf"architectures names _A2DQwen3LMHeadModel instead of .*{CODE}"),
    ),
    "another class, and its family named": Form(
        lambda config, weights: config.update(architectures=["_A2DQwen3LMHeadModel"]), {"": USUAL}, True
    ),
    "tuples instead of outputs": Form(_with(return_dict=False), {"": USUAL}),
    "no class": Form(
        _without("architectures"),
        {"": USUAL, "llada-moe": "are named as in another family than llada"},
    ),
    "the other direction": Form(
        lambda config, weights: config.update(is_causal=config["model_type"].replace("_", "-") not in ORDINARY),
        _unless_named(rf"is_causal is (True|False).*{CODE}"),
    ),
    "a mask token": Form(
        _with(mask_token_id=60),
        _unless_named(f"it has mask_token_id, which causal models lack.*{CODE}", *ORDINARY),
    ),
}  # fmt: skip
CASES = [(family, form) for family in REPOSITORY for form in FORMS]


def hub_config(family: str, hf: PreTrainedModel) -> Config:
    """The family's config.json with the class and the code that its repositories name."""
    repository, code = REPOSITORY[family]
    config = {"torch_dtype": "bfloat16", "transformers_version": "4.46.2"} | public_config(family, hf)
    config |= {"architectures": [code.partition(".")[2]]}
    if family in ORDINARY:
        config.pop("auto_map", None)
        return config
    return config | {
        "auto_map": {"AutoConfig": f"{repository}--configuration.Own", "AutoModel": f"{repository}--{code}"}
    }


def described_logits(family: str, described: Described, hf: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits of the model that a config describes."""
    hf.config.is_causal = causal(family)
    if described.tied:
        hf.lm_head.weight = hf.model.embed_tokens.weight
    if described.window:
        causally = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)
        seen = causally + torch.full_like(causally, -torch.inf).tril(-described.window)
        hf.set_attn_implementation("eager")
        mask = seen[None, None]
        by_type = {"sliding_attention": mask} if family != "qwen3-moe" else mask
        return hf(input_ids=ids, attention_mask=by_type).logits
    if "factor" in (described.rotation or {}):
        return eager_logits(hf, ids, causal(family), family in BLOCK_CAUSAL)
    if family in BLOCK_CAUSAL:
        hf.config.sinklens_block_length = 4
    stub: Any = SimpleNamespace(tree=SimpleNamespace(hf=hf))
    return plain_pass(stub, ids).logits


def described_model(family: str, described: Described) -> PreTrainedModel:
    settings: Config = {}
    if described.rotation:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, **described.rotation}
    if described.window:
        settings |= {"use_sliding_window": True, "sliding_window": described.window}
        settings |= {"layer_types": ["sliding_attention"] * 3}
    return random_hf(ARCHITECTURES[family], causal(family), **SETTINGS.get(family, {}) | settings)


def test_every_family_of_this_kind_is_written():
    # Nemotron needs keys that no other family has: tests/conformance/test_nemotron_diffusion.py
    assert set(REPOSITORY) == set(ARCHITECTURES) - {"nemotron-diffusion"}


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(("family", "name"), CASES, ids=[" - ".join(case) for case in CASES])
@pytest.mark.filterwarnings("error::sinklens.errors.CheckpointWarning")
def test_a_form_of_config_json_describes_a_model_or_is_refused(tmp_path: Path, family: str, name: str):
    form = FORMS[name]
    outcome = form.outcome.get(family, form.outcome[""])
    described = outcome if isinstance(outcome, Described) else USUAL
    hf = described_model(family, described)
    usual = described_model(family, USUAL)
    config, weights = hub_config(family, usual), public_weights(family, usual)
    form.change(config, weights)
    write_checkpoint(tmp_path, config, weights)
    given = ({"family": family} if form.family else {}) | arguments(family)
    ids = random_ids()
    if not isinstance(outcome, Described):
        with pytest.raises(CheckpointError, match=f"(?s){outcome}"):
            sinklens.load(tmp_path, **given)
        return
    with pytest.warns(CheckpointWarning, match=described.warning) if described.warning else nullcontext():
        model = sinklens.load(tmp_path, **given)
    assert model.family == family
    with torch.no_grad():
        torch.testing.assert_close(model(ids), described_logits(family, described, hf, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("family", NAMED)
def test_a_config_that_fits_several_families_is_refused_with_the_choices(tmp_path, family):
    hf = described_model(family, USUAL)
    write_checkpoint(tmp_path, hub_config(family, hf), public_weights(family, hf))
    with pytest.raises(CheckpointError, match=rf"model card says.*'{family}'"):
        sinklens.load(tmp_path)
    if family.startswith("bd3lm"):
        assert sinklens.load(tmp_path, block_length=4).family == family


GEMMA_FORMS: list[tuple[Config, str]] = [
    ({"architectures": ["Gemma4ForCausalLM"]}, "instead of DiffusionGemmaForBlockDiffusion"),
    ({"auto_map": {"AutoModel": "someone/own--modeling_own.Own"}}, r"auto_map names code of its own \(someone"),
    ({"text_config": {"use_bidirectional_attention": "all"}}, "can express only 'vision' or None"),
]


@pytest.mark.parametrize(("changes", "text"), GEMMA_FORMS)
def test_a_form_of_diffusion_gemmas_nested_config_is_refused(shared, tmp_path, changes, text):
    folder = shared / "conformance" / "diffusion-gemma"
    config = json.loads((folder / "config.json").read_text())
    nested = {"text_config": config["text_config"] | changes.get("text_config", {})}
    write_checkpoint(tmp_path, config | changes | nested, load_file(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match=text):
        sinklens.load(tmp_path)
