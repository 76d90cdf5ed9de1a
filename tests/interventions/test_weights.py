"""Interventions on weight matrices: what counts as one, and that every matrix is restored."""

from dataclasses import dataclass

import pytest
import torch
from building import random_ids, random_model, shared_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from watching import LONG

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import EditWeights, PruneWeights


@dataclass(frozen=True)
class Halved(EditWeights):
    """All weights by half; with `stop`, an error at the matrix of this name."""

    stop: str = "nowhere"

    def edited(self, model, matrix):
        if matrix.name.endswith(self.stop):
            raise RuntimeError("stopped")
        return matrix.rows / 2


def state(model):
    return {name: value.clone() for name, value in model.tree.hf.state_dict().items()}


def changed(model, before):
    """Names of the tensors that differ, and by what factor."""
    now = model.tree.hf.state_dict()
    return {name: float((now[name] / old).nanmean()) for name, old in before.items() if not torch.equal(now[name], old)}


def random_gpt2():
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 64, "vocab_size": 61}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=60)).eval()


MATRICES = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc", "c_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj"),
}


@pytest.mark.parametrize("architecture", [*MATRICES])
def test_the_matrices_of_the_chosen_layers_change_and_come_back(architecture):
    model = sinklens.load(random_gpt2()) if architecture == "gpt2" else random_model(architecture)
    before = state(model)
    with Halved(layers=[-1]).applied(model):
        found = changed(model, before)
    parts = [name.removesuffix(".weight").rpartition(".")[2] for name in found]
    assert sorted(parts) == sorted(MATRICES[architecture])
    assert all(".2." in name and factor == pytest.approx(0.5) for name, factor in found.items())
    assert changed(model, before) == {}


def test_weights_come_back_after_an_error_in_the_run_and_after_one_halfway_through(model):
    before = state(model)

    def broken(value, hook):
        assert changed(model, before)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        sinklens.generate(model, LONG, hooks=[Halved(), ("blocks.1.hook_resid_pre", broken)], gen_length=4, steps=2)
    assert changed(model, before) == {}
    with pytest.raises(RuntimeError, match="stopped"), Halved("layers.1.mlp.down_proj.weight").applied(model):
        pass
    assert changed(model, before) == {}


def test_edits_of_the_same_weights_follow_each_other(model):
    before = state(model)
    run = {"gen_length": 4, "steps": 2, "progress": False}
    seen = []
    hooks = [
        Halved(layers=[1]),
        Halved(layers=[1, 2]),
        ("denoise.hook_canvas", lambda ids, hook: seen.append(state(model))),
    ]
    sinklens.generate(model, LONG, hooks=hooks, **run)
    name = "model.layers.{}.self_attn.v_proj.weight"
    for layer, factor in ((0, 1.0), (1, 0.25), (2, 0.5)):
        torch.testing.assert_close(seen[0][name.format(layer)], before[name.format(layer)] * factor)
    assert changed(model, before) == {}


def test_quantized_and_offloaded_weights_are_refused_and_nothing_changes():
    hooks = PruneWeights(0.5)
    model, ids = random_model(), random_ids()
    reference = model(ids)
    projection = model.tree.hf.model.layers[1].mlp.down_proj
    projection.__class__ = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn"})
    with pytest.raises(SettingError, match=r"mlp\.down_proj of layer 1 is quantized \(bitsandbytes Linear4bit\)"):
        hooks.applied(model).__enter__()
    projection.__class__ = nn.Linear
    torch.testing.assert_close(model(ids), reference)
    weight = projection.weight
    projection.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
    with pytest.raises(SettingError, match=r"mlp\.down_proj of layer 1 is offloaded"):
        hooks.applied(model).__enter__()
    projection.weight = weight
    torch.testing.assert_close(model(ids), reference)


REFUSED = [
    (lambda model: Halved(steps=[0]), "Halved does not support steps="),
    (lambda model: Halved(heads=[0]), "Halved does not support heads="),
    (lambda model: Halved(positions=[0]), "Halved does not support positions="),
    (lambda model: Halved(layers=[]), "layers is empty"),
    (lambda model: Halved().hooks_for(model), r"write `with Halved\(\.\.\.\)\.applied\(model\):` around the pass"),
    (lambda model: Halved(layers=[3]).applied(model).__enter__(), "layer 3 does not exist; there are 3"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_has_no_meaning_for_weights_is_refused(call, text):
    with pytest.raises(SettingError, match=text):
        call(shared_model())
