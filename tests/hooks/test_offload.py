"""A model whose weights accelerate has offloaded has the same values and edits as one in memory."""

import accelerate
import pytest
import torch
from building import random_hf, random_ids, random_model, shared_model

import sinklens
from sinklens.hooks import offload

NAMES = ["blocks.1.ln1.hook_scale", "blocks.1.ln2.hook_normalized", "ln_final.hook_scale", "blocks.1.attn.hook_result"]


def offloaded(place, folder, **settings):
    """A random model that computes on the CPU and whose weights are all on the meta device between calls."""
    hf = random_hf(**settings)
    if place == "memory":
        accelerate.cpu_offload(hf, torch.device("cpu"))
    else:
        accelerate.disk_offload(hf, folder, torch.device("cpu"))
    assert {weight.device.type for weight in hf.parameters()} == {"meta"}
    return sinklens.load(hf)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_every_point_has_the_same_value_as_in_memory(place, tmp_path):
    model, ids = offloaded(place, tmp_path), random_ids()
    logits, cache = model.run_with_cache(ids)
    expected, expected_cache = shared_model().run_with_cache(ids)
    assert torch.equal(logits, expected)
    assert set(cache) == set(expected_cache)
    for name in expected_cache:
        assert torch.equal(cache[name], expected_cache[name]), name


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("name", "bias"), [*((name, False) for name in NAMES), (NAMES[-1], True)])
def test_an_edit_has_the_same_effect_as_in_memory(name, bias, tmp_path):
    model, ids = offloaded("memory", tmp_path, attention_bias=bias), random_ids()
    edit = [(name, lambda value, hook: value * 1.5)]
    found = model.run_with_hooks(ids, fwd_hooks=edit)
    assert torch.equal(found, random_model(attention_bias=bias).run_with_hooks(ids, fwd_hooks=edit))
    assert (found - model(ids)).abs().max() > 1e-3


def test_offloaded_weights_equal_those_in_memory(tmp_path):
    model, plain = offloaded("memory", tmp_path), shared_model()
    for found, expected in (
        (model.tree.blocks[1].attn.W_O, plain.tree.blocks[1].attn.W_O),
        (model.tree.W_U, plain.tree.W_U),
        (model.tree.W_E, plain.tree.W_E),
    ):
        assert torch.equal(found, expected)
    stream = torch.randn(1, 3, plain.cfg.d_model)
    assert torch.equal(model.tree.ln_final(stream), plain.tree.ln_final(stream))


def test_a_run_its_sinks_and_the_fingerprint_equal_those_of_the_model_in_memory(tmp_path):
    model, ids = offloaded("disk", tmp_path), random_ids()
    assert model.cfg.device == torch.device("cpu")
    given = {"gen_length": 4, "steps": 4, "progress": False}
    found, expected = (sinklens.generate(one, ids, **given) for one in (model, shared_model()))
    assert torch.equal(found.canvas, expected.canvas)
    assert found.sinks.scores().equals(expected.sinks.scores())
    assert model.fingerprint == shared_model().fingerprint


def test_inputs_go_to_the_device_onto_which_accelerate_loads_the_weights():
    embed = torch.nn.Embedding(3, 2)
    assert offload.device_of(embed) == torch.device("cpu")
    for place, device in ((1, "cuda:1"), ("cuda:0", "cuda:0"), (torch.device("cpu"), "cpu")):
        embed._hf_hook = accelerate.hooks.AlignDevicesHook(execution_device=place)
        assert offload.device_of(embed) == torch.device(device)
        embed._hf_hook = accelerate.hooks.SequentialHook(accelerate.hooks.ModelHook(), embed._hf_hook)
        assert offload.device_of(embed) == torch.device(device)
