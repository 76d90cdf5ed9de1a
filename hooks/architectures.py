"""The module paths of each transformers architecture that the hook points are attached to.

There is one record per architecture, keyed by transformers' ``model_type``. To add an architecture of the Llama kind
(pre-norm blocks with a residual stream, rotary attention through transformers' attention interface, a gated MLP), add
one entry here; the rest of hooks/ does not name modules.
"""

from dataclasses import dataclass

from sinklens.errors import CheckpointError, require


@dataclass(frozen=True)
class Experts:
    """Attribute paths below the MLP of a layer that is a mixture of experts.

    Attributes:
        routing: the rule by which the router chooses experts, in `hooks.experts.ROUTING`.
        router: returns logits, weights and indices of the chosen experts, with batch and position as one axis.
        experts: called with tokens, indices and weights; a layer without this module has a dense MLP.
        shared: the shared expert, which sees every token; "" if the architecture has none.
        logits: below the router, the module that returns the logits; "" if the router returns them first.
        count, chosen: config keys of the number of experts, and of the number that each token is sent to.
        branch: the norms of a layer whose experts stand beside a dense MLP; its router, experts and norms are then
            below the layer. None if the experts replace the MLP.
    """

    routing: str
    router: str = "gate"
    experts: str = "experts"
    shared: str = ""
    logits: str = ""
    count: str = "num_local_experts"
    chosen: str = "num_experts_per_tok"
    branch: "Branch | None" = None


@dataclass(frozen=True)
class Branch:
    """Norms of a layer that adds the outputs of a dense MLP and of experts, below the layer.

    Attributes:
        norm: of what the experts read; the router reads the stream itself.
        dense_post, experts_post: of the two outputs before they are added.
    """

    norm: str
    dense_post: str
    experts_post: str


@dataclass(frozen=True)
class Architecture:
    """Attribute paths into a transformers ``...ForCausalLM`` module.

    Attributes:
        base: the module that computes the last hidden state from ids.
        embed, layers, norm, rotary: below `base`; `rotary` returns cosines and sines of positions, "" without rotation.
        positions: below `base`, the learned embedding of positions; "" without one.
        head: language-model head, on the outer module.
        ln1, attn, ln2, mlp: below a layer; `attn` calls transformers' attention interface.
        q, k, v, o: projections below `attn`.
        fused: below `attn`, the projection that holds q, k and v side by side; they are then its children, which
            split_projection.py makes. "" without one.
        gate, up, down: below `mlp`, computing down(act(gate(x)) * up(x)); with `gate` "", down(act(up(x))).
        eps: name of the norms' epsilon attribute.
        config_eps: config key of that number.
        config_mlp: config key of the MLP's width; None there stands for four times that of the stream.
        centered: the norms subtract the mean (LayerNorm), instead of dividing by the root mean square alone.
        activation: config key of the MLP's activation function.
        q_norm, k_norm: norms of queries and keys below `attn`; "" if the architecture has none. A layer without the
            modules has no such norms.
        qk_norm_last: these norms run after all projections, not each right after its own.
        experts: below `mlp`, in layers whose MLP is a mixture of experts; None if the architecture has none.
        ln1_post, ln2_post: norms of what attention and the MLP add to the stream; "" if the architecture has none.
        values: below `attn`, the module that returns the values, split into heads; "" for the projection `v`. Then
            `v` may be missing from a layer, whose values are made from the output of `k`.
        scalar: below a layer, the number that multiplies its output; "" without one.
        softcap: attribute of the outer module; logits become softcap · tanh(logits / softcap). "" if it has none.
        encoder: a second module like `base`, with the same layers, which reads the text before the canvas and writes
            the keys and values that `base` reads; "" if the architecture has none.
        self_conditioning: below `base`, the module that adds the last step's prediction to the embeddings; "" without
            one.
        time: below `base`, the module that turns the noise level of each row into the vector that modulations are made
            from; "" if the network is not conditioned on it.
        modulation: below a layer and below `base`, the module that makes shifts, scales and gates from that vector.
        modulate: below `base`, the module that applies the last shift and scale.
    """

    base: str = "model"
    embed: str = "embed_tokens"
    positions: str = ""
    layers: str = "layers"
    norm: str = "norm"
    rotary: str = "rotary_emb"
    head: str = "lm_head"
    ln1: str = "input_layernorm"
    attn: str = "self_attn"
    ln2: str = "post_attention_layernorm"
    mlp: str = "mlp"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    fused: str = ""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    eps: str = "variance_epsilon"
    config_eps: str = "rms_norm_eps"
    config_mlp: str = "intermediate_size"
    centered: bool = False
    activation: str = "hidden_act"
    q_norm: str = ""
    k_norm: str = ""
    qk_norm_last: bool = False
    experts: Experts | None = None
    ln1_post: str = ""
    ln2_post: str = ""
    values: str = ""
    scalar: str = ""
    softcap: str = ""
    encoder: str = ""
    self_conditioning: str = ""
    time: str = ""
    modulation: str = ""
    modulate: str = ""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture(),
    "ministral3": Architecture(),
    "qwen3": Architecture(q_norm="q_norm", k_norm="k_norm"),
    "qwen3_moe": Architecture(q_norm="q_norm", k_norm="k_norm", experts=Experts("softmax")),
    "glm4_moe": Architecture(
        q_norm="q_norm",
        k_norm="k_norm",
        qk_norm_last=True,
        experts=Experts("grouped sigmoid", shared="shared_experts"),
    ),
    "diffusion_gemma": Architecture(
        base="model.decoder",
        ln1_post="post_attention_layernorm",
        ln2="pre_feedforward_layernorm",
        ln2_post="post_feedforward_layernorm",
        eps="eps",
        activation="hidden_activation",
        q_norm="q_norm",
        k_norm="k_norm",
        values="v_norm",
        experts=Experts(
            "scaled softmax",
            router="router",
            logits="proj",
            count="num_experts",
            chosen="top_k_experts",
            branch=Branch(
                norm="pre_feedforward_layernorm_2",
                dense_post="post_feedforward_layernorm_1",
                experts_post="post_feedforward_layernorm_2",
            ),
        ),
        scalar="layer_scalar",
        softcap="final_logit_softcapping",
        encoder="model.encoder.language_model",
        self_conditioning="self_conditioning",
    ),
    "gpt2": Architecture(
        base="transformer",
        embed="wte",
        positions="wpe",
        layers="h",
        norm="ln_f",
        rotary="",
        ln1="ln_1",
        attn="attn",
        ln2="ln_2",
        q="c_attn.q",
        k="c_attn.k",
        v="c_attn.v",
        o="c_proj",
        fused="c_attn",
        gate="",
        up="c_fc",
        down="c_proj",
        eps="eps",
        config_eps="layer_norm_epsilon",
        config_mlp="n_inner",
        activation="activation_function",
        centered=True,
    ),
    "adaln_dit": Architecture(
        gate="",
        eps="eps",
        config_eps="layer_norm_eps",
        centered=True,
        time="time_embed",
        modulation="modulation",
        modulate="modulate",
    ),
}


def architecture_of(model_type: str) -> Architecture:
    """The record for a transformers ``model_type``.

    Raises:
        CheckpointError: `model_type` has no record.
    """
    require(
        model_type in ARCHITECTURES,
        f"architecture {model_type!r} has no hook points; known are {', '.join(ARCHITECTURES)}. "
        f"To add one of the Llama kind, pass a record to sinklens.families.register or add an entry to "
        f"hooks/architectures.py (see CONTRIBUTING.md).",
        CheckpointError,
    )
    return ARCHITECTURES[model_type]
