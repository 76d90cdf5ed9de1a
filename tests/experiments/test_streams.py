"""Similarity against the textbook formulas; planted layers, massive activations and outlier dimensions are found."""

import numpy as np
import pytest
import torch
from building import random_ids, random_model
from watching import PADDED, short

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import layer_similarity, massive_activations, outlier_dimensions, step_similarity
from sinklens.experiments.streams import linear_cka


def streams(run, row, step):
    """Streams of one row without padding, [stream, pos, d_model]."""
    start = int((~run.real[row]).sum())
    cache = run.model.run_with_cache(run.canvas[row : row + 1, step, start:])[1]
    names = [*(f"blocks.{n}.hook_resid_pre" for n in range(3)), "blocks.2.hook_resid_post"]
    return torch.stack([cache[name][0].detach() for name in names])


def formula(x, y, measure):
    """Mean cosine, or CKA by centered Gram matrices and HSIC."""
    if measure == "cosine":
        return np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, y, strict=True)])
    center = np.eye(len(x)) - 1 / len(x)
    hsic = lambda a, b: np.trace(a @ a.T @ center @ b @ b.T @ center)  # noqa: E731
    return hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y))


@pytest.mark.parametrize("measure", ["cosine", "cka"])
def test_layers_are_compared_by_the_formula_over_the_rows_and_positions_of_a_state(worded, measure):
    model = worded()
    run = sinklens.generate(model, PADDED, **short(model, {}))
    found = layer_similarity(run, measure, state="prompt", steps=[1], without=[3])
    parts = []
    for row in range(2):
        start = int((~run.real[row]).sum())
        parts.append(streams(run, row, 1)[:, : run.prompt_length - start])
    x = np.delete(torch.cat(parts, dim=1).double().numpy(), 3, axis=2)
    for first in range(4):
        for second in range(4):
            value = float(found.sel(step=1, stream=first, other=second))
            assert value == pytest.approx(formula(x[first], x[second], measure), rel=1e-4)


@pytest.mark.parametrize(("measure", "state"), [("cosine", "masked"), ("cka", "prompt")])
def test_steps_are_compared_at_the_positions_that_both_have_in_the_state(worded, measure, state):
    model = worded()
    run = sinklens.generate(model, PADDED[1:], **short(model, {}))
    found = step_similarity(run, measure, state=state)
    prompt = torch.arange(run.canvas.shape[2]) < run.prompt_length
    shared = prompt if state == "prompt" else run.undecided[0, 0] & run.undecided[0, 2]
    x, y = (streams(run, 0, step)[:, shared].double().numpy() for step in (0, 2))
    for stream in range(4):
        value = float(found.sel(stream=stream, step=0, other=2))
        assert value == pytest.approx(formula(x[stream], y[stream], measure), rel=1e-4)
        assert value == float(found.sel(stream=stream, step=2, other=0))
        assert float(found.sel(stream=stream, step=1, other=1)) == pytest.approx(1.0)


def test_a_planted_layer_that_writes_nothing_has_no_influence_and_others_have():
    model = random_model()
    layer = model.tree.hf.model.layers[1]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    run = sinklens.generate(model, random_ids(), **short(model, {}))
    influence = 1 - np.diagonal(layer_similarity(run).to_numpy(), offset=1, axis1=1, axis2=2)
    assert np.abs(influence[:, 1]).max() < 1e-9
    assert influence[:, [0, 2]].min() > 1e-3


def test_cka_ignores_rotations_and_scale_and_cosine_does_not(worded):
    torch.manual_seed(3)
    x = torch.randn(40, 6)
    rotated = 3 * x @ torch.linalg.qr(torch.randn(6, 6))[0] + 5
    assert float(linear_cka(torch.stack([x, rotated]))[0, 1]) == pytest.approx(1.0)
    assert float(linear_cka(torch.stack([x, torch.randn(40, 6)]))[0, 1]) < 0.5


IDS = torch.tensor([[4, 9, 9, 30]])


def run_of(model):
    return sinklens.generate(model, IDS, **short(model, {}))


def test_a_planted_massive_activation_is_found_where_it_is_and_none_in_the_unchanged_model():
    model = random_model()
    assert massive_activations(run_of(model)).sizes["activation"] == 0
    model.tree.hf.model.embed_tokens.weight.data[30, 11] = -900.0
    run = run_of(model)
    found = massive_activations(run, times_median=500)
    table = found.to_dataframe().query("column == 3")
    planted = {(step, 11, 30) for step in range(run.steps_run)}
    assert set(zip(table["step"], table["dim"], table["token"], strict=True)) == planted
    assert (np.diff(np.abs(found["value"])) <= 0).all()
    at_entry = table.query("stream == 0")
    assert at_entry["value"].tolist() == [-900.0] * run.steps_run
    cache = run.model.run_with_cache(run.canvas[:, 0])[1]
    median = float(cache["blocks.0.hook_resid_pre"].abs().median())
    assert at_entry.query("step == 0")["times_median"].item() == pytest.approx(900 / median)
    in_masks = massive_activations(run, state="masked", steps=[0], times_median=500)
    assert in_masks.sizes["activation"] == 0  # it is in the prompt
    assert massive_activations(run, at_least=1e4).sizes["activation"] == 0


def test_a_planted_outlier_dimension_is_found_and_none_in_the_unchanged_model():
    model = random_model()
    assert outlier_dimensions(run_of(model), times_rms=4).sizes["dim"] == 0
    model.tree.hf.model.embed_tokens.weight.data[:, 6] = 200.0
    found = outlier_dimensions(run_of(model), times_rms=4)
    assert found["dim"].values.tolist() == [6]
    assert found["streams"].item() == 1.0
    assert found["positions"].item() == 1.0


def test_what_cannot_be_compared_or_found_is_refused_or_nan(worded, monkeypatch):
    run, causal = run_of(random_model()), worded("llama", True)
    written = sinklens.generate(causal, PADDED, **short(causal, {}))
    assert np.isnan(layer_similarity(run, steps=[0], state="committed")).all()
    monkeypatch.setattr("sinklens.experiments.streams.MOST", 10)
    low = {"at_least": 1e-6, "times_median": 1e-6}
    for call, match in [
        (lambda: layer_similarity(run, without=[24]), "dim 24 does not exist; there are 24"),
        (lambda: step_similarity(written), "steps of an autoregressive run have different positions"),
        (lambda: massive_activations(run, at_least=0), "at_least must be a finite number above 0; got 0"),
        (lambda: outlier_dimensions(run, times_rms=float("nan")), "times_rms must be a finite number above 0; got nan"),
        (lambda: massive_activations(run, **low), "raise one of the thresholds"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
