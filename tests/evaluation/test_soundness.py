"""Each planted damage is noticed by the check that is for it, and no shipped model is suspected."""

from functools import partial

import pytest
import torch
from torch import nn

import sinklens
from sinklens.evaluation.soundness import changes, damage_checks, layer_check
from sinklens.model.files import shipped_names

UNDONE = "undone damage"


def transposed(name, layer, layers, hf):
    weight = layers[layer].get_submodule(name).weight
    weight.data = weight.data.T.contiguous()


def exchanged(one, other, which, layers, hf):
    for layer in layers[which]:
        for mine, theirs in zip(*(layer.get_submodule(name).parameters() for name in (one, other)), strict=True):
            mine.data, theirs.data = theirs.data, mine.data


def theta(layers, hf):
    rotary = hf.model.rotary_emb
    size = len(rotary.inv_freq)
    rotary.inv_freq = rotary.inv_freq * 50.0 ** (-torch.arange(size) / size)


def epsilon(layers, hf):
    for module in hf.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-2


def zero(layers, hf):
    for weight in layers[2].parameters():
        weight.data.zero_()


def scaled(name, factor, layers, hf):
    layers[1].get_submodule(name).weight.data.mul_(factor)


def random(layers, hf):
    torch.manual_seed(0)
    for module in hf.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.05)


Q, K, OUT = "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"
DAMAGES = {
    "transposed q": (partial(transposed, Q, 1), UNDONE, "layers.1: self_attn.q_proj transposed"),
    "transposed o": (partial(transposed, OUT, 2), UNDONE, "layers.2: self_attn.o_proj transposed"),
    "q and k": (partial(exchanged, Q, K, slice(1, 2)), UNDONE, "layers.1: self_attn.q_proj and self_attn.k_proj"),
    "q and k everywhere": (partial(exchanged, Q, K, slice(None)), UNDONE, "k_proj exchanged in all layers"),
    "gate and up": (partial(exchanged, "mlp.gate_proj", "mlp.up_proj", slice(0, 1)), UNDONE, "layers.0: mlp.gate_proj"),
    "theta": (theta, UNDONE, "rope theta times 0.02"),
    "epsilon": (epsilon, UNDONE, "epsilon 1e-06"),
    "a zero layer": (zero, "layers", "layers.2.self_attn.q_proj.weight is 0, beside"),
    "a scaled matrix": (partial(scaled, "mlp.up_proj", 30), "layers", "layers.1.mlp.up_proj.weight is"),
    "sharp attention": (partial(scaled, Q, 8), "layers", "the entropy of attention in layer 1 is"),
    "random weights": (random, "loss", "nats per token"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["tiny-llama", *(pytest.param(name, marks=pytest.mark.extended) for name in ("tiny-llada", "tiny-dream"))]
)
def test_a_planted_damage_is_noticed(name, damage):
    model = sinklens.load(name, check=False)
    plant, check, text = DAMAGES[damage]
    plant(model.tree.hf.model.layers, model.tree.hf)
    found = {one.name: one for one in damage_checks(model)}
    assert found[check].outcome == "failed"
    assert text in found[check].found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tiny-llama" else pytest.mark.extended) for name in shipped_names()]
)
def test_no_shipped_model_is_suspected(name):
    model = sinklens.load(name, check=False)
    before = model.fingerprint
    found = damage_checks(model)
    first = "open" if name in ("tiny-canvas", "tiny-two-modes") else "passed"
    assert [one.outcome for one in found] == [first, first, "passed"], found
    assert model.fingerprint == before


def test_every_change_is_taken_back(tiny_llama):
    ids = torch.arange(1, 9)[None]
    before = tiny_llama.tree.run_with_hooks(ids, fwd_hooks=[])
    for change in changes(tiny_llama):
        with change.made():
            pass
        assert torch.equal(tiny_llama.tree.run_with_hooks(ids, fwd_hooks=[]), before), change.name
    assert layer_check(tiny_llama).outcome == "passed"
