"""The config keys and weight names of the checkpoint families, for the records of families.py.

Tables called ``..._REQUIRED`` list values that can be expressed, ``..._NEEDED`` keys that config.json must have,
``..._DEFAULTS`` what the published code uses for missing keys,
``..._RENAMES`` weight names. `Family` says how each is used.

Pitfall: a value that a ``REQUIRED`` table forgets lets a config through that describes a different model.
"""

from collections.abc import Mapping

Required = Mapping[str, tuple[str | int | list[int] | None, ...]]

LLADA_CONFIG = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}
LLADA_REQUIRED: Required = {
    "alibi": (False,),
    "rope": (True,),
    "block_type": ("llama",),
    "block_group_size": (1, None),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "multi_query_attention": (None, False),
    "scale_logits": (False,),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
}
LLADA_DEFAULTS: dict[str, str | int | float | bool] = {
    "rope": False,
    "block_type": "sequential",
    "activation_type": "swiglu",
    "layer_norm_type": "default",
    "weight_tying": True,
}
LLADA_RENAMES = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.blocks\.": "model.layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.([qkv]_proj)\.": r".self_attn.\1.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"\.up_proj\.": ".mlp.up_proj.",
    r"\.ff_out\.": ".mlp.down_proj.",
}
ROTATION: Required = {"partial_rotary_factor": (1, None)}
QWEN_REQUIRED: Required = {
    **ROTATION,
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
MASKED_DIFFUSION = "trained by masked diffusion (mdlm)"
BLOCK_DIFFUSION = "trained by block diffusion (bd3lm), with the block_length= that the card names, 32 by default"
LLADA_MOE_NEEDED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "rope_theta",
    "rms_norm_eps", "max_position_embeddings", "num_experts", "num_experts_per_tok", "expert_intermediate_size",
    "dense_intermediate_size",
)  # fmt: skip
LLADA_MOE_REQUIRED: Required = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1, None),
    "shared_expert_intermediate_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "clip_qkv": (None,),
    "qk_layernorm": (True,),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
}
RND1_NEEDED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rope_theta", "rms_norm_eps", "max_position_embeddings", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob",
)  # fmt: skip
RND1_REQUIRED: Required = {
    **ROTATION,
    "hidden_act": ("silu",),
    "rope_scaling": (None, False),
    "sliding_window": (None, False),
    "use_sliding_window": (False,),
    "attention_bias": (False,),
    "is_causal": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
GEMMA_SETTINGS = {
    "max_new_tokens": "gen_length",
    "max_denoising_steps": "max_denoising_steps",
    "sampler_config.entropy_bound": "entropy_bound",
    "t_max": "t_max",
    "t_min": "t_min",
    "stability_threshold": "stability_threshold",
    "confidence_threshold": "confidence_threshold",
    "pad_token_id": "pad_token_id",
}
LLADA2_NEEDED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rope_theta", "rms_norm_eps", "max_position_embeddings", "intermediate_size", "moe_intermediate_size",
    "num_experts", "num_experts_per_tok", "num_shared_experts", "first_k_dense_replace", "n_group", "topk_group",
    "routed_scaling_factor",
)  # fmt: skip
LLADA2_REQUIRED: Required = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_bias": (False,),
    "use_qk_norm": (True,),
    "use_sliding_window": (False,),
    "using_split_qkv_in_self_attention": (False,),
}
GPT2_RENAMES = {
    r"^embed_tokens\.": "transformer.wte.",
    r"^denoise_model\.": "transformer.",
    r"^(wte|wpe|h|ln_f)\.": r"transformer.\1.",
}
GPT2_IGNORED = r"\.attn\.(masked_)?bias$"  # the causal mask, which older files hold as a buffer
NEMOTRON_NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling.rope_type",
    "rope_scaling.factor", "rope_scaling.original_max_position_embeddings", "rope_scaling.llama_4_scaling_beta",
)  # fmt: skip
NEMOTRON_REQUIRED: Required = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1, None),
    "rope_scaling.rope_type": ("yarn",),
    "dlm_paradigm": ("bidirectional",),
}
NEMOTRON_RENAMES = {r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."}
DIT_NEEDED = ("vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads")
GIDD_NEEDED = (
    "vocab_size", "max_seq_len", "hidden_size", "timestep_cond_dim", "num_hidden_layers", "num_attention_heads",
    "p_uniform", "t_eps",
)  # fmt: skip
SEDD_NEEDED = (
    "tokens", "model.hidden_size", "model.cond_dim", "model.n_blocks", "model.n_heads", "model.length",
    "model.scale_by_sigma",
)  # fmt: skip
SEDD_REQUIRED: Required = {"graph.type": ("absorb",), "noise.type": ("loglinear",), "model.type": ("ddit",)}
DIT_RENAMES = {
    r"^backbone\.": "",
    r"^vocab_embed\.embedding$": "model.embed_tokens.weight",
    r"^sigma_map\.mlp\.0\.": "model.time_embed.in_proj.",
    r"^sigma_map\.mlp\.2\.": "model.time_embed.out_proj.",
    r"^blocks\.": "model.layers.",
    r"\.norm1\.": ".input_layernorm.",
    r"\.norm2\.": ".post_attention_layernorm.",
    r"\.attn_(qkv|out)\.": r".self_attn.attn_\1.",
    r"\.attn_out\.": ".o_proj.",
    r"\.mlp\.0\.": ".mlp.up_proj.",
    r"\.mlp\.2\.": ".mlp.down_proj.",
    r"\.adaLN_modulation\.": ".modulation.",
    r"^output_layer\.norm_final\.": "model.norm.",
    r"^output_layer\.modulation\.": "model.modulation.",
    r"^output_layer\.linear\.": "lm_head.",
}
DIT_IGNORED = r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|sampling_eps_(min|max))$"
DIT_FUSED = {"attn_qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight")}
LLADA2_RENAMES = {
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    r"\.attention\.dense\.": ".self_attn.o_proj.",
    r"\.attention\.query_layernorm\.": ".self_attn.q_norm.",
    r"\.attention\.key_layernorm\.": ".self_attn.k_norm.",
    r"\.attention\.query_key_value\.": ".self_attn.query_key_value.",
    r"\.mlp\.gate\.expert_bias$": ".mlp.gate.e_score_correction_bias",
}
