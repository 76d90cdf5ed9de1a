"""Sinks against noise level and canvas: passes as computed by the model, planted effects, intervals over templates."""

import numpy as np
import pytest
import torch
import xarray as xr

from sinklens.analyses import noise_levels as module
from sinklens.analyses.kinds import Kinds
from sinklens.analyses.noise_levels import EDITS, GRID, grid_scores, grid_steps, level_rows, noise_levels
from sinklens.analyses.renoising import settled
from sinklens.analyses.runs import own_run
from sinklens.interventions import ForceTime
from sinklens.tasks.word_problems import PROBLEM_KINDS, held_out, template_of

PROMPTS = [problem.prompt for problem in held_out(3)]
SETTINGS = {"gen_length": 8, "steps": 6}


@pytest.fixture(scope="module")
def model(toy):
    """The toy with noise on its weights, which otherwise hardly depends on its noise level."""
    model, generator = toy("tiny-duo"), torch.Generator().manual_seed(4)
    before = {name: value.clone() for name, value in model.hf.state_dict().items()}
    with torch.no_grad():
        for value in model.hf.parameters():
            value += 0.2 * torch.randn(value.shape, generator=generator)
    yield model
    model.hf.load_state_dict(before)


@pytest.fixture(scope="module")
def found(model):
    return own_run(model, PROMPTS, SETTINGS, seed=3)


def test_the_steps_of_a_row_are_evenly_spaced_among_those_that_it_has():
    own = np.zeros((3, 12), dtype=bool)
    own[0], own[1, 2:7], own[2, :3] = True, True, True
    assert grid_steps(own).tolist() == [[0, 3, 6, 8, 11], [2, 3, 4, 5, 6], [-1] * 5]


def test_scores_of_a_canvas_at_another_level_are_those_of_a_run_with_that_level(model, found):
    steps = grid_steps(found.own)
    scores = grid_scores(model, found, steps)
    usual = found.run.sinks.scores().to_numpy()
    for row in range(3):
        for place in range(GRID):
            own, real = usual[row, steps[row, place]], found.run.real[row]
            np.testing.assert_allclose(scores[row, place, place][..., real], own[..., real], atol=2e-5)
    level = found.run.time[:, [steps[0, 3]]]
    edited = own_run(model, PROMPTS, SETTINGS, seed=3, hooks=[ForceTime(time=level, steps=[0])])
    first = edited.run.sinks.scores().to_numpy()[:, 0]
    real = found.run.real[:, None, None].numpy() & np.ones(first.shape, dtype=bool)
    np.testing.assert_allclose(scores[:, 0, 3][real], first[real], atol=2e-5)
    assert np.abs(scores[:, 0, 3] - scores[:, 0, 0]).max() > 1e-3


def planted(by, monkeypatch, found):
    """The rows if the strongest key, a sink, is at the number of the level or of the canvas."""
    length = found.run.canvas.shape[2]
    last = length - 9 if by == "canvas" else length - 1  # canvases put it into the prompt, levels into the answer

    def scores(model, run, steps):
        values = np.ones((3, GRID, GRID, 2, 3, length), dtype=np.float32)
        for canvas, level in np.ndindex(GRID, GRID):
            values[:, canvas, level, ..., last - (level if by == "level" else canvas)] = 9
        return values

    monkeypatch.setattr(module, "grid_scores", scores)
    return level_rows("m", noise_levels(found.run.model, found, PROMPTS), seed=0)


def lines(rows):
    return {(row["measure"], row["group"]): row for row in rows}


@pytest.mark.parametrize("by", ["level", "canvas"])
def test_a_planted_sink_follows_what_it_was_planted_to_follow(by, monkeypatch, found):
    table = lines(planted(by, monkeypatch, found))
    other = "canvas" if by == "level" else "level"
    for edit, moved in ((by, 1.0), (other, 0.0), ("both", 1.0)):
        assert table["moved", edit]["estimate"] == moved
        assert table["kept", edit]["estimate"] == 1 - moved
    assert table["moved", "canvas − level"]["estimate"] == (1.0 if by == "canvas" else -1.0)
    assert table["sinks", "first level"]["estimate"] == 1.0
    assert table["in_answer", f"last {by}"]["estimate"] == (1.0 if by == "level" else 0.0)


def counted(one, two):
    """Of two rows of column sums: whether the strongest key differs, sinks of both, and sinks of the first."""
    sinks = [[x > (values.sum() - x) / (len(values) - 1) + 3 for x in values] for values in (one, two)]
    return int(one.argmax() != two.argmax()), sum(a and b for a, b in zip(*sinks, strict=True)), sum(sinks[0])


def test_measures_equal_a_count_over_all_pairs(monkeypatch, found):
    rng, size = np.random.default_rng(1), (3, GRID, GRID, 2, 3, found.run.canvas.shape[2])
    scores = rng.choice([0.5, 1.0, 8.0, 9.0], p=[0.4, 0.4, 0.1, 0.1], size=size) + rng.uniform(0, 0.1, size)
    scores = scores.astype(np.float32)
    monkeypatch.setattr(module, "grid_scores", lambda *given: scores)
    data = noise_levels(found.run.model, found, PROMPTS)
    for row in range(3):
        seen = scores[row][..., found.run.real[row].numpy()]
        for number, edit in enumerate(EDITS):
            total = np.zeros(4, dtype=int)
            for s, t in ((s, t) for s in range(GRID) for t in range(GRID) if s != t):
                other = {"level": (s, t), "canvas": (t, s), "both": (t, t)}[edit]
                for layer, head in np.ndindex(2, 3):
                    total += (*counted(seen[s, s, layer, head], seen[(*other, layer, head)]), 1)
            values = [float(data[f"level_{name}"][row, number]) for name in ("moved", "kept", "kept_of", "moved_of")]
            assert values == total.tolist()


def test_intervals_resample_templates(found):
    """Prompts of one template that agree among themselves are one observation, not many."""
    kinds = [PROBLEM_KINDS.index(template_of(problem.prompt)) for problem in held_out(40)]
    data = noise_levels(found.run.model, found, PROMPTS).isel(prompt=[0] * 40)
    moved = np.array([[4.0 * (kind % 2), 2.0, 3.0] for kind in kinds])
    data["level_moved"] = (("prompt", "edit"), moved)
    data["level_moved_of"] = (("prompt", "edit"), np.full((40, 3), 4.0))
    data["template"] = ("prompt", kinds)
    clustered = lines(level_rows("m", data, 0))["moved", "level"]
    data["template"] = ("prompt", [-1] * 40)
    single = lines(level_rows("m", data, 0))["moved", "level"]
    assert clustered["estimate"] == single["estimate"] == pytest.approx(moved[:, 0].mean() / 4)
    assert (clustered["templates"], single["templates"]) == (7, 40)
    assert clustered["high"] - clustered["low"] > 1.5 * (single["high"] - single["low"])


def test_networks_that_read_no_level_have_no_rows(toy):
    table = Kinds(settings=SETTINGS).run(toy("tiny-mdlm"), PROMPTS[:2]).tables
    assert len(table["levels"]) == 0
    assert len(table["states"])


def test_a_position_is_settled_once_its_token_stays():
    token = np.array([[[7, 5, 1], [7, 6, 1], [7, 5, 2], [7, 5, 3]]])
    found = settled(xr.DataArray(token, dims=("batch", "step", "pos")), np.array([[7, 5, 9]]))
    assert found.tolist() == [[[True, False, False], [True, False, False], [True, True, False], [True, True, False]]]


def test_states_of_a_sampler_that_decides_nothing_are_settled_or_not(model):
    """`kinds` compares tokens that stay with tokens that change, counted here by hand."""
    run = own_run(model, PROMPTS, SETTINGS, seed=0).run
    data = Kinds(settings=SETTINGS).run(model, PROMPTS).measured[model.name]
    for row, step, place in np.ndindex(3, run.steps_run, 8):
        later = run.canvas[row, step:, run.prompt_length + place].tolist()  # the last canvas is the result
        assert bool(data["decided_at"][row, step, place]) is all(token == later[-1] for token in later)
    assert 0 < float(data["decided_at"].mean()) < 1


def test_the_template_of_a_held_out_prompt_is_known():
    assert [template_of(problem.prompt) for problem in held_out(50)] == [problem.kind for problem in held_out(50)]
    assert template_of("Question: none") is None
