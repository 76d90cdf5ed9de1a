"""A model with modes in the live view: the form names them, and a kept run knows what the pass of each step was."""

import json
from dataclasses import replace

import pytest
import torch

import sinklens
from sinklens.errors import TrackError
from sinklens.live.forms import of_settings
from sinklens.live.outcome import ARRAYS, RunOutcome
from sinklens.live.refusal import Refused
from sinklens.sinks import Record
from sinklens.views import pattern_at
from sinklens.views.report_data import Numbers

PLACES = [(0, 1), (2, 1), (4, 1)]


@pytest.fixture(scope="module")
def model(two_modes):
    return sinklens.load(two_modes)


@pytest.fixture(scope="module")
def run(model):
    prompt = "Question: Tom has 5 pens.\nAnswer:"
    return sinklens.generate(model, prompt, mode="diffusion", gen_length=8, record_sinks=Record(patterns=PLACES))


def kept(run):
    """The outcome, written and read."""
    outcome = RunOutcome.of(run)
    record = json.loads(json.dumps(outcome.record()))
    return outcome, record, {name: getattr(outcome, name) for name in ARRAYS}


@pytest.mark.extended
def test_the_form_names_the_sampler_of_each_mode(model, tiny_llada):
    offered = of_settings(model)
    assert offered["modes"] == model.family_record.modes
    assert set(offered["modes"].values()) <= set(offered["samplers"])
    assert of_settings(tiny_llada)["modes"] == {}


def test_a_kept_run_has_the_passes_of_its_steps(model, run):
    outcome, record, arrays = kept(run)
    again = RunOutcome.from_record(record, arrays).generation(model, None)
    assert again.kinds == run.kinds == outcome.kinds
    assert run.modes[:3] == ("prefill", "denoise", "denoise")
    assert again.sinks.modes == list(run.modes)
    assert again.sinks["block_start"].equals(run.sinks["block_start"])
    for step, layer in PLACES:
        torch.testing.assert_close(pattern_at(again, step, layer), run.patterns[step, layer][0], rtol=0, atol=1e-5)
    with pytest.raises(TrackError, match="cannot be recomputed"):
        pattern_at(replace(again, kinds=()), 2, 1)


def test_a_page_of_the_run_names_the_pass_of_each_step(run, tiny_llada):
    assert Numbers(run.sinks, run.canvas[0].numpy()).info([0, 2])["modes"] == [run.modes[0], run.modes[2]]
    other = sinklens.generate(tiny_llada, "Hi", gen_length=2, steps=2)
    assert "modes" not in Numbers(other.sinks, other.canvas[0].numpy()).info([0])


@pytest.mark.parametrize(
    "kinds",
    [
        [["denoise", [[0, 2]], False]],
        [["dream", None, False]] * 9,
        [["denoise", [[0, 999]], False]] * 9,
        [["denoise", [[3, 2]], False]] * 9,
        [["denoise", None]] * 9,
        {"0": "denoise"},
    ],
)
def test_a_record_with_other_passes_is_refused(run, kinds):
    _, record, arrays = kept(run)
    assert run.steps_run == 9
    with pytest.raises(Refused, match="its passes are not one for each step"):
        RunOutcome.from_record(record | {"kinds": kinds}, arrays)
