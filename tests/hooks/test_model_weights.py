"""Circuits, rotations and grouped heads of the stacked weights, compared with the points of a pass."""

import pytest
import torch
from building import SIZES, close, random_ids, random_model, shared_model

from sinklens.errors import SettingError
from sinklens.hooks.rotary import rotations

KINDS = [("llama", False), ("qwen2", True), ("qwen3", False), ("glm4_moe", False)]
"""Without biases, with them, with norms of queries and keys, and with a rotation of half the dimensions."""
HEADS, KV_HEADS, D_HEAD = 6, 2, SIZES["head_dim"]
PAIRS = [(0, 0), (5, 2), (6, 1), (4, 4)]


@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_queries_times_the_rotation_times_keys_are_the_scores(architecture, causal):
    model = shared_model(architecture, causal)
    cache = model.run_with_cache(random_ids())[1]
    turn = rotations(model.tree, torch.arange(max(max(PAIRS)) + 1))
    for layer, block in enumerate(model.blocks):
        stream = cache[f"blocks.{layer}.ln1.hook_normalized"] * block.ln1.w
        q, k = (
            torch.einsum("bpm,hmd->bphd", stream, weight) + bias
            for weight, bias in ((model.W_Q[layer], model.b_Q[layer]), (model.W_K[layer], model.b_K[layer]))
        )
        for letter, norm in (("q", block.attn.q_norm), ("k", block.attn.k_norm)):
            assert (norm is None) == (architecture in ("llama", "qwen2"))
            if norm is not None:
                raw = {"q": q, "k": k}[letter]
                normed = raw / (raw.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.w
                close(normed, norm(raw))
                q, k = (normed, k) if letter == "q" else (q, normed)
        for query, key in PAIRS:
            for head in range(HEADS):
                score = q[:, query, head] @ turn[query] @ turn[key].T * k[:, key, head // (HEADS // KV_HEADS)]
                close(score.sum(-1) / model.cfg.attn_scale, cache["attn_scores", layer][:, head, query, key])


def test_grouped_heads_are_repeated_on_request():
    model = shared_model("qwen2")
    for name in ("W_K", "W_V", "b_K", "b_V"):
        grouped, expanded = getattr(model, name), model.expand_kv_heads(getattr(model, name))
        assert expanded.shape == (3, HEADS, *grouped.shape[2:])
        for head in range(HEADS):
            assert torch.equal(expanded[:, head], grouped[:, head // (HEADS // KV_HEADS)])
    with pytest.raises(SettingError, match=r"with 2 key/value heads, such as model.W_K; got \[3, 6, 24, 4\]"):
        model.expand_kv_heads(model.W_Q)


def test_layers_of_different_shape_are_not_stacked():
    model = random_model()
    wide = torch.nn.Linear(SIZES["hidden_size"], 2 * HEADS * D_HEAD, bias=False)
    model.tree.blocks[2].attn.__dict__["_projections"][0]["q"] = wide
    with pytest.raises(SettingError, match=r"W_Q cannot be stacked.*\[6, 24, 4\] from layer 0, \[12, 24, 4\] from lay"):
        _ = model.W_Q
    assert model.blocks[2].attn.W_Q.shape == (2 * HEADS, SIZES["hidden_size"], D_HEAD)
