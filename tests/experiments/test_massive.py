"""Massive activations and outlier dimensions that were planted are found, and none elsewhere."""

import numpy as np
import pytest
import torch
from building import random_model
from watching import short

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import massive_activations, outlier_dimensions
from sinklens.interventions import ClampStream

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


def test_clamping_a_planted_dimension_removes_it():
    """It enters with the embedding, so clamping it at layer 0 gives the logits of a model without it."""
    model = random_model()
    weight = model.tree.hf.model.embed_tokens.weight
    weight.data[:, 6] = 0.0
    with torch.no_grad():
        without = model(IDS)
        weight.data[:, 6] = 200.0
        clamped = model.run_with_hooks(IDS, ClampStream(0, dims=[6]).hooks_for(model))
        torch.testing.assert_close(clamped, without, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(model(IDS), without, atol=1e-2)


def test_thresholds_that_find_everything_or_nothing_are_refused():
    run = run_of(random_model())
    with pytest.raises(SettingError, match="at_least must be a positive number; got 0"):
        massive_activations(run, at_least=0)
    with pytest.raises(SettingError, match="times_rms must be a positive number; got nan"):
        outlier_dimensions(run, times_rms=float("nan"))


def test_a_threshold_below_most_values_is_refused(monkeypatch):
    monkeypatch.setattr("sinklens.experiments.streams.MOST", 10)
    with pytest.raises(SettingError, match="raise one of the thresholds"):
        massive_activations(run_of(random_model()), at_least=1e-6, times_median=1e-6)
