"""The places of a run are read once each, with the activation of a pass over the row alone and the run's own labels."""

import numpy as np
import pytest
import torch
from watching import PADDED, entered, short

import sinklens
from sinklens.errors import SettingError
from sinklens.features import ProbeData, collect, probe_data
from sinklens.sinks import TopK

POINTS = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]


@pytest.fixture(scope="module")
def run(worded):
    return sinklens.generate(worded(), PADDED, **short(worded(), {"record_sinks": True}))


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
def test_activations_are_those_of_a_pass_over_each_row_alone(model, causal):
    run = sinklens.generate(model, PADDED, **short(model, {}))
    data = probe_data(run, POINTS, steps=[0, 2])
    places = list(zip(*(data.column(name).tolist() for name in ("prompt", "step", "column")), strict=True))
    assert len(set(places)) == len(places)
    for step in (0, 2):
        ids, real = entered(run, step)
        newest = ids.shape[1] - 1
        for row in range(2):
            columns = real[row].nonzero()[:, 0].tolist() if not (causal and step) else [newest]
            assert [place[2] for place in places if place[:2] == (row, step)] == columns
            cache = model.run_with_cache(ids[row : row + 1, real[row]], names_filter=POINTS)[1]
            mine = (data.column("prompt") == row) & (data.column("step") == step)
            for point in POINTS:
                alone = cache[point][0].flatten(1).detach()[-len(columns) :]
                torch.testing.assert_close(torch.from_numpy(data.at(point)[mine]), alone, atol=2e-4, rtol=1e-3)


def test_columns_are_those_of_the_run(run):
    data = probe_data(run, POINTS[0], scope=["masked", "committed"], detector=TopK(k=1))
    sinks = run.sinks.detect(TopK(k=1)).any(("layer", "head")).to_numpy()
    for place in range(len(data)):
        row, step, column = (int(data.column(name)[place]) for name in ("prompt", "step", "column"))
        masked, decided = bool(run.undecided[row, step, column]), int(run.unmask_step[row, column])
        expected = {
            "state": "masked" if masked else "committed", "token_id": run.canvas[row, step, column],
            "final_token": run.tokens[row, column], "decided_step": decided, "steps_left": decided - step,
            "from_answer": column - run.prompt_length, "is_sink": sinks[row, step, column],
        }  # fmt: skip
        assert {name: data.column(name)[place] for name in expected} == expected
        assert column >= run.prompt_length
        share = run.undecided[row, step].sum() / run.undecided[row, 0].sum()
        assert data.column("noise")[place] == pytest.approx(float(share))
        canvas = data.canvases[data.column("canvas")[place]]
        visible = run.real[row] & ~run.undecided[row, step]
        assert canvas[visible].tolist() == run.canvas[row, step][visible].tolist()
        assert (canvas[~visible] == -1).all()
    assert set(data.column("is_sink")) == {True, False}


@pytest.mark.parametrize("points", [POINTS, POINTS[0]], ids=["several", "one"])
def test_a_store_gives_the_same_activations(model, tmp_path, points):
    stored = ProbeData.of_store(collect(model, PADDED, points, tmp_path / "a.zarr", scope="masked", gen_length=4))
    read = probe_data(sinklens.generate(model, PADDED, gen_length=4, progress=False), points, scope="masked")
    key = [np.lexsort([data.column(name) for name in ("pos", "step", "prompt")]) for data in (stored, read)]
    for point in stored.values:
        np.testing.assert_allclose(stored.at(point)[key[0]], read.at(point)[key[1]], atol=1e-4)
    assert set(stored.column("state")) == {"masked"}


def test_labels_are_given_by_place_by_prompt_or_over_the_canvas(run):
    data = probe_data(run, POINTS[0])
    own = data.with_label("right", [True, False]).with_label("number", np.arange(len(data)))
    assert (own.column("right") == (data.column("prompt") == 0)).all()
    assert own.column("number").tolist() == list(range(len(data)))
    scores = run.sinks.scores().isel(layer=0, head=0).to_numpy()
    index = tuple(data.column(name) for name in ("prompt", "step", "column"))
    assert (data.with_label("score", scores).column("score") == scores[index]).all()


REFUSED = [
    (lambda run, data: probe_data(run, POINTS[0], scope="committed", steps=[0]), "has no place in scope='committed'"),
    (lambda run, data: data.column("right"), "no column 'right'; they have prompt, step"),
    (lambda run, data: data.where(step=99), "no place has step=99"),
    (lambda run, data: data.at("x"), r"there are no activations at .x.; there are some at blocks\.0"),
    (lambda run, data: ProbeData({"x": np.zeros((2, 3))}, {"prompt": np.zeros(3)}), "one value for each place; got"),
    (lambda run, data: data.with_label("a", [1]), r"one value for each of \d+ places, or for each of 2 prompts"),
    (lambda run, data: data.with_label("a", np.zeros((2, 2))), r"a place lies outside of \[prompt, column\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_what_cannot_be_read_is_refused(run, call, match):
    data = probe_data(run, POINTS[0])
    with pytest.raises(SettingError, match=match):
        call(run, data)
