"""What the lab reads again from a run of a model with an encoder, whose steps depend on the steps before."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.live import comparing, reading
from sinklens.live.execution import denoising
from sinklens.live.heads import HeadTrial
from sinklens.live.outcome import RunOutcome
from sinklens.live.spec import RunSpec
from sinklens.sinks import Record

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
ABLATED = {"id": "", "on": True, "kind": "ablate_head", "layer": 0, "head": 0, "by": "zero", "steps": None}


@pytest.fixture(scope="module")
def canvas_model():
    return sinklens.load("tiny-canvas")


def outcome_of(spec, model):
    run = denoising(spec, model)
    run.carry_out()
    return RunOutcome.of(run.result())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("chips", [(ABLATED,), ()], ids=["with a chip", "unchanged"])
def test_a_pattern_is_that_of_the_run(canvas_model, chips):
    spec = RunSpec("tiny-canvas", PROMPT, chips=chips)
    outcome = outcome_of(spec, canvas_model)
    wanted = [(step, 1) for step in range(outcome.steps)]
    run = sinklens.generate(
        canvas_model, PROMPT, hooks=[change.build() for change in spec.changes], record_sinks=Record(patterns=wanted)
    )
    for step, layer in wanted[:3]:
        found = reading.patterns(spec, outcome, canvas_model, step, [layer])[layer]
        expected = run.patterns[step, layer][0]
        start = outcome.prompt_length
        assert found.shape == (6, *(2 * [outcome.canvas.shape[1]]))
        assert found[:, :start].isnan().all()
        torch.testing.assert_close(found[:, start:], expected.float(), atol=1e-5, rtol=1e-5)


def test_proposals_are_the_likeliest_tokens_of_the_step(canvas_model):
    spec = RunSpec("tiny-canvas", PROMPT)
    outcome, kept = outcome_of(spec, canvas_model), {}

    def keep(value, hook):
        kept[hook.step] = (value[0].float() / run_settings.temperature(hook.step)).softmax(dim=-1)

    run_settings = denoising(spec, canvas_model).settings
    sinklens.generate(canvas_model, PROMPT, hooks=[("denoise.hook_logits", keep)])
    found = reading.proposals(spec, outcome, canvas_model, 0)
    assert sorted(found) == list(range(outcome.prompt_length, outcome.canvas.shape[1]))
    for place, entry in found.items():
        best = kept[0][place - outcome.prompt_length].argmax()
        assert (entry["confidence"], entry["proposals"][0]["id"]) == (None, int(best))


def test_two_runs_are_compared_and_every_head_is_tried(canvas_model):
    specs = [RunSpec("tiny-canvas", PROMPT, chips=chips) for chips in ((), (ABLATED,))]
    outcomes = [outcome_of(spec, canvas_model) for spec in specs]
    assert comparing.why_not(specs, outcomes) is None
    same = comparing.divergence(specs[:1] * 2, outcomes[:1] * 2, canvas_model)
    assert same[0] == pytest.approx(0, abs=1e-6)
    assert comparing.divergence(specs, outcomes, canvas_model)[0] > 1e-5
    (effect,) = HeadTrial("", specs[0], outcomes[0], canvas_model).measure([(0, 0)])
    assert effect["kl"] == pytest.approx(np.nanmean([comparing.divergence(specs, outcomes, canvas_model)[0]]), rel=0.2)


def test_answers_of_several_canvases_are_tried_without_kl(canvas_model):
    spec = RunSpec("tiny-canvas", PROMPT, settings={"gen_length": 48})
    outcome = outcome_of(spec, canvas_model)
    trial = HeadTrial("", spec, outcome, canvas_model)
    assert trial.why == "KL compares complete answers; run with a gen_length of one canvas."
    (effect,) = trial.measure([(0, 0)])
    assert (effect["kl"], effect["same"]) == (None, True)
