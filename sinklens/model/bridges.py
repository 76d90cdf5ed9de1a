"""Takes over the weights of a TransformerLens `TransformerBridge`.

A bridge replaces modules inside its model, so the weights go into a fresh shell of the transformers class:

- over a transformers model they are shared, not copied;
- over LLaDA's own code they are shared too, under the family's renames, and its config is translated;
- a `boot_native` model of the Llama kind becomes a Llama. Its rotary embedding turns neighboring dimensions where
  Llama's turns halves, so the rows of its queries and keys are reordered, and these are copies.

One way this fails: in a model taken over from `boot_native`, dimension 2i of ``hook_q`` or ``hook_k`` in the bridge is
dimension i here, and 2i + 1 is i + d_head / 2. Scores, patterns and everything else are the same.
"""

import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklens.errors import CheckpointError
from sinklens.families import translate
from sinklens.families.registry import named_family
from sinklens.model import files
from sinklens.model.loading import Checkpoint, build_empty, from_pretrained_model, prepare

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_WHERE = "the TransformerBridge (weights must not be folded or centered)"
_NATIVE_RENAMES = {
    r"^tok_embed\.": "model.embed_tokens.",
    r"^ln_out\.": "model.norm.",
    r"^head\.": "lm_head.",
    r"^layers\.": "model.layers.",
    r"\.ln1\.": ".input_layernorm.",
    r"\.ln2\.": ".post_attention_layernorm.",
    r"\.attn\.([qkvo])\.": r".self_attn.\1_proj.",
    r"\.mlp\.gate\.": ".mlp.gate_proj.",
    r"\.mlp\.in\.": ".mlp.up_proj.",
    r"\.mlp\.out\.": ".mlp.down_proj.",
}


def from_bridge(bridge: Any, tokenizer: Any = None) -> Checkpoint:
    """Take over the weights of a `TransformerBridge`.

    Hooks set on the bridge stay with the bridge; set them on the returned model, where the same names hold.

    Raises:
        CheckpointError: its weights were folded or otherwise processed, so the class cannot hold them, or it is a
            native model that is not of the Llama kind.
    """
    original = bridge.original_model
    weights = {name.replace("._original_component", ""): value for name, value in original.named_parameters()}
    tokenizer = tokenizer if tokenizer is not None else bridge.tokenizer
    if not hasattr(original, "config"):
        config, weights = _native(original.cfg, weights)
        return from_pretrained_model(_filled(config, weights), tokenizer)
    raw = original.config.to_dict()
    family = named_family(raw, "the TransformerBridge")
    if not family.renames:
        return from_pretrained_model(_filled(original.config, weights), tokenizer)
    config = translate(raw, family, "the TransformerBridge")
    name = getattr(original.config, "name_or_path", "") or family.name
    return prepare(
        _filled(config, {files.rename(key, family.renames): value for key, value in weights.items()}),
        tokenizer,
        family,
        raw,
        name,
    )


def _filled(config: "PreTrainedConfig", weights: dict[str, Tensor]) -> "PreTrainedModel":
    """A model of the config's class that holds `weights` themselves.

    Raises:
        CheckpointError: they are not what the class holds.
    """
    from transformers import AutoModelForCausalLM

    shell = build_empty(config)
    expected = {name: tuple(value.shape) for name, value in shell.named_parameters(remove_duplicate=False)}
    tied = set(getattr(shell, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    files.check_weights(files.Weights(shapes, torch.float32, {name: name for name in weights}), expected, tied, _WHERE)
    if parted := sorted(tied & set(weights)):  # named_parameters lists shared weights once, under the first name
        raise CheckpointError(
            f"the config of the TransformerBridge ties its weights, but {', '.join(parted)} has separate values: "
            f"weights must not be folded or centered. Pass the bridge as it was booted."
        )
    first = next(iter(weights.values()))
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=first.dtype, attn_implementation="sdpa")
    hf.load_state_dict(weights, assign=True, strict=not tied)
    hf.tie_weights()
    _materialise_buffers(hf, first.device)
    return hf


def _materialise_buffers(hf: "PreTrainedModel", device: torch.device) -> None:
    """Rebuild what a meta-device model keeps outside its weights: the rotary frequencies."""
    for module in list(hf.modules()):
        for name, child in module.named_children():
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                setattr(module, name, type(child)(config=hf.config).to(device))


def _native(cfg: Any, weights: dict[str, Tensor]) -> tuple["PreTrainedConfig", dict[str, Tensor]]:
    """Config and weights of a `boot_native` model as a Llama.

    Raises:
        CheckpointError: it is not of the Llama kind; names what differs.
    """
    from transformers import LlamaConfig

    _check_native(cfg)
    config = LlamaConfig(
        vocab_size=cfg.d_vocab,
        hidden_size=cfg.d_model,
        intermediate_size=cfg.d_mlp,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
        head_dim=cfg.d_head,
        max_position_embeddings=cfg.n_ctx,
        rms_norm_eps=cfg.eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(cfg.rotary_base)},
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.is_causal = cfg.attention_dir == "causal"
    renamed = {files.rename(name, _NATIVE_RENAMES): value for name, value in weights.items()}
    return config, {name: _halved(name, value, cfg.d_head) for name, value in renamed.items()}


def _check_native(cfg: Any) -> None:
    own_scale = not cfg.use_attn_scale or cfg.attn_scale <= 0 or math.isclose(cfg.attn_scale, math.sqrt(cfg.d_head))
    needed = {
        "normalization_type": (str(cfg.normalization_type), "RMS"),
        "gated_mlp": (cfg.gated_mlp, True),
        "act_fn": (str(cfg.act_fn).lower().replace("swish", "silu"), "silu"),
        "positional_embedding_type": (str(cfg.positional_embedding_type).lower(), "rotary"),
        "rotary_dim": (cfg.rotary_dim or cfg.d_head, cfg.d_head),
        "rope_scaling": (getattr(cfg, "rope_scaling", None), None),
        "attn_only": (bool(cfg.attn_only), False),
        "attn_scale": (cfg.attn_scale if not own_scale else -1, -1),
        "attn_scores_soft_cap": (max(cfg.attn_scores_soft_cap, -1), -1),
        "output_logits_soft_cap": (max(cfg.output_logits_soft_cap, -1), -1),
    }
    differing = [f"{key} = {value!r}, not {allowed!r}" for key, (value, allowed) in needed.items() if value != allowed]
    if differing:
        raise CheckpointError(
            f"a native TransformerLens model is taken over where it is of the Llama kind; this one has "
            f"{'; '.join(differing)}. Boot it with those settings, or give a transformers LlamaForCausalLM."
        )


def _halved(name: str, value: Tensor, d_head: int) -> Tensor:
    """Rows of queries and keys, their rotated pairs moved from (2i, 2i + 1) to (i, i + d_head / 2)."""
    if not re.search(r"\.[qk]_proj\.", name):
        return value
    pairs = value.detach().unflatten(0, (-1, d_head // 2, 2))
    return torch.nn.Parameter(pairs.transpose(1, 2).reshape(value.shape).clone())
