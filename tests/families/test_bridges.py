"""Bridges over other code than transformers': TransformerLens's native models, and LLaDA's own class."""

from types import SimpleNamespace

import pytest
import torch
from building import random_hf, random_ids
from layouts import public_config, public_weights
from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

import sinklens
from sinklens.errors import CheckpointError

NATIVE = {
    "n_layers": 2,
    "d_model": 16,
    "n_ctx": 12,
    "d_head": 4,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_vocab": 32,
    "d_mlp": 24,
    "act_fn": "silu",
    "normalization_type": "RMS",
    "gated_mlp": True,
    "positional_embedding_type": "rotary",
}


def native_bridge(**settings):
    """A native bridge whose weights are all different from those it starts with."""
    bridge = TransformerBridge.boot_native(TransformerBridgeConfig(**NATIVE | settings))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in bridge.original_model.parameters():
            parameter.data.uniform_(-0.5, 1.5) if parameter.ndim == 1 else parameter.data.normal_(std=0.4)
    return bridge


@pytest.mark.parametrize("settings", [{}, {"n_key_value_heads": None, "rotary_base": 500, "d_head": 6}])
def test_a_native_bridge_of_the_llama_kind_computes_here_what_it_computes_there(settings):
    bridge, ids = native_bridge(**settings), random_ids() % 32
    expected, theirs = bridge.run_with_cache(ids)
    logits, ours = sinklens.load(bridge).run_with_cache(ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for name in (
        "hook_resid_post",
        "attn.hook_pattern",
        "attn.hook_v",
        "attn.hook_z",
        "mlp.hook_post",
        "ln2.hook_scale",
    ):
        shown, wanted = ours[f"blocks.1.{name}"], theirs[f"blocks.1.{name}"]
        torch.testing.assert_close(shown, wanted, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_the_rotated_halves_of_a_native_bridges_queries_are_its_pairs():
    bridge, ids = native_bridge(), random_ids() % 32
    theirs, ours = bridge.run_with_cache(ids)[1], sinklens.load(bridge).run_with_cache(ids)[1]
    for name in ("blocks.0.attn.hook_q", "blocks.0.attn.hook_k"):
        torch.testing.assert_close(ours[name][..., :2], theirs[name][..., 0::2], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours[name][..., 2:], theirs[name][..., 1::2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"normalization_type": "LN"}, "normalization_type = 'LN', not 'RMS'"),
        ({"gated_mlp": False, "act_fn": "gelu"}, "gated_mlp = False, not True; act_fn = 'gelu', not 'silu'"),
        ({"positional_embedding_type": "standard"}, "positional_embedding_type = 'standard', not 'rotary'"),
        ({"rotary_dim": 2}, "rotary_dim = 2, not 4"),
        ({"output_logits_soft_cap": 5.0}, r"output_logits_soft_cap = 5\.0, not -1"),
    ],
)
def test_a_native_bridge_of_another_kind_is_refused_by_what_differs(settings, text):
    with pytest.raises(CheckpointError, match=f"{text}.*give a transformers LlamaForCausalLM"):
        sinklens.load(native_bridge(**settings))


class Nested(nn.Module):
    """Parameters under dotted names."""

    def put(self, name, value):
        first, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(first, nn.Parameter(value))
            return
        if first not in self._modules:
            self.add_module(first, Nested())
        self._modules[first].put(rest, value)


def llada_bridge(hf):
    """What `from_bridge` reads of a bridge over LLaDA's own class, which is code of its checkpoint and not run here."""
    original = Nested()
    for name, value in public_weights("llada", hf).items():
        original.put(name.replace(".weight", "._original_component.weight"), value)
    config = public_config("llada", hf)
    original.config = SimpleNamespace(to_dict=lambda: config)
    return SimpleNamespace(original_model=original, tokenizer=None)


def test_a_bridge_over_llada_is_taken_over_as_llada_and_shares_its_weights():
    hf, ids = random_hf(num_key_value_heads=6), random_ids()
    bridge = llada_bridge(hf)
    model = sinklens.load(bridge)
    expected = sinklens.load(hf)(ids)
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    assert (model.family, model.mask_token_id, model.config.is_causal) == ("llada", 60, False)
    held = {parameter.data_ptr() for parameter in bridge.original_model.parameters()}
    assert {parameter.data_ptr() for parameter in model.tree.hf.parameters()} == held
