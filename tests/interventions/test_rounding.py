"""Weights and activations are rounded as a loop over groups rounds them, and are afterwards as before."""

import pytest
import torch
from building import random_ids, random_model
from watching import LONG, watch

from sinklens.errors import SettingError
from sinklens.interventions import RoundActivations, RoundWeights


def looped(values, bits, group, keep=()):
    """Rounded one group at a time."""
    levels, found = 2 ** (bits - 1) - 1, values.clone()
    others = [column for column in range(values.shape[1]) if column not in keep]
    for row in range(len(values)):
        for start in range(0, len(others), group or len(others)):
            columns = others[start : start + (group or len(others))]
            scale = max(abs(float(values[row, column])) for column in columns) / levels
            for column in columns:
                found[row, column] = round(float(values[row, column]) / scale) * scale if scale else 0.0
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("bits", "group"), [(4, None), (3, 16), (2, 7)])
@pytest.mark.parametrize("keep", [(), (3, 20)])
def test_matrices_are_rounded_group_by_group_and_restored(bits, group, keep):
    model, ids = random_model(), random_ids()
    layer = model.tree.hf.model.layers[1]
    before = {name: value.clone() for name, value in model.tree.hf.state_dict().items()}
    reference = model(ids)
    with torch.no_grad(), RoundWeights(bits, group, keep, layers=[1]).applied(model):
        changed = [name for name, value in model.tree.hf.state_dict().items() if not torch.equal(value, before[name])]
        assert len(changed) == 7
        assert all(name.startswith("model.layers.1.") and "norm" not in name for name in changed)
        for path in ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            kept = keep if path in ("self_attn.k_proj", "mlp.gate_proj") else ()  # only these read the stream
            wanted = looped(before[f"model.layers.1.{path}.weight"], bits, group, kept)
            torch.testing.assert_close(layer.get_submodule(path).weight.data, wanted, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(model(ids), reference, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.tree.hf.state_dict().items())


def test_a_planted_outlier_dimension_is_what_rounding_costs():
    """With one large dimension the others lose their levels; keeping it, and no other, saves them."""
    model, ids = random_model(), random_ids()
    for layer in model.tree.hf.model.layers:
        layer.input_layernorm.weight.data[7] = 0.0  # nothing reads the dimension
        layer.post_attention_layernorm.weight.data[7] = 0.0
    model.tree.hf.model.norm.weight.data[7] = 0.0
    model.tree.hf.model.embed_tokens.weight.data[:, 7] = 60.0

    def error(**options):
        hooks = RoundActivations(6, point="hook_resid_pre", **options).hooks_for(model)
        with torch.no_grad():
            return float((model.run_with_hooks(ids, hooks) - model(ids)).pow(2).mean())

    assert error(keep_dims=[7]) < error() / 10
    assert error(keep_dims=[8]) > error() / 2


REFUSED = [
    (lambda model: RoundWeights(1), "bits must be an integer from 2 to 8; got 1"),
    (lambda model: RoundActivations(9), "bits must be an integer from 2 to 8; got 9"),
    (lambda model: RoundWeights(4, 0), "group must be an integer of at least 1 or None; got"),
    (lambda model: RoundWeights(4, steps=[0]), "RoundWeights does not support steps="),
    (lambda model: RoundActivations(4, point="hook_embed"), r"point must be one of ln1\.hook_normalized"),
    (lambda model: watch(model, LONG, [RoundWeights(4, keep_dims=[24])]), "dim 24 does not exist; there are 24"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_numbers_that_make_no_sense_are_refused(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded())
