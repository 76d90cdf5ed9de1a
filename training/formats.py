"""The public layout of each family: config.json, names and shapes of the stored weights, generation settings.

The masked model becomes a LLaDA checkpoint, an MMaDA checkpoint if it has pictures, or a LLaDA-MoE checkpoint if it has
experts; the shifted model becomes a Dream checkpoint, the block-causal one an SDAR checkpoint, the canvas model a
DiffusionGemma checkpoint, that with two modes a Nemotron-Labs-Diffusion checkpoint, the causal one a Llama checkpoint,
and the two with a noise level MDLM and Duo checkpoints.

Pitfall: transformers stacks the experts of a layer, but public checkpoints of LLaDA-MoE store each alone; those of
DiffusionGemma store them stacked.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.hooks.attention import normalizers as weighing
from training import pictures
from training.corpus import ANSWER_LENGTH
from training.initial import VISION
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

StateDict = dict[str, Float[Tensor, "..."]]
LLADA_NAMES = {
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "model.layers.": "model.transformer.blocks.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ff_norm.",
    ".self_attn.o_proj.": ".attn_out.",
    ".self_attn.": ".",
    ".mlp.gate_proj.": ".ff_proj.",
    ".mlp.up_proj.": ".up_proj.",
    ".mlp.down_proj.": ".ff_out.",
}

NOISE_LEVEL_NAMES = {
    "model.embed_tokens.weight": "vocab_embed.embedding",
    "model.time_embed.in_proj.": "sigma_map.mlp.0.",
    "model.time_embed.out_proj.": "sigma_map.mlp.2.",
    "model.norm.": "output_layer.norm_final.",
    "model.modulation.": "output_layer.modulation.",
    "lm_head.": "output_layer.linear.",
    "model.layers.": "blocks.",
    ".input_layernorm.": ".norm1.",
    ".post_attention_layernorm.": ".norm2.",
    ".self_attn.o_proj.": ".attn_out.",
    ".mlp.up_proj.": ".mlp.0.",
    ".mlp.down_proj.": ".mlp.2.",
    ".modulation.": ".adaLN_modulation.",
}


def _public_name(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def _llada_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of LLaDA-8B's config.json, with this model's sizes."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": recipe.d_model,
        "embedding_size": config.vocab_size,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_sequence_length": recipe.context,
        "mlp_hidden_size": recipe.d_mlp,
        "mlp_ratio": 4,
        "multi_query_attention": None,
        "n_heads": recipe.n_heads,
        "n_kv_heads": recipe.n_heads,
        "n_layers": recipe.n_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": True,
        "rope_theta": config.rope_parameters["rope_theta"],
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": False,
    } | ({} if recipe.attention == "softmax" else {weighing.CONFIG_KEY: recipe.attention})


def _mmada_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of MMaDA-8B's config.json: LLaDA's and the split of the vocabulary into text and picture codes."""
    codes = len(pictures.CODE_TOKENS)
    return _llada_config(recipe, config, tokenizer) | {
        "architectures": ["MMadaModelLM"],
        "model_type": "mmada",
        "llm_vocab_size": config.vocab_size - codes,
        "new_vocab_size": config.vocab_size,
        "codebook_size": codes,
        "num_vq_tokens": pictures.SIDE**2,
        "num_new_special_tokens": 0,
    }


def _dream_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of Dream-7B's config.json, with this model's sizes."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": recipe.d_model,
        "initializer_range": config.initializer_range,
        "intermediate_size": recipe.d_mlp,
        "mask_token_id": tokenizer.mask_token_id,
        "max_position_embeddings": recipe.context,
        "max_window_layers": recipe.n_layers,
        "num_attention_heads": recipe.n_heads,
        "num_hidden_layers": recipe.n_layers,
        "num_key_value_heads": recipe.n_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _llama_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    kept = json.loads(config.to_json_string(use_diff=False))
    kept |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for name in ("is_causal", "_name_or_path"):
        kept.pop(name, None)
    return kept


def _sdar_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of SDAR's config.json; ``block_size`` is in some of the public ones."""
    shared = _dream_config(recipe, config, tokenizer)
    return shared | {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": recipe.block_length,
        "head_dim": config.head_dim,
    }


def _llada_moe_config(
    recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast"
) -> dict[str, Any]:
    """The keys of LLaDA-MoE's config.json; ``dense_intermediate_size`` has no effect, because no layer is dense."""
    return {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.bos_token_id,
        "clip_qkv": None,
        "dense_intermediate_size": recipe.d_mlp,
        "eos_token_id": tokenizer.eos_token_id,
        "expert_intermediate_size": recipe.d_expert,
        "hidden_act": "silu",
        "hidden_size": recipe.d_model,
        "initializer_range": config.initializer_range,
        "mask_token_id": tokenizer.mask_token_id,
        "max_position_embeddings": recipe.context,
        "moe_layer_freq": [1] * recipe.n_layers,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": None,
        "num_attention_heads": recipe.n_heads,
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "num_hidden_layers": recipe.n_layers,
        "num_key_value_heads": recipe.n_heads,
        "output_router_logits": False,
        "pad_token_id": tokenizer.pad_token_id,
        "partial_rotary_factor": 1,
        "qk_layernorm": True,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "routed_scaling_factor": 1,
        "router_aux_loss_coef": recipe.balance_weight,
        "router_num_group": None,
        "router_topk_group": None,
        "shared_expert_intermediate_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": config.vocab_size,
    }


def _gemma_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of DiffusionGemma's public config.json, which lists the sizes of its full layers as ``global_…``."""
    text = config.get_text_config()
    size = recipe.d_model // recipe.n_heads
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "boi_token_id": None,
        "canvas_length": recipe.block_length,
        "dtype": "bfloat16",
        "eoi_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "image_token_id": None,
        "initializer_range": text.initializer_range,
        "text_config": {
            "model_type": "diffusion_gemma_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": tokenizer.bos_token_id,
            "dtype": "bfloat16",
            "eos_token_id": tokenizer.eos_token_id,
            "final_logit_softcapping": text.final_logit_softcapping,
            "global_head_dim": size,
            "head_dim": size,
            "hidden_activation": text.hidden_activation,
            "hidden_size": recipe.d_model,
            "initializer_range": text.initializer_range,
            "intermediate_size": recipe.d_mlp,
            "layer_types": text.layer_types,
            "max_position_embeddings": recipe.context,
            "moe_intermediate_size": recipe.d_expert,
            "num_attention_heads": recipe.n_heads,
            "num_experts": recipe.experts,
            "num_global_key_value_heads": recipe.n_heads,
            "num_hidden_layers": recipe.n_layers,
            "num_key_value_heads": recipe.n_heads,
            "pad_token_id": None,
            "rms_norm_eps": text.rms_norm_eps,
            "rope_parameters": text.rope_parameters,
            "sliding_window": text.sliding_window,
            "tie_word_embeddings": True,
            "top_k_experts": recipe.experts_per_token,
            "use_bidirectional_attention": "vision",
            "vocab_size": text.vocab_size,
        },
        "tie_word_embeddings": True,
        "vision_config": {**VISION, "model_type": "gemma4_vision"},
    }


def _nemotron_config(
    recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast"
) -> dict[str, Any]:
    """The keys of Nemotron-Labs-Diffusion's config.json, with this model's sizes."""
    return {
        "architectures": ["NemotronLabsDiffusionModel"],
        "model_type": "nemotron_labs_diffusion",
        "ar_loss_weight": 1.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_implementation": "sdpa",
        "block_size": recipe.block_length,
        "bos_token_id": tokenizer.bos_token_id,
        "dlm_loss_weight": 1.0,
        "dlm_paradigm": "bidirectional",
        "eos_token_id": tokenizer.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": recipe.d_model,
        "initializer_range": config.initializer_range,
        "intermediate_size": recipe.d_mlp,
        "mask_token_id": tokenizer.mask_token_id,
        "max_position_embeddings": recipe.context,
        "mlp_bias": False,
        "num_attention_heads": recipe.n_heads,
        "num_hidden_layers": recipe.n_layers,
        "num_key_value_heads": recipe.n_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": config.vocab_size,
    }


def _mdlm_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of MDLM's config.json; the mask token is the last of the vocabulary."""
    return {
        "architectures": ["MDLM"],
        "model_type": "mdlm",
        "cond_dim": recipe.d_cond,
        "dropout": 0.0,
        "hidden_dim": recipe.d_model,
        "model_length": recipe.context,
        "n_blocks": recipe.n_layers,
        "n_heads": recipe.n_heads,
        "return_dict": False,
        "time_conditioning": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }


def _duo_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of Duo's config.json, which has no ``time_conditioning``: every Duo reads its time."""
    shared = _mdlm_config(recipe, config, tokenizer)
    shared |= {"architectures": ["DUO"], "model_type": "duo", "causal": False, "var_min": True}
    return {name: value for name, value in shared.items() if name != "time_conditioning"}


def _llada_weights(model: "PreTrainedModel") -> StateDict:
    return {_public_name(name, LLADA_NAMES): value for name, value in model.state_dict().items()}


def _noise_level_weights(model: "PreTrainedModel") -> StateDict:
    """With queries, keys and values as one weight, and the frequencies of the rotation."""
    stored = {"backbone.rotary_emb.inv_freq": model.model.rotary_emb.inv_freq}
    for name, value in model.state_dict().items():
        block, _, kind = name.rpartition(".self_attn.")
        public = f"backbone.{_public_name(name, NOISE_LEVEL_NAMES)}"
        if kind == "q_proj.weight":
            parts = [model.get_parameter(f"{block}.self_attn.{part}_proj.weight") for part in "qkv"]
            stored[public.replace("self_attn.q_proj", "attn_qkv")] = torch.cat(parts)
        elif kind not in ("k_proj.weight", "v_proj.weight"):
            stored[public] = value
    return stored


def _same_weights(model: "PreTrainedModel") -> StateDict:
    return model.state_dict()


def _encoder_weights(model: "PreTrainedModel") -> StateDict:
    """Nemotron-Labs-Diffusion's names: the network is an encoder with a diffusion head."""
    return {_encoder_name(name): value for name, value in model.state_dict().items()}


def _encoder_name(name: str) -> str:
    return re.sub(r"^lm_head\.", "diffusion_head.", re.sub(r"^model\.", "encoder.", name))


def _single_experts(model: "PreTrainedModel") -> StateDict:
    """Each expert alone: transformers stacks gate and up projections, in this order, and then the experts."""
    stored = dict[str, Tensor]()
    for name, value in model.state_dict().items():
        place, _, kind = name.rpartition(".")
        for number, expert in enumerate(value if place.endswith(".experts") else ()):
            if kind == "gate_up_proj":
                gate, up = expert.chunk(2)
                stored |= {f"{place}.{number}.gate_proj.weight": gate, f"{place}.{number}.up_proj.weight": up}
            else:
                stored[f"{place}.{number}.{kind}.weight"] = expert
        if not place.endswith(".experts"):
            stored[name] = value
    return stored


def _untied_weights(model: "PreTrainedModel") -> StateDict:
    """Without the weights that are the same tensor as another one."""
    tied = set(model.all_tied_weights_keys)
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def _canvas_generation(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of DiffusionGemma's generation_config.json, with its values except for the lengths."""
    return {
        "confidence_threshold": 0.005,
        "max_denoising_steps": ANSWER_LENGTH,
        "max_new_tokens": ANSWER_LENGTH,
        "pad_token_id": tokenizer.pad_token_id,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
        "stability_threshold": 1,
        "t_max": 0.8,
        "t_min": 0.4,
    }


def _lengths(**settings: int | str) -> Callable[[Recipe, "PreTrainedTokenizerFast"], dict[str, Any]]:
    """The answer's length and `settings`, which sinklens reads under its name."""
    return lambda recipe, tokenizer: {"sinklens": {"gen_length": ANSWER_LENGTH, **settings}}


@dataclass(frozen=True)
class Format:
    """One family's layout.

    Attributes:
        config: the content of config.json.
        weights: the stored weights by name.
        generation: the content of generation_config.json besides the special tokens.
    """

    config: Callable[[Recipe, "PreTrainedConfig", "PreTrainedTokenizerFast"], dict[str, Any]]
    weights: Callable[["PreTrainedModel"], StateDict]
    generation: Callable[[Recipe, "PreTrainedTokenizerFast"], dict[str, Any]]


_MASKED = _lengths(steps=ANSWER_LENGTH, block_length=ANSWER_LENGTH)
FORMATS = {
    "llada": Format(_llada_config, _llada_weights, _MASKED),
    "mmada": Format(_mmada_config, _llada_weights, _MASKED),
    "llada-moe": Format(_llada_moe_config, _single_experts, _MASKED),
    "dream": Format(_dream_config, _same_weights, _lengths(steps=ANSWER_LENGTH)),
    "sdar": Format(_sdar_config, _same_weights, _lengths(remasking_strategy="low_confidence_static")),
    "diffusion-gemma": Format(_gemma_config, _untied_weights, _canvas_generation),
    "mdlm": Format(_mdlm_config, _noise_level_weights, _lengths(steps=ANSWER_LENGTH)),
    "duo": Format(_duo_config, _noise_level_weights, _lengths(steps=ANSWER_LENGTH, final_step="greedy")),
    "nemotron-diffusion": Format(_nemotron_config, _encoder_weights, _lengths()),
    "llama": Format(_llama_config, _same_weights, _lengths()),
}
