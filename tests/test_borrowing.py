"""A transformers model that sinklens used is afterwards what it was, attribute by attribute and bit for bit."""

import copy

import pytest
import torch
from building import random_hf
from nnsight import NNsight

import sinklens
from sinklens.errors import CheckpointError, SelfCheckError, SinklensError

IDS = torch.tensor([[5, 3, 9, 11, 2]])


def contents(value):
    """What a dictionary, list or tuple holds, its entries told apart by identity."""
    if isinstance(value, dict):
        return [(key, contents(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | set):
        return type(value).__name__, [contents(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else id(value)


def graph(hf):
    """Every attribute of every module, of their configs and of the model, with the classes."""
    modules = {name: (type(module), contents(module.__dict__)) for name, module in hf.named_modules()}
    configs = {
        name: contents(module.config.__dict__) for name, module in hf.named_modules() if hasattr(module, "config")
    }
    return modules, configs


def plain(hf):
    with torch.no_grad():
        return hf(IDS).logits


@pytest.fixture(params=["llama", "qwen3"])
def held(request):
    """A causal model as transformers makes it: with its own attention and in training mode."""
    hf = random_hf(request.param, causal=True)
    hf.train()
    return hf


def test_a_released_model_has_every_attribute_it_had_and_the_same_logits(held):
    before, logits = graph(held), plain(held)
    model = sinklens.load(held)
    assert graph(held) != before
    model.set_use_split_qkv_input(True)
    sinklens.generate(model, IDS, gen_length=3)
    with model.trace(IDS):
        model.blocks[1].hook_resid_mid.output[:] = 0
    assert model.release() is held
    assert graph(held) == before
    assert torch.equal(plain(held), logits)


def test_the_borrowed_model_is_given_back_at_the_end_of_the_block_and_after_an_error(held):
    before = graph(held)
    with sinklens.borrow(held) as model:
        assert sinklens.generate(model, IDS, gen_length=2).tokens.shape == (1, 7)
    assert graph(held) == before
    with pytest.raises(ZeroDivisionError, match="division"), sinklens.borrow(held):
        raise ZeroDivisionError("division")
    assert graph(held) == before


def test_a_released_model_can_be_loaded_again_and_the_old_one_says_so(held):
    first = sinklens.load(held)
    expected = first(IDS)
    first.release()
    first.release()  # a second time does nothing
    for use in (lambda: first(IDS), lambda: sinklens.generate(first, IDS, gen_length=2)):
        with pytest.raises(SinklensError, match=r"this model was released.*call sinklens\.load on the"):
            use()
    second = sinklens.load(held)
    assert second is not first
    assert torch.equal(second(IDS), expected)


def test_weights_and_hooks_that_others_changed_meanwhile_stay(held):
    calls = []
    with sinklens.borrow(held):
        held.model.layers[0].register_forward_hook(lambda *_: calls.append("mine"))
        with torch.no_grad():
            held.lm_head.weight.mul_(2)
        doubled = held.lm_head.weight.clone()
    plain(held)
    assert calls == ["mine"]
    assert torch.equal(held.lm_head.weight, doubled)


def test_a_wrapper_that_nnsight_had_before_or_got_meanwhile_goes_on_working(held):
    logits, early = plain(held), NNsight(held)
    with sinklens.borrow(held):
        late = NNsight(held)
    for wrapped in (early, late):
        with wrapped.trace(IDS):
            hidden = wrapped.model.layers[1].output.save()
            wrapped.model.layers[1].output = hidden * 0
            out = wrapped.output.save()
        assert hidden.abs().max() > 0
        assert not torch.equal(out.logits, logits)
    assert torch.equal(plain(held), logits)


def test_a_loaded_model_is_not_borrowed_a_second_time(held):
    model = sinklens.load(held)
    with pytest.raises(CheckpointError, match=r"is loaded already.*\.release"), sinklens.borrow(held):
        pass
    assert torch.isfinite(model(IDS)).all()


def test_a_model_that_fails_the_self_check_stays_as_it_was():
    hf = random_hf("llama", causal=True)
    with torch.no_grad():
        hf.lm_head.weight[0, 0] = torch.nan
    before = graph(hf)
    with pytest.raises(SelfCheckError, match="not finite"):
        sinklens.load(hf)
    assert graph(hf) == before


def test_a_copy_made_before_agrees_with_the_model_after(held):
    twin = copy.deepcopy(held)
    with sinklens.borrow(held) as model:
        sinklens.generate(model, IDS, gen_length=2)
    assert torch.equal(plain(twin), plain(held))
