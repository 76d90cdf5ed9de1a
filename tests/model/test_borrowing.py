"""Releasing a transformers model restores every attribute and bitwise equal logits."""

import copy

import pytest
import torch
from building import random_hf
from nnsight import NNsight
from transformers import pipeline

import sinklens
from sinklens.errors import CheckpointError, SelfCheckError, SettingError, SinklensError

IDS = torch.tensor([[5, 3, 9, 11, 2]])


def contents(value):
    """The contents of a dictionary, list, tuple or set; objects are compared by identity."""
    if isinstance(value, dict):
        return [(key, contents(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | set):
        return type(value).__name__, [contents(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else id(value)


def graph(hf):
    """Every attribute and the class of every module, and every attribute of the configs."""
    modules = {name: (type(module), contents(module.__dict__)) for name, module in hf.named_modules()}
    configs = {
        name: contents(module.config.__dict__) for name, module in hf.named_modules() if hasattr(module, "config")
    }
    return modules, configs


def plain(hf):
    with torch.no_grad():
        return hf(IDS).logits


@pytest.fixture
def hf_model():
    """A causal model as transformers creates it: with its attention, in training mode."""
    hf = random_hf("qwen3", causal=True)
    hf.train()
    return hf


def test_a_released_model_has_its_earlier_attributes_and_logits(hf_model):
    before, logits, twin = graph(hf_model), plain(hf_model), copy.deepcopy(hf_model)
    model = sinklens.load(hf_model)
    assert graph(hf_model) != before
    model.set_use_split_qkv_input(True)
    sinklens.generate(model, IDS, gen_length=3)
    with model.trace(IDS):
        model.blocks[1].hook_resid_mid.output[:] = 0
    assert model.release() is hf_model
    assert graph(hf_model) == before
    assert torch.equal(plain(hf_model), logits)
    assert torch.equal(plain(twin), logits)


def test_a_borrowed_model_is_restored_at_the_end_of_the_block_and_after_an_error(hf_model):
    before = graph(hf_model)
    with sinklens.borrow(hf_model) as model:
        assert sinklens.generate(model, IDS, gen_length=2).tokens.shape == (1, 7)
    assert graph(hf_model) == before
    with pytest.raises(ZeroDivisionError, match="division"), sinklens.borrow(hf_model):
        raise ZeroDivisionError("division")
    assert graph(hf_model) == before
    hf_model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(SelfCheckError, match="not finite"):
        sinklens.load(hf_model)
    assert graph(hf_model) == before


def test_a_released_model_can_be_loaded_again_and_the_old_one_raises(hf_model):
    first = sinklens.load(hf_model)
    expected = first(IDS)
    first.release()
    first.release()  # a second time does nothing
    for use in (lambda: first(IDS), lambda: sinklens.generate(first, IDS, gen_length=2)):
        with pytest.raises(SinklensError, match=r"this model was released.*call sinklens\.load on the"):
            use()
    second = sinklens.load(hf_model)
    assert second is not first
    assert torch.equal(second(IDS), expected)


def test_weights_and_hooks_changed_in_the_meantime_are_kept(hf_model):
    calls = []
    with sinklens.borrow(hf_model):
        hf_model.model.layers[0].register_forward_hook(lambda *_: calls.append("called"))
        with torch.no_grad():
            hf_model.lm_head.weight.mul_(2)
        doubled = hf_model.lm_head.weight.clone()
    plain(hf_model)
    assert calls == ["called"]
    assert torch.equal(hf_model.lm_head.weight, doubled)


def test_nnsight_wrappers_from_before_or_inside_the_block_keep_working(hf_model):
    logits, early = plain(hf_model), NNsight(hf_model)
    with sinklens.borrow(hf_model):
        late = NNsight(hf_model)
    for wrapped in (early, late):
        with wrapped.trace(IDS):
            hidden = wrapped.model.layers[1].output.save()
            wrapped.model.layers[1].output = hidden * 0
            out = wrapped.output.save()
        assert hidden.abs().max() > 0
        assert not torch.equal(out.logits, logits)
    assert torch.equal(plain(hf_model), logits)


def test_a_loaded_model_cannot_be_borrowed(hf_model):
    model = sinklens.load(hf_model)
    with pytest.raises(CheckpointError, match=r"is already loaded.*\.release"), sinklens.borrow(hf_model):
        pass
    assert torch.isfinite(model(IDS)).all()


def test_a_diffusion_model_is_not_decoded_from_left_to_right_while_it_is_loaded(hf_model, tiny_llada):
    expected = hf_model.eval().generate(IDS, max_new_tokens=2, do_sample=False)
    with sinklens.borrow(hf_model) as model:
        assert torch.equal(model.hf.generate(IDS, max_new_tokens=2, do_sample=False), expected)
    writer = pipeline("text-generation", model=tiny_llada.tree.hf, tokenizer=tiny_llada.tokenizer)
    with pytest.raises(SettingError, match="tiny-llada is a diffusion model"):
        writer("Question:", max_new_tokens=2)
    hf = random_hf("llama", causal=False)
    before, expected = graph(hf), hf.generate(IDS, max_new_tokens=2)
    with sinklens.borrow(hf) as model:
        for decode in [hf.generate, model.hf.generate, model.original_model.generate]:
            with pytest.raises(SettingError, match=r"left to right.*Call sinklens\.generate\(model, prompt"):
                decode(IDS, max_new_tokens=2)
    assert graph(hf) == before
    assert torch.equal(hf.generate(IDS, max_new_tokens=2), expected)
