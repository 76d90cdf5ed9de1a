"""The effect of another model is 0 between equal models, and what a planted change of the logits makes it."""

import copy

import pytest
import torch
from building import random_hf, random_ids

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import effect

GIVEN = {"gen_length": 4, "steps": 4, "block_length": 4}


def _pair(factor: float) -> tuple[sinklens.Model, sinklens.Model]:
    """A model, and one whose logits are `factor` times its own."""
    first = random_hf("llama")
    second = copy.deepcopy(first)
    second.lm_head.weight.data *= factor
    return sinklens.load(first), sinklens.load(second)


def test_a_model_agrees_with_itself():
    model, other = _pair(1.0)
    found = effect(model, random_ids()[:, :4], other=other, **GIVEN)
    assert float(found.under_replay["kl"].max()) == pytest.approx(0, abs=1e-9)
    assert found.sinks_moved == 0
    assert bool(found.free_running["same_answer"].all())


def test_the_kl_is_that_of_the_models_distributions_on_the_reference_s_canvases():
    """Halved logits keep every decision by confidence's order and every sink; the distributions are flatter."""
    reference, other = _pair(0.5)
    found = effect(reference, random_ids()[:1, :4], other=other, **GIVEN)
    assert found.sinks_moved == 0
    for step in range(4):
        canvas = found.base.canvas[:1, step]
        masked = canvas[0] == reference.mask_token_id
        with torch.no_grad():
            logits = reference(canvas)[0, masked].double()
        p, q = logits.log_softmax(-1), (logits / 2).log_softmax(-1)
        wanted = (p.exp() * (p - q)).sum(-1).mean()
        assert float(found.under_replay["kl"][0, step]) == pytest.approx(float(wanted), rel=1e-4)


def test_models_of_other_sizes_are_refused():
    with pytest.raises(SettingError, match=r"same layers, heads and vocabulary; got \(3, 6, 61\) and \(2, 6, 61\)"):
        effect(random_hf(), random_ids(), other=sinklens.load(random_hf(num_hidden_layers=2)))
