"""A sampler may mark its undecided positions instead of holding the mask token there."""

from dataclasses import dataclass

import pytest
import torch

import sinklens
from sinklens.experiments import compare
from sinklens.families import SAMPLERS, register
from sinklens.interventions import MaskedLogits
from sinklens.sampling import Sampler

NOISE = 7  # an ordinary token


@dataclass(frozen=True)
class FromNoise(Sampler):
    """Decides one position per step, from the left, on a canvas of noise; takes the first one back after step 1."""

    name = "from-noise"

    @property
    def steps(self):
        return self.gen_length + 1

    def denoise(self, state):
        answer = torch.arange(state.canvas.shape[1]) >= state.prompt_length
        state.canvas = state.canvas.masked_fill(answer, NOISE)
        state.undecided = answer.expand_as(state.canvas).clone()
        for step in range(self.steps):
            yield
            canvas, undecided = state.begin_step(), state.undecided.clone()
            place = state.prompt_length + (step if step < self.gen_length else 0)
            where = torch.zeros_like(undecided)
            where[:, place] = True
            proposed, _ = state.propose(where, state.logits(canvas, where).argmax(-1), canvas)
            commit = state.through("hook_commit", where)
            undecided &= ~commit
            canvas = torch.where(commit, proposed, canvas)
            if step == 1:
                undecided[:, state.prompt_length], canvas[:, state.prompt_length] = True, NOISE
            state.end_step(canvas, undecided)


@pytest.fixture(autouse=True)
def _from_noise():
    register(FromNoise)
    yield
    del SAMPLERS["from-noise"]


PLANNED = [[True, True, True], [False, True, True], [True, False, True], [True, False, False], [False, False, False]]


def run_of(model, **more):
    return sinklens.generate(model, "2 + 3", sampler="from-noise", gen_length=3, **more)


def test_the_result_and_the_track_go_by_the_marks_and_not_by_the_mask_token(tiny_llada):
    run = run_of(tiny_llada)
    start = run.prompt_length
    assert (run.canvas[0, 0, start:] == NOISE).all()
    assert run.undecided[0, :, start:].tolist() == PLANNED
    assert not run.undecided[0, :, :start].any()
    assert (run.unmask_step[0, start:].tolist(), run.answers[0].masks) == ([3, 1, 2], 0)
    assert run.sinks["masked"].to_numpy()[0, :, start:].tolist() == PLANNED[:-1]
    committed = [[True, False, False], [False, True, False], [False, False, True], [True, False, False]]
    assert run.sinks["committed"].to_numpy()[0, :, start:].tolist() == committed


def test_a_replay_forces_the_marks_too(tiny_llada):
    base = run_of(tiny_llada)
    nothing = [("denoise.hook_commit", lambda value, hook: torch.zeros_like(value))]
    assert torch.equal(run_of(tiny_llada, replay=base, hooks=nothing).undecided, base.undecided)
    assert run_of(tiny_llada, hooks=nothing).answers[0].masks == 3


def test_masked_logits_and_comparisons_take_the_marked_positions(tiny_llada):
    lens = MaskedLogits()
    run_of(tiny_llada, hooks=[lens])
    assert [len(lens.kept[step]) for step in range(4)] == [3, 2, 2, 1]
    assert compare(run_of(tiny_llada), run_of(tiny_llada))["changed_share"].to_numpy().tolist() == [0.0]
