"""What the families of dit.py share: their record, and how MDLM, BD3-LM and Duo name its sizes in config.json."""

from typing import Any

from sinklens.families.base import Family, Required

DIT_NEEDED = ("vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads")
DIT_IGNORED = r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|sampling_eps_(min|max))$"
DIT_REQUIRED: Required = {"causal": (False,), "adaln": (True,), "rope_theta": (10000,)}
DIT_ROTATION: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """The config of MDLM, BD3-LM or Duo, with dit.py's keys. Duo has no ``time_conditioning``: it is always timed."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_dim"],
        "cond_dim": config["cond_dim"],
        "num_hidden_layers": config["n_blocks"],
        "num_attention_heads": config["n_heads"],
        "max_position_embeddings": config["model_length"],
        "time_conditioning": config.get("time_conditioning", True),
        **DIT_ROTATION,
    }


DIT = Family(
    name="",
    model_types=(),
    architecture="adaln_dit",
    sampler="",
    verified="logits, patterns, stream, modulation and, given its random numbers, canvases equal the reference code's "
    "on tiny weights",
    convert=converted,
    renames={
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
    },
    ignored=DIT_IGNORED,
    foreign=r"(?!backbone\.)|backbone\.rotary_emb\.(cos|sin)_cached$",
    required=DIT_REQUIRED,
    fused={"attn_qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight")},
    module="sinklens.families.dit",
    drawn=True,
    unconditional=True,
)
