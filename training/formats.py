"""The public layout of each family: config.json, the stored weights, generation settings.

The masked model becomes a LLaDA checkpoint, an MMaDA checkpoint if it has pictures, or a LLaDA-MoE checkpoint if it has
experts; the shifted model becomes a Dream checkpoint, the block-causal one an SDAR checkpoint, the canvas model a
DiffusionGemma checkpoint, that with two modes a Nemotron-Labs-Diffusion checkpoint, the causal one a Llama checkpoint,
and the two with a noise level MDLM and Duo checkpoints.

Names and shapes of the weights follow from the family's record, whose renames and splits are inverted.

Pitfall: transformers stacks the experts of a layer, but public checkpoints of LLaDA-MoE store each alone; those of
DiffusionGemma store them stacked.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.families import Family
from sinklens.hooks.attention import normalizers as weighing
from training import pictures
from training.corpus import ANSWER_LENGTH
from training.initial import VISION
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

StateDict = dict[str, Float[Tensor, "..."]]


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


def public_weights(model: "PreTrainedModel", family: Family) -> StateDict:
    """The weights of `model` as the family's files have them: the inverse of the renames and splits of its record."""
    tied, layout = set(model.all_tied_weights_keys or ()), FORMATS[family.name]
    own = {name: value for name, value in model.state_dict().items() if name not in tied}
    own = experts_alone(own) if layout.single_experts else own
    for fused, parts in family.fused.items():
        for first in [name for name in own if name.endswith(f".{parts[0]}")]:
            place = first.removesuffix(parts[0])
            own[place + fused] = torch.cat([own.pop(place + part) for part in parts])
    stored = {_public_name(name, family): value for name, value in own.items()}
    return stored | {name: model.get_buffer(buffer) for name, buffer in layout.buffers.items()}


def _public_name(name: str, family: Family) -> str:
    """The name whose renaming is `name`; each pattern of the record is literal but for anchors and one group."""
    for pattern, ours in reversed(list(family.renames.items())):
        group = next(iter(re.findall(r"\([^)]*\)", pattern)), "")
        literal = pattern.strip("^$").replace(group or "\n", "<group>")
        public = re.sub(r"\\(.)", r"\1", literal)
        found = re.escape(ours.replace(r"\1", "<group>")).replace("<group>", group)
        name = re.sub(("^" if pattern.startswith("^") else "") + found, public.replace("<group>", r"\1"), name, count=1)
    return name


def experts_alone(weights: StateDict) -> StateDict:
    """Each expert alone: transformers stacks gate and up projections, in this order, and then the experts."""
    stored = dict[str, Tensor]()
    for name, value in weights.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".experts"):
            stored[name] = value
            continue
        for number, expert in enumerate(value):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            pieces = zip(parts, expert.chunk(len(parts)), strict=True)
            stored |= {f"{place}.{number}.{part}.weight": piece for part, piece in pieces}
    return stored


@dataclass(frozen=True)
class Format:
    """One family's layout, besides the names of its weights.

    Attributes:
        config: the content of config.json.
        generation: the content of generation_config.json besides the special tokens.
        single_experts: whether each expert is stored alone.
        buffers: stored name -> buffer of the model.
    """

    config: Callable[[Recipe, "PreTrainedConfig", "PreTrainedTokenizerFast"], dict[str, Any]]
    generation: Callable[[Recipe, "PreTrainedTokenizerFast"], dict[str, Any]]
    single_experts: bool = False
    buffers: Mapping[str, str] = field(default_factory=dict)


_MASKED = _lengths(steps=ANSWER_LENGTH, block_length=ANSWER_LENGTH)
_ROTATION = {"backbone.rotary_emb.inv_freq": "model.rotary_emb.inv_freq"}
FORMATS = {
    "llada": Format(_llada_config, _MASKED),
    "mmada": Format(_mmada_config, _MASKED),
    "llada-moe": Format(_llada_moe_config, _MASKED, single_experts=True),
    "dream": Format(_dream_config, _lengths(steps=ANSWER_LENGTH)),
    "sdar": Format(_sdar_config, _lengths(remasking_strategy="low_confidence_static")),
    "diffusion-gemma": Format(_gemma_config, _canvas_generation),
    "mdlm": Format(_mdlm_config, _lengths(steps=ANSWER_LENGTH), buffers=_ROTATION),
    "duo": Format(_duo_config, _lengths(steps=ANSWER_LENGTH, final_step="greedy"), buffers=_ROTATION),
    "nemotron-diffusion": Format(_nemotron_config, _lengths()),
    "llama": Format(_llama_config, _lengths()),
}
