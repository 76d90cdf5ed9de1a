"""The module paths of each transformers architecture that the hook points are attached to.

There is one record per architecture, keyed by transformers' ``model_type``. To add an architecture of the Llama kind
(pre-norm blocks with a residual stream, rotary attention through transformers' attention interface, a gated MLP), add
one entry here; the rest of hooks/ does not name modules.
"""

from dataclasses import dataclass

from sinklens.errors import CheckpointError


@dataclass(frozen=True)
class Experts:
    """Attribute paths below the MLP of a layer that is a mixture of experts.

    Attributes:
        routing: the rule by which the router chooses experts, in `hooks.experts.ROUTING`.
        router: returns logits, weights and indices of the chosen experts, with batch and position as one axis.
        experts: called with tokens, indices and weights; a layer without this module has a dense MLP.
        shared: the shared expert, which sees every token; "" if the architecture has none.
    """

    routing: str
    router: str = "gate"
    experts: str = "experts"
    shared: str = ""


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
        q_norm, k_norm: norms of queries and keys below `attn`; "" if the architecture has none. A layer without the
            modules has no such norms.
        qk_norm_last: these norms follow all projections, and not each its own.
        experts: below `mlp`, in layers whose MLP is a mixture of experts; None if the architecture has none.
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
    q_norm: str = ""
    k_norm: str = ""
    qk_norm_last: bool = False
    experts: Experts | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(q_norm="q_norm", k_norm="k_norm"),
    "qwen3_moe": Architecture(q_norm="q_norm", k_norm="k_norm", experts=Experts("softmax")),
    "glm4_moe": Architecture(
        q_norm="q_norm",
        k_norm="k_norm",
        qk_norm_last=True,
        experts=Experts("grouped sigmoid", shared="shared_experts"),
    ),
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
