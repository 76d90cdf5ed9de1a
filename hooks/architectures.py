"""Where each transformers architecture keeps the modules that the hook points stand on.

One record per architecture, keyed by transformers' ``model_type``. A new architecture of the Llama kind (pre-norm
blocks with a residual stream, rotary attention through transformers' attention interface, a gated MLP) is one entry
here; nothing else in hooks/ knows a name of a module.
"""

from dataclasses import dataclass

from sinklens.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """Attribute paths into a transformers ``...ForCausalLM`` module.

    Attributes:
        base: the module that turns ids into the last hidden state.
        embed, layers, norm: below `base`.
        head: language-model head, on the outer module.
        ln1, attn, ln2, mlp: below a layer; `attn` calls transformers' attention interface.
        q, k, v, o: projections below `attn`.
        gate, up, down: below `mlp`, computing down(act(gate(x)) * up(x)).
        eps: attribute of the norms that holds their epsilon.
    """

    base: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    ln1: str = "input_layernorm"
    attn: str = "self_attn"
    ln2: str = "post_attention_layernorm"
    mlp: str = "mlp"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    eps: str = "variance_epsilon"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
}


def architecture_of(model_type: str) -> Architecture:
    """The record for a transformers ``model_type``.

    Raises:
        CheckpointError: there is none.
    """
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {model_type!r} has no hook points; known are {', '.join(ARCHITECTURES)}. "
            f"One of the Llama kind is added by one record: sinklens.checkpoints.register, or an entry in "
            f"hooks/architectures.py (see CONTRIBUTING.md)."
        )
    return ARCHITECTURES[model_type]
