"""A circuit in plain torch: every receiver gets its own stream, the sum of what the senders write to it.

Written from the definition, with a stream of its own for every receiver; nothing of sinklens computes.
"""

from collections.abc import Callable
from typing import Any

import torch
from building import _attention, _mlp, _norm, plain_pass
from torch import Tensor


def _writes(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What every sender writes in a plain pass."""
    values, found = plain_pass(model, ids).values, {}
    found["embed"] = values["hook_embed"]
    for layer in range(len(model.tree.hf.model.layers)):
        result = values[f"blocks.{layer}.attn.hook_result"]
        found |= {f"L{layer}H{head}": result[:, :, head] for head in range(result.shape[2])}
        found[f"{layer}_mlp_out"] = values[f"blocks.{layer}.hook_mlp_out"]
    return found


def alone(model: Any, clean: Tensor, corrupted: Tensor, keeps: Callable[[str, str, int], bool]) -> Tensor:
    """Logits of the clean pass of a Llama without biases, edges that are not kept from the corrupted one.

    Args:
        keeps: sender, receiver and position -> whether the edge is kept.
    """
    hf, other, now = model.tree.hf, _writes(model, corrupted), {}
    config, real = hf.config, torch.ones_like(clean, dtype=torch.bool)
    seen = real[:, None, None, :].expand(-1, 1, clean.shape[1], -1)
    now["embed"] = hf.model.embed_tokens.weight[clean]

    def stream(receiver: str) -> Tensor:
        total = torch.zeros_like(now["embed"])
        for sender, value in now.items():
            for pos in range(clean.shape[1]):
                total[:, pos] += (value if keeps(sender, receiver, pos) else other[sender])[:, pos]
        return total

    for number, layer in enumerate(hf.model.layers):
        at = f"blocks.{number}"

        def heads(letter: str, count: int, layer: Any = layer, number: int = number, at: str = at) -> Tensor:
            found = []
            for head in range(count):
                caught: dict[str, Tensor] = {}
                normed = _norm(layer.input_layernorm, stream(f"L{number}H{head}.{letter}"), "", lambda _, value: value)
                _attention(layer.self_attn, normed, real, seen, config, at, lambda n, v, c=caught: c.setdefault(n, v))
                found.append(caught[f"{at}.hook_{letter}"][:, :, head])
            return torch.stack(found, dim=2)

        groups = config.num_key_value_heads
        given = {"q": heads("q", config.num_attention_heads), "k": heads("k", groups), "v": heads("v", groups)}
        values: dict[str, Tensor] = {}

        def put(name: str, value: Tensor, given: Any = given, values: Any = values, at: str = at) -> Tensor:
            values[name] = given.get(name.removeprefix(f"{at}.hook_"), value)
            return values[name]

        _attention(layer.self_attn, now["embed"], real, seen, config, at, put)
        result = values[f"{at}.hook_result"]
        now |= {f"L{number}H{head}": result[:, :, head] for head in range(result.shape[2])}
        normed = _norm(layer.post_attention_layernorm, stream(f"{number}_mlp_in"), "", lambda _, value: value)
        now[f"{number}_mlp_out"] = _mlp(layer.mlp, normed, "", lambda _, value: value)
    return _norm(hf.model.norm, stream("logits"), "", lambda _, value: value) @ hf.lm_head.weight.T
