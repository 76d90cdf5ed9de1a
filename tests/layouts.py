"""Checkpoints in the public layouts, written by hand.

Names of weights, keys of config.json and files are spelled out as the public repositories have them, without a look
into sinklens: a wrong rename or translation there shows as another model here.
"""

import json
from pathlib import Path
from typing import Any

import torch
from building import EXPERTS, random_hf
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.formats import experts_alone

ARCHITECTURES = {
    "llada": "llama",
    "mmada": "llama",
    "dream": "qwen2",
    "sdar": "qwen3",
    "fast-dllm-v2": "qwen2",
    "a2d-llama": "llama",
    "bd3lm-llama": "llama",
    "a2d-qwen2": "qwen2",
    "bd3lm-qwen2": "qwen2",
    "a2d-qwen3": "qwen3",
    "bd3lm-qwen3": "qwen3",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "llada-moe": "qwen3_moe",
    "llada2": "glm4_moe",
    "rnd1": "qwen3_moe",
    "open-dcoder": "qwen2",
    "qwen3-moe": "qwen3_moe",
    "nemotron-diffusion": "ministral3",
    "sdar-moe": "qwen3_moe",
    "diffullama": "llama",
}
"""Family -> the transformers class that computes the same."""

BLOCK_CAUSAL = ("sdar", "sdar-moe", "fast-dllm-v2", "llada2", "bd3lm-llama", "bd3lm-qwen2", "bd3lm-qwen3")
"""Families whose queries see their own block and earlier ones; here blocks of 4."""
SETTINGS: dict[str, dict[str, Any]] = {
    "llada-moe": {"head_dim": 4, "norm_topk_prob": False},
    "rnd1": {"mlp_only_layers": []},
}
"""What the family fixes, as settings of `random_hf`."""

LLADA_BLOCK = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
"""LLaDA's name of each weight in a block -> Llama's."""


def causal(family: str) -> bool:
    """Whether a family sees earlier tokens only."""
    return family in ("llama", "qwen2", "qwen3", "qwen3-moe", "gpt2")


def arguments(family: str) -> dict[str, Any]:
    """The arguments of `sinklens.load` for what the family's config.json does not say."""
    shared = family.startswith(("a2d-", "bd3lm", "open-dcoder", "diffullama"))  # these share their model_type
    return ({"family": family} if shared else {}) | ({"block_length": 4} if family in BLOCK_CAUSAL else {})


def llada_names(layers: int, tied: bool = False) -> dict[str, str]:
    """Every weight name of a LLaDA checkpoint -> Llama's name."""
    names = {"model.transformer.wte.weight": "model.embed_tokens.weight"}
    for layer in range(layers):
        for ours, theirs in LLADA_BLOCK.items():
            names[f"model.transformer.blocks.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    names["model.transformer.ln_f.weight"] = "model.norm.weight"
    return names if tied else names | {"model.transformer.ff_out.weight": "lm_head.weight"}


def public_weights(family: str, hf: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of `hf` under the names that the family's files use."""
    tied = hf.config.tie_word_embeddings
    own = {name: value.clone() for name, value in hf.state_dict().items() if not (tied and name == "lm_head.weight")}
    if family == "llada2":
        return _llada2_weights(experts_alone(own), hf.config.num_hidden_layers)
    if ARCHITECTURES[family] in EXPERTS:
        return {name: value.clone() for name, value in experts_alone(own).items()}
    if family == "nemotron-diffusion":
        return {_nemotron_name(name): value for name, value in own.items()}
    if family not in ("llada", "mmada"):
        return own
    return {public: own[name] for public, name in llada_names(hf.config.num_hidden_layers, tied).items()}


LLADA2_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
"""GLM-4-MoE's part of a weight name -> LLaDA2's."""


def _llada2_weights(own: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Queries, keys and values as one weight, in this order, and LLaDA2's names."""
    for layer in range(layers):
        at = f"model.layers.{layer}"
        pieces = [own.pop(f"{at}.self_attn.{letter}_proj.weight") for letter in "qkv"]
        own[f"{at}.attention.query_key_value.weight"] = torch.cat(pieces)
    found = {}
    for name, value in own.items():
        for theirs, ours in LLADA2_NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = value.clone()
    return found


def _nemotron_name(name: str) -> str:
    """The network is called encoder, and its head diffusion_head."""
    first, _, rest = name.partition(".")
    return f"{'encoder' if first == 'model' else 'diffusion_head'}.{rest}"


def public_config(family: str, hf: PreTrainedModel) -> dict[str, Any]:
    """config.json of `hf` with the keys that the family's repositories use."""
    if family in ("llada", "mmada"):
        return _llada_config(family, hf.config)
    if family == "llada-moe":
        return _llada_moe_config(hf.config)
    if family == "llada2":
        return _llada2_config(hf.config)
    if family == "nemotron-diffusion":
        return _nemotron_config(hf.config)
    theta = hf.config.rope_parameters["rope_theta"]
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    same += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    config = {key: getattr(hf.config, key) for key in same if hasattr(hf.config, key)} | {"rope_theta": theta}
    kind = {
        "dream": "Dream",
        "fast-dllm-v2": "Fast_dLLM_Qwen",
        "bd3lm-llama": "a2d-llama",
        "bd3lm-qwen2": "a2d-qwen2",
        "bd3lm-qwen3": "a2d-qwen3",
        "open-dcoder": "qwen2",
        "qwen3-moe": "qwen3_moe",
        "sdar-moe": "sdar_moe",
        "diffullama": "llama",
    }.get(family, family)
    config |= {"model_type": kind, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    if ARCHITECTURES[family] == "qwen3_moe":
        config |= {key: getattr(hf.config, key) for key in (*EXPERTS["qwen3_moe"], "decoder_sparse_step")}
    if family == "rnd1":
        config |= {"architectures": ["RND1LM"], "rope_scaling": False, "is_causal": False, "attention_bias": False}
    if not causal(family):
        config |= {"mask_token_id": 60, "auto_map": {"AutoModel": "modeling_own.OwnModel"}}
    if ARCHITECTURES[family] != "llama":
        window = False if family == "rnd1" else None
        config |= {"use_sliding_window": False, "sliding_window": window, "max_window_layers": 28}
    return config


def _llada2_config(config: Any) -> dict[str, Any]:
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    same += ("rms_norm_eps", "max_position_embeddings", "intermediate_size", "moe_intermediate_size", "n_group")
    same += ("num_experts_per_tok", "first_k_dense_replace", "topk_group", "routed_scaling_factor")
    return {key: getattr(config, key) for key in same} | {
        "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "num_experts": config.n_routed_experts,
        "num_shared_experts": config.n_shared_experts, "rope_theta": config.rope_parameters["rope_theta"],
        "partial_rotary_factor": 0.5, "rotary_dim": 2, "use_bias": False, "use_qkv_bias": False, "hidden_act": "silu",
        "rope_scaling": None, "use_sliding_window": False, "using_split_qkv_in_self_attention": False,
        "norm_topk_prob": True, "score_function": "sigmoid", "tie_word_embeddings": False, "mask_token_id": 60,
        "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip


def _nemotron_config(config: Any) -> dict[str, Any]:
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    same += ("rope_parameters",)
    return {key: getattr(config, key) for key in same} | {
        "model_type": "nemotron_labs_diffusion", "architectures": ["NemotronLabsDiffusionModel"],
        "auto_map": {"AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel"},
        "attention_bias": False, "mlp_bias": False, "sliding_window": None, "hidden_act": "silu",
        "attn_implementation": "sdpa", "use_cache": False, "dlm_paradigm": "bidirectional", "block_size": 8,
        "mask_token_id": 60, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _llada_moe_config(config: Any) -> dict[str, Any]:
    dense = config.mlp_only_layers
    return {
        "model_type": "llada",
        "architectures": ["LLaDAMoEModelLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_lladamoe.LLaDAMoEModelLM"},
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "expert_intermediate_size": config.moe_intermediate_size,
        "dense_intermediate_size": config.intermediate_size,
        "moe_layer_freq": [int(layer not in dense) for layer in range(config.num_hidden_layers)],
        "shared_expert_intermediate_size": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": True,
        "qk_layernorm": True,
        "partial_rotary_factor": 1,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "mask_token_id": 60,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _llada_config(family: str, config: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "n_layers": config.num_hidden_layers,
        "mlp_hidden_size": config.intermediate_size,
        "mlp_ratio": 4,
        "vocab_size": config.vocab_size - 3,
        "embedding_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "weight_tying": config.tie_word_embeddings,
        "mask_token_id": 60,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "init_device": "meta",
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "multi_query_attention": None,
        "rope": True,
        "scale_logits": False,
    }


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    """Write config.json and the weights, in one file or in several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    place = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {key: weights[key] for key in list(weights)[number::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        place |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_family(folder: Path, family: str, shards: int = 1, **settings: Any) -> PreTrainedModel:
    """Write a random checkpoint of a family; returns the transformers model that holds the same weights."""
    hf = random_hf(ARCHITECTURES[family], causal(family), **SETTINGS.get(family, {}) | settings)
    write_checkpoint(folder, public_config(family, hf), public_weights(family, hf), shards)
    return hf


def change_config(folder: Path, **changes: Any) -> Path:
    """Set keys of a folder's config.json; None takes a key away."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def eager_logits(hf: PreTrainedModel, ids: Tensor, causal: bool, blocks: bool = False) -> Tensor:
    """transformers' own logits by its plain attention under a mask written out here, whatever its config says."""
    length = ids.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1) if causal else torch.zeros(length, length)
    for query in range(length if blocks else 0):
        mask[query, (query // 4 + 1) * 4 :] = -torch.inf
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        return hf(input_ids=ids, attention_mask=mask[None, None].to(hf.dtype)).logits


WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, 60)), "<mask>"]


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words: ``w7`` is token 7, the mask is token 60."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def word_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of `write_tokenizer`, read back."""
    return PreTrainedTokenizerFast.from_pretrained(write_tokenizer(folder))
