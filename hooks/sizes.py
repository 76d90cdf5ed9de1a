"""The sizes of a model's axes, as TransformerLens's helpers read them from ``cfg``.

Pitfall: `Sizes` is made when the tree is built; a model that is moved later has another device. `Model.cfg` is current.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from sinklens.errors import SinklensError
from sinklens.hooks.architectures import Architecture
from sinklens.hooks.offload import device_of


@dataclass(frozen=True)
class Sizes:
    """Axis lengths and switches, under the names that TransformerLens's helpers read from ``cfg``.

    Where layers differ, `d_head` and `n_key_value_heads` are those of layer 0. `tokenizer_prepends_bos` is True if the
    model has a tokenizer that adds a start token to text.
    """

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    model_name: str
    device: torch.device
    dtype: torch.dtype
    act_fn: str = "silu"
    eps: float = 1e-6
    num_experts: int | None = None
    experts_per_token: int | None = None
    d_cond: int | None = None
    normalization_type: str = "RMS"
    positional_embedding_type: str = "rotary"
    default_prepend_bos: bool = False
    tokenizer_prepends_bos: bool = False
    attn_only: bool = False
    final_rms: bool = True
    gated_mlp: bool = True
    use_attn_result: bool = True
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False

    @property
    def attn_scale(self) -> float:
        """Divisor of the attention scores, √d_head."""
        return float(self.d_head**0.5)

    @property
    def d_vocab_out(self) -> int:
        """Size of the logits' last axis."""
        return self.d_vocab

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def sizes_of(hf: PreTrainedModel, architecture: Architecture) -> Sizes:
    """The sizes of a transformers model.

    Raises:
        SinklensError: the model has no parameters.
    """
    config: Any = hf.config.get_text_config()
    layer, experts = config.per_layer_config[0], architecture.experts
    first = next(hf.parameters(), None)
    if first is None:
        raise SinklensError("the model has no parameters; give a loaded transformers model.")
    return Sizes(
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_key_value_heads=getattr(layer, "num_key_value_heads", config.num_attention_heads),
        d_model=config.hidden_size,
        d_head=getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        d_mlp=getattr(config, architecture.config_mlp) or 4 * config.hidden_size,
        d_vocab=config.vocab_size,
        n_ctx=config.max_position_embeddings,
        model_name=getattr(hf.config, "name_or_path", "") or hf.config.model_type,
        device=device_of(hf.get_input_embeddings()),
        dtype=first.dtype,
        act_fn=getattr(config, architecture.activation),
        eps=getattr(config, architecture.config_eps),
        normalization_type="LN" if architecture.centered else "RMS",
        final_rms=not architecture.centered,
        gated_mlp=bool(architecture.gate),
        positional_embedding_type="rotary" if architecture.rotary else "standard",
        num_experts=getattr(config, experts.count, None) if experts else None,
        experts_per_token=getattr(config, experts.chosen, None) if experts else None,
        d_cond=getattr(config, "cond_dim", None) if architecture.time else None,
    )
