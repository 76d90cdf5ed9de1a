"""Tiny random models, and their forward pass in plain torch for tests to compare with.

`plain_pass` shares no code with sinklens or transformers: it reads the weights and writes every formula out. It hands
each value to an edit under the name of its hook point, so one function says what every point should show, in which
order, and what editing it should do.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sinklens.families import Family
from sinklens.model import Model, fetching, load
from sinklens.model.loading import prepare
from training.tokenizer import train_tokenizer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "mask_token_id": 60,
}
KINDS = [(architecture, causal) for architecture in ("llama", "qwen2", "qwen3") for causal in (False, True)]
EACH = [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)]
"""Every architecture and both directions, for properties that do not depend on their combination; tests of the hook
points themselves use `KINDS`."""
EXPERTS = {
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "first_k_dense_replace": 1,
    },
}  # fmt: skip
"""Sizes of architectures with experts; their first layer has a dense MLP."""
MIXED = [("qwen3_moe", False), ("qwen3_moe", True), ("glm4_moe", False), ("glm4_moe", True)]

Edit = Callable[[Tensor], Tensor]

NEEDS_BASE = pytest.mark.skipif(not fetching.is_fetched(), reason="needs `sinklens fetch smollm2-135m`")


def random_hf(
    architecture: str = "llama", causal: bool = False, dtype: torch.dtype = torch.float32, **settings: Any
) -> PreTrainedModel:
    """A transformers model with random weights and grouped key/value heads, always the same."""
    config = CONFIG_MAPPING[architecture](**SIZES | EXPERTS.get(architecture, {}) | settings)
    config.is_causal = causal
    with torch.random.fork_rng():
        torch.manual_seed(11)
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in hf.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide one that is left out
                parameter.data.uniform_(0.5, 1.5)
        for name, buffer in hf.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data.uniform_(-1.0, 0.0)
    return hf.eval()


def random_model(architecture: str = "llama", causal: bool = False, **settings: Any) -> Model:
    """`random_hf` as sinklens loads it; architectures with experts belong to a family of this file."""
    hf = random_hf(architecture, causal, **settings)
    if architecture not in EXPERTS:
        return load(hf)
    sampler = "autoregressive" if causal else "llada"
    family = Family("random", (), architecture, sampler, "not at all", causal=causal, mask_token_id=60)
    return Model(prepare(hf, None, family, hf.config.to_dict(), "random"))


@cache
def shared_model(architecture: str = "llama", causal: bool = False) -> Model:
    """One `random_model` for all tests that leave its weights alone."""
    return random_model(architecture, causal)


VARIANTS = {
    "biases": lambda: random_model("llama", attention_bias=True),
    "grouped": lambda: shared_model("qwen2", True),
    "normed": lambda: shared_model("qwen3"),
    "experts": lambda: shared_model("glm4_moe"),
}
"""What the parts of a layer may have besides: biases, groups of heads, norms of queries and keys, experts."""


def small_tokenizer(folder: Path) -> Any:
    """A tokenizer, written to `folder` and read from there."""
    train_tokenizer(problems=500).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def bridge_over(hf: PreTrainedModel, folder: Path) -> Any:
    """TransformerLens's bridge over `hf`, a Llama, which it takes apart; `folder` is for its tokenizer's files."""
    from transformer_lens.model_bridge.sources.transformers import boot

    return boot("meta-llama/Llama-3.1-8B", hf_model=hf, tokenizer=small_tokenizer(folder))


def random_ids(batch: int = 2, length: int = 7) -> Tensor:
    """Token ids without the mask token."""
    return torch.randint(0, SIZES["vocab_size"] - 1, (batch, length))


def left_padding(batch: int = 2, length: int = 7, padded: int = 3) -> Tensor:
    """An attention mask whose first row starts with `padded` padding tokens."""
    real = torch.ones(batch, length, dtype=torch.bool)
    real[0, :padded] = False
    return real


class PlainPass(NamedTuple):
    """What `plain_pass` computes.

    Attributes:
        logits: [batch, pos, vocab].
        values: by name of the hook point, after its edit, in the order the pass reaches them.
    """

    logits: Tensor
    values: dict[str, Tensor]


def plain_pass(
    model: Model, ids: Tensor, real: Tensor | None = None, edits: Mapping[str, Edit] | None = None
) -> PlainPass:
    """One pass of `model` in plain torch.

    Args:
        real: False on padding.
        edits: hook point -> function applied to its value on the way.
    """
    hf: Any = model.tree.hf
    values: dict[str, Tensor] = {}

    def point(name: str, value: Tensor) -> Tensor:
        values[name] = value if edits is None or name not in edits else edits[name](value)
        return values[name]

    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    seen = real[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
    if hf.config.is_causal:
        seen = seen & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    if size := getattr(hf.config, "sinklens_block_length", None):
        seen = seen & block_causal(real, size)
    stream = point("hook_embed", hf.model.embed_tokens.weight[ids])
    for number, layer in enumerate(hf.model.layers):
        at = f"blocks.{number}"
        stream = point(f"{at}.hook_resid_pre", stream)
        normed = _norm(layer.input_layernorm, stream, f"{at}.ln1", point)
        attn_out = _attention(layer.self_attn, normed, real, seen, hf.config, f"{at}.attn", point)
        stream = point(f"{at}.hook_resid_mid", stream + point(f"{at}.hook_attn_out", attn_out))
        normed = _norm(layer.post_attention_layernorm, stream, f"{at}.ln2", point)
        mlp_out = (_mixture if hasattr(layer.mlp, "experts") else _mlp)(layer.mlp, normed, f"{at}.mlp", point)
        stream = point(f"{at}.hook_resid_post", stream + point(f"{at}.hook_mlp_out", mlp_out))
    return PlainPass(_norm(hf.model.norm, stream, "ln_final", point) @ hf.lm_head.weight.T, values)


def put(index: Any, new: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """An edit that puts `new`, of the value, at an index."""

    def edit(value: Tensor) -> Tensor:
        value = value.clone()
        value[index] = new(value)
        return value

    return edit


def block_causal(real: Tensor, size: int) -> Tensor:
    """Which keys a query sees, [batch, 1, query, key]: those of its block of `size` tokens and of earlier blocks."""
    seen = torch.zeros(len(real), 1, real.shape[1], real.shape[1], dtype=torch.bool)
    for row in range(len(real)):
        tokens = real[row].nonzero()[:, 0].tolist()
        for query, key in itertools.product(range(len(tokens)), repeat=2):
            seen[row, 0, tokens[query], tokens[key]] = key // size <= query // size
    return seen


def _norm(norm: Any, x: Tensor, at: str, point: Callable[[str, Tensor], Tensor]) -> Tensor:
    scale = point(f"{at}.hook_scale", ((x * x).mean(-1, keepdim=True) + norm.variance_epsilon) ** 0.5)
    return point(f"{at}.hook_normalized", x / scale) * norm.weight


def _mlp(mlp: Any, x: Tensor, at: str, point: Callable[[str, Tensor], Tensor]) -> Tensor:
    gate = point(f"{at}.hook_pre", x @ mlp.gate_proj.weight.T)
    linear = point(f"{at}.hook_pre_linear", x @ mlp.up_proj.weight.T)
    return point(f"{at}.hook_post", gate / (1 + (-gate).exp()) * linear) @ mlp.down_proj.weight.T


def _mixture(mlp: Any, x: Tensor, at: str, point: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Token by token and expert by expert."""
    logits = point(f"{at}.hook_router_logits", x @ mlp.gate.weight.T)
    scores = _scores_of_experts(mlp.gate, logits)
    in_order = not hasattr(mlp.gate, "num_group")
    indices = point(f"{at}.hook_expert_indices", scores.topk(mlp.gate.top_k, dim=-1, sorted=in_order).indices)
    weights = point(f"{at}.hook_expert_weights", _weights_of_experts(mlp.gate, logits, indices))
    out = torch.zeros(*indices.shape, x.shape[-1])
    for place in torch.cartesian_prod(*map(torch.arange, indices.shape)).tolist():
        token, expert = x[tuple(place[:2])], int(indices[tuple(place)])
        gate, up = (mlp.experts.gate_up_proj[expert] @ token).chunk(2)
        out[tuple(place)] = mlp.experts.down_proj[expert] @ (gate / (1 + (-gate).exp()) * up)
    mixed = (point(f"{at}.hook_expert_out", out) * weights[..., None]).sum(2)
    if not hasattr(mlp, "shared_experts"):
        return mixed
    return mixed + point(f"{at}.hook_shared_out", _mlp(mlp.shared_experts, x, "", lambda _, value: value))


def _scores_of_experts(gate: Any, logits: Tensor) -> Tensor:
    """What the choice of experts goes by; -inf in the groups that are out."""
    if not hasattr(gate, "num_group"):
        return logits
    chosen_by = 1 / (1 + (-logits).exp()) + gate.e_score_correction_bias
    groups = chosen_by.unflatten(-1, (gate.num_group, -1))
    strength = groups.sort(dim=-1).values[..., -2:].sum(-1)
    least = strength.sort(dim=-1).values[..., -gate.topk_group, None]
    return torch.where((strength >= least)[..., None], groups, -torch.inf).flatten(-2)


def _weights_of_experts(gate: Any, logits: Tensor, indices: Tensor) -> Tensor:
    if hasattr(gate, "num_group"):
        weights = (1 / (1 + (-logits).exp())).gather(-1, indices)
        return gate.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
    weights = (logits.exp() / logits.exp().sum(-1, keepdim=True)).gather(-1, indices)
    return weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights


def _attention(
    attn: Any, x: Tensor, real: Tensor, seen: Tensor, config: Any, at: str, point: Callable[[str, Tensor], Tensor]
) -> Tensor:
    heads = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    norms = {letter: getattr(attn, f"{letter}_norm", None) for letter in "qkv"}

    def normed(letter: str, value: Tensor) -> Tensor:
        if norms[letter] is None:
            return value
        return point(f"{at}.hook_{letter}_normed", _norm(norms[letter], value, "", lambda _, value: value))

    def projected(letter: str) -> Tensor:
        return point(f"{at}.hook_{letter}", _linear(getattr(attn, f"{letter}_proj"), x).unflatten(-1, (-1, d_head)))

    if config.model_type == "glm4_moe":  # all projections before the norms
        q, k, v = (projected(letter) for letter in "qkv")
        q, k = normed("q", q), normed("k", k)
    else:
        q, k, v = (normed(letter, projected(letter)) for letter in "qkv")
    point(f"{at}.hook_fresh", real)
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    rotated = int(d_head * config.rope_parameters.get("partial_rotary_factor", 1))
    q, k = (
        point(f"{at}.hook_rot_{letter}", _rotate(value, positions, config.rope_parameters["rope_theta"], rotated))
        for letter, value in (("q", q), ("k", k))
    )
    group = heads // config.num_key_value_heads
    k, v = (torch.stack([value[:, :, head // group] for head in range(heads)], dim=2) for value in (k, v))
    bias = point(f"{at}.hook_attn_mask", torch.zeros(len(x), heads, 1, x.shape[1]))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / d_head**0.5
    scores = point(f"{at}.hook_attn_scores", torch.where(seen, scores + bias, -torch.inf))
    weights = _weights(scores, seen.sum(-1, keepdim=True), getattr(config, "sinklens_attention", "softmax"))
    pattern = point(f"{at}.hook_pattern", weights * real[:, None, :, None])
    point(f"{at}.hook_sink_scores", (pattern * real[:, None, :, None]).sum(2))
    z = point(f"{at}.hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))
    weight = attn.o_proj.weight.T.unflatten(0, (heads, d_head))
    result = point(f"{at}.hook_result", torch.einsum("bqhd,hdm->bqhm", z, weight))
    return result.sum(2) if attn.o_proj.bias is None else result.sum(2) + attn.o_proj.bias


def _weights(scores: Tensor, visible: Tensor, way: str) -> Tensor:
    """Attention weights: 1 / (1 + n · e^(−s)) by sigmoid, and softmax with or without a 1 more below the line."""
    if way == "sigmoid":
        return 1 / (1 + visible.clamp(min=1) * (-scores).exp())
    greatest = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - greatest).exp()
    nowhere = (-greatest).exp() if way == "off-by-one" else 0.0
    return weights / (weights.sum(-1, keepdim=True) + nowhere).clamp(min=1e-30)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight.T if module.bias is None else x @ module.weight.T + module.bias


def _rotate(x: Tensor, positions: Tensor, theta: float, rotated: int) -> Tensor:
    """Rotary embedding of the first dimensions: i turns with i + d/2 by position · theta^(−2i/d)."""
    x, kept = x[..., :rotated], x[..., rotated:]
    half = rotated // 2
    angle = positions[:, :, None, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    return torch.cat([*turned, kept], dim=-1)


def random_dit(family: str, vocab_size: int = 5, block_length: int | None = None, **settings: Any) -> Model:
    """A random network with a noise level, of one of its families; a new network would give logits of 0."""
    from sinklens.families import family_named
    from sinklens.families.dit import DitConfig
    from sinklens.hooks.attention.blocks import Blocks

    sizes = {"hidden_size": 16, "cond_dim": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": vocab_size, "max_position_embeddings": 32, "scale_by_sigma": family == "sedd"}
    own = {"p_uniform": 0.2, "t_eps": 1e-4} if family == "gidd" else {}
    hf = AutoModelForCausalLM.from_config(DitConfig(**sizes | own | settings))
    generator = torch.Generator().manual_seed(5)
    for parameter in hf.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * (0.4 if parameter.ndim > 1 else 0.7)
    blocks = None if block_length is None else Blocks(block_length, "column")
    given = hf.config.to_dict() | ({"mask_token_id": vocab_size - 1} if family == "gidd" else {})
    return Model(prepare(hf.eval(), None, family_named(family), given, "random", blocks=blocks))


PADDINGS = [pytest.param(None, id="unpadded"), pytest.param(left_padding(), id="padded")]


def close(found, expected, atol=1e-4, rtol=1e-5):
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
