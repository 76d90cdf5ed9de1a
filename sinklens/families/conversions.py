"""Functions that turn a family's config.json into the settings of its transformers config.

For families whose config is more than a list of renamed keys; `Family.convert` names the function. Each gets the parsed
config.json, whose values were checked against `Family.required`, and returns transformers' settings.

Limitation: a key that no function here reads is dropped, so list the allowed values of such a key in `Family.required`.
"""

from typing import Any

Config = dict[str, Any]

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAME = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "attention_dropout",
    "sinklens_attention",
)  # fmt: skip
_DIT_ROTATION: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def llada_moe(config: Config) -> Config:
    """LLaDA-MoE's config as Qwen3-MoE's.

    The weights of the chosen experts are never divided by their sum, whatever ``norm_topk_prob`` says: the published
    code does not read it. A layer has a dense MLP where ``moe_layer_freq`` is 0.
    """
    frequency = config.get("moe_layer_freq", 1)
    every = frequency if isinstance(frequency, list) else [1] * config["num_hidden_layers"]
    return {
        **_kept(config),
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "moe_intermediate_size": config["expert_intermediate_size"],
        "intermediate_size": config["dense_intermediate_size"],
        "num_experts": config["num_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "norm_topk_prob": False,
        "mlp_only_layers": [layer for layer, sparse in enumerate(every) if not sparse],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "rope_parameters": _rotation(config),
    }


def rnd1(config: Config) -> Config:
    """RND1's config as Qwen3-MoE's, whose keys it uses; there, ``false`` means none. All layers are mixtures."""
    named = ("head_dim", "intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    return {
        **_kept(config),
        **{key: config[key] for key in (*named, "norm_topk_prob", "attention_bias") if key in config},
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "rope_parameters": _rotation(config),
    }


def llada2(config: Config) -> Config:
    """LLaDA2's config as GLM-4-MoE's.

    Keys that the published code does not read have no effect here either: the router is a sigmoid in float32 whose bias
    affects only the choice, and the weights of the chosen experts are divided by their sum.
    """
    same = ["head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "first_k_dense_replace"]
    same += ["n_group", "topk_group", "routed_scaling_factor"]
    rotation = _rotation(config) | {"partial_rotary_factor": config["partial_rotary_factor"]}
    return {
        **_kept(config),
        **{key: config[key] for key in same},
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["num_shared_experts"],
        "attention_bias": config.get("use_qkv_bias", False),
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
        "rope_parameters": rotation,
        "partial_rotary_factor": rotation["partial_rotary_factor"],
    }


def dit(config: Config) -> Config:
    """The config of MDLM, BD3-LM or Duo as that of dit.py. Duo has no ``time_conditioning``: it is always timed."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_dim"],
        "cond_dim": config["cond_dim"],
        "num_hidden_layers": config["n_blocks"],
        "num_attention_heads": config["n_heads"],
        "max_position_embeddings": config["model_length"],
        "time_conditioning": config.get("time_conditioning", True),
        **_DIT_ROTATION,
    }


def sedd(config: Config) -> Config:
    """SEDD's training configuration as the config of dit.py; the mask token comes after the ``tokens`` others."""
    model = config["model"]
    return {
        "vocab_size": config["tokens"] + 1,
        "hidden_size": model["hidden_size"],
        "cond_dim": model["cond_dim"],
        "num_hidden_layers": model["n_blocks"],
        "num_attention_heads": model["n_heads"],
        "max_position_embeddings": model["length"],
        "scale_by_sigma": model["scale_by_sigma"],
        **_DIT_ROTATION,
    }


def gidd(config: Config) -> Config:
    """GIDD's config as that of dit.py."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "p_uniform", "t_eps")
    return {
        **{key: config[key] for key in same},
        "cond_dim": config["timestep_cond_dim"],
        "max_position_embeddings": config["max_seq_len"],
        **_DIT_ROTATION,
    }


def nemotron_diffusion(config: Config) -> Config:
    """Nemotron-Labs-Diffusion's config as Ministral3's, whose keys it uses.

    The rotation stays as it is: YaRN, whose factor may be below 1, and the scale that queries get after it. The keys
    ``attn_implementation`` and ``use_cache`` are the checkpoint's own code's, and those of the losses are of training.
    """
    return {
        **_kept(config),
        **{key: config[key] for key in ("head_dim", "intermediate_size")},
        "sliding_window": None,
        "rope_parameters": {**config["rope_scaling"], "rope_theta": float(config["rope_theta"])},
    }


def _kept(config: Config) -> Config:
    """Keys that mean the same in both; tokens that the config does not name become None."""
    return {key: config[key] for key in _SAME if key in config} | {key: config.get(key) for key in _TOKENS}


def _rotation(config: Config) -> Config:
    return {"rope_type": "default", "rope_theta": float(config["rope_theta"])}
