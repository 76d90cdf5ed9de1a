"""The module paths of each transformers architecture that the hook points are attached to.

There is one record per architecture, keyed by transformers' ``model_type``. To add an architecture of the Llama kind
(pre-norm blocks with a residual stream, rotary attention through transformers' attention interface, a gated MLP), add
one entry here; the rest of hooks/ does not name modules.
"""

from dataclasses import dataclass

from sinklens.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """Attribute paths into a transformers ``...ForCausalLM`` module.

    Attributes:
        base: the module that computes the last hidden state from ids.
        embed, layers, norm: below `base`.
        head: language-model head, on the outer module.
        ln1, attn, ln2, mlp: below a layer; `attn` calls transformers' attention interface.
        q, k, v, o: projections below `attn`.
        gate, up, down: below `mlp`, computing down(act(gate(x)) * up(x)).
        eps: name of the norms' epsilon attribute.
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
        CheckpointError: `model_type` has no record.
    """
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {model_type!r} has no hook points; known are {', '.join(ARCHITECTURES)}. "
            f"To add one of the Llama kind, pass a record to sinklens.checkpoints.register or add an entry to "
            f"hooks/architectures.py (see CONTRIBUTING.md)."
        )
    return ARCHITECTURES[model_type]
