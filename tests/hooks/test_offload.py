"""A layer whose weights accelerate keeps elsewhere shows and takes the values that it shows and takes in one place."""

import accelerate
import pytest
import torch
from building import random_hf, random_ids, random_model, shared_model

import sinklens
from sinklens.hooks import offload

PLACES = ["memory", "disk"]
NAMES = ["blocks.1.ln1.hook_scale", "blocks.1.ln2.hook_normalized", "ln_final.hook_scale", "blocks.1.attn.hook_result"]


def offloaded(place, folder, **settings):
    """A random model whose weights are all on the meta device between calls, computed on the CPU."""
    hf = random_hf(**settings)
    if place == "memory":
        accelerate.cpu_offload(hf, torch.device("cpu"))
    else:
        accelerate.disk_offload(hf, folder, torch.device("cpu"))
    assert {weight.device.type for weight in hf.parameters()} == {"meta"}
    return sinklens.load(hf)


@pytest.mark.parametrize("place", PLACES)
def test_every_point_shows_what_it_shows_in_memory(place, tmp_path):
    model, ids = offloaded(place, tmp_path), random_ids()
    logits, cache = model.run_with_cache(ids)
    wanted, wanted_cache = shared_model().run_with_cache(ids)
    assert torch.equal(logits, wanted)
    assert set(cache) == set(wanted_cache)
    for name in wanted_cache:
        assert torch.equal(cache[name], wanted_cache[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_has_the_effect_it_has_in_memory(name, tmp_path):
    model, ids = offloaded("memory", tmp_path), random_ids()
    edit = [(name, lambda value, hook: value * 1.5)]
    found = model.run_with_hooks(ids, fwd_hooks=edit)
    assert torch.equal(found, shared_model().run_with_hooks(ids, fwd_hooks=edit))
    assert (found - model(ids)).abs().max() > 1e-3


def test_a_biased_output_projection_brings_its_bias(tmp_path):
    model, ids = offloaded("memory", tmp_path, attention_bias=True), random_ids()
    edit = [("blocks.1.attn.hook_result", lambda value, hook: value * 1.5)]
    wanted = random_model(attention_bias=True).run_with_hooks(ids, fwd_hooks=edit)
    assert torch.equal(model.run_with_hooks(ids, fwd_hooks=edit), wanted)


def test_weights_are_read_where_they_are_computed_with(tmp_path):
    model, plain = offloaded("memory", tmp_path), shared_model()
    for found, wanted in (
        (model.tree.blocks[1].attn.W_O, plain.tree.blocks[1].attn.W_O),
        (model.tree.W_U, plain.tree.W_U),
        (model.tree.W_E, plain.tree.W_E),
    ):
        assert torch.equal(found, wanted)
    stream = torch.randn(1, 3, plain.cfg.d_model)
    assert torch.equal(model.tree.ln_final(stream), plain.tree.ln_final(stream))


def test_a_run_its_sinks_and_its_fingerprint_are_those_of_the_model_in_memory(tmp_path):
    model, ids = offloaded("disk", tmp_path), random_ids()
    assert model.cfg.device == torch.device("cpu")
    given = {"gen_length": 4, "steps": 4, "progress": False}
    found, wanted = (sinklens.generate(held, ids, **given) for held in (model, shared_model()))
    assert torch.equal(found.canvas, wanted.canvas)
    assert found.sinks.scores().equals(wanted.sinks.scores())
    assert model.fingerprint == shared_model().fingerprint


def test_inputs_go_to_where_accelerate_brings_the_weights():
    embed = torch.nn.Embedding(3, 2)
    assert offload.device_of(embed) == torch.device("cpu")
    for place, device in ((1, "cuda:1"), ("cuda:0", "cuda:0"), (torch.device("cpu"), "cpu")):
        embed._hf_hook = accelerate.hooks.AlignDevicesHook(execution_device=place)
        assert offload.device_of(embed) == torch.device(device)
        embed._hf_hook = accelerate.hooks.SequentialHook(accelerate.hooks.ModelHook(), embed._hf_hook)
        assert offload.device_of(embed) == torch.device(device)
