"""Layers are skipped, repeated and swapped as in models built that way, at the chosen steps and positions alone."""

import pytest
import torch
from building import random_dit, random_hf, random_ids, random_model
from watching import LONG, PADDED, entered, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import sweep
from sinklens.interventions import LayerOrder, MaskSinks, SkipLayers


def rebuilt(architecture, order, **settings):
    """The random model of `architecture` built with the layers `order`, by copying their weights."""
    old = random_hf(architecture, **settings)
    new = random_hf(architecture, **settings, num_hidden_layers=len(order))
    new.load_state_dict({name: value for name, value in old.state_dict().items() if ".layers." not in name}, False)
    for place, layer in enumerate(order):
        new.model.layers[place].load_state_dict(old.model.layers[layer].state_dict())
    return new


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 1, 2], [2, 0], [1, 1, 1, 0, 2]])
def test_another_order_computes_what_a_model_built_that_way_computes(architecture, order):
    model, ids = random_model(architecture), random_ids()
    before = model(ids)
    with torch.no_grad(), LayerOrder(order).applied(model):
        found = model(ids)
    with torch.no_grad():
        expected = sinklens.load(rebuilt(architecture, order))(ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)
    assert torch.equal(model(ids), before)


@pytest.mark.usefixtures("unchecked")
def test_an_order_holds_at_the_chosen_steps_of_a_run(worded):
    model = worded()
    watched = watch(model, [LONG], [LayerOrder([0, 2, 1], steps=[1, 3])], ["hook_logits"])
    for step in range(watched.run.steps_run):
        ids, _ = entered(watched.run, step)
        with torch.no_grad():
            plain = model(ids)
            with LayerOrder([0, 2, 1]).applied(model):
                swapped = model(ids)
        logits = watched.values[step]["denoise.hook_logits"]
        assert torch.allclose(logits, swapped, atol=1e-4) == (step in (1, 3))
        assert torch.allclose(logits, plain, atol=1e-4) == (step not in (1, 3))


def test_the_order_of_a_modulated_network_changes_too():
    model = random_dit("mdlm")
    ids = torch.randint(0, 4, (1, 6))
    before = model(ids, time=0.5)
    last = model.cfg.n_layers - 1
    with LayerOrder([*range(last), last, last]).applied(model):
        assert not torch.allclose(model(ids, time=0.5), before, atol=1e-4)
    assert torch.equal(model(ids, time=0.5), before)


@pytest.mark.usefixtures("unchecked")
def test_a_run_that_fails_leaves_the_layers_as_they_were(worded):
    model = worded()

    def fail(value, hook):
        raise RuntimeError("stop")

    layers = list(model.tree.hf.model.layers)
    with pytest.raises(RuntimeError, match="stop"):
        watch(model, [LONG], [LayerOrder([2, 1, 0, 0]), ("blocks.1.hook_resid_post", fail)], [])
    assert list(model.tree.hf.model.layers) == layers
    assert model.tree.hf.config.num_hidden_layers == 3


@pytest.mark.usefixtures("unchecked")
def test_a_permutation_works_with_a_cache_and_other_orders_are_refused(worded):
    model = worded("llama", True)
    cached = watch(model, PADDED, [LayerOrder([1, 0, 2])], []).run
    plain = watch(model, PADDED, [LayerOrder([1, 0, 2])], [], use_cache=False).run
    assert torch.equal(cached.canvas, plain.canvas)
    assert not torch.equal(cached.canvas, watch(model, PADDED, [], []).run.canvas)
    with pytest.raises(
        SettingError, match=r"LayerOrder\(\[0, 1, 1, 2\]\) skips or repeats layers, and steps with use_cache"
    ):
        watch(model, PADDED, [LayerOrder([0, 1, 1, 2])], [])
    assert watch(model, PADDED, [LayerOrder([0, 1, 1, 2])], [], use_cache=False).run.steps_run == 5


@pytest.mark.usefixtures("unchecked")
def test_a_repeated_layer_can_be_recorded(worded):
    run = watch(worded(), [LONG], [LayerOrder([0, 1, 1, 2]), MaskSinks(steps=[2])], [], record_sinks=True).run
    assert run.sinks.scores().sizes["layer"] == 3


REFUSED = [
    (lambda model: LayerOrder([]), "order is empty"),
    (lambda model: watch(model, [LONG], [LayerOrder([0, 3])]), "layer 3 does not exist; there are 3, 0 to 2"),
    (lambda model: LayerOrder([0, 1]).hooks_for(model), r"write `with LayerOrder\(order\)\.applied\(model\):`"),
    (lambda model: LayerOrder([0], layers=[1]), "LayerOrder does not support layers="),
    (lambda model: SkipLayers(part="block"), "part must be one of layer, attn, mlp; got 'block'"),
    (
        lambda model: sweep(
            model, [LONG], {"swapped": LayerOrder([0, 2, 1])}, metric=lambda output: output.logits.mean(dim=(1, 2)),
            gen_length=4, steps=2,
        ),
        "LayerOrder changes the model for all rows of a batch",
    ),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_orders_that_make_no_sense_are_refused(worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(worded())


@pytest.mark.usefixtures("unchecked")
def test_a_sweep_runs_an_order_apart_from_the_others(worded):
    model, settings = worded(), {"gen_length": 4, "steps": 2}
    listed = {"skip": SkipLayers(layers=[1]), "swap": LayerOrder([0, 2, 1]), "mlp": SkipLayers(layers=[0], part="mlp")}
    found = sweep(model, PADDED, listed, **settings)
    for name, hooks in listed.items():
        run = sinklens.generate(model, PADDED, hooks=hooks, record_sinks=False, **settings)
        assert found["answer"].sel(intervention=name).values.tolist() == [answer.text for answer in run.answers]
