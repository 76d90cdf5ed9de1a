"""A row keeps only its active steps, whatever else is in its batch."""

import numpy as np
import pytest
import xarray as xr
from asked import TWO as PROMPTS
from planting import planted

import sinklens
from sinklens.analyses.runs import active_steps, own_run
from sinklens.sinks import Record


def test_waiting_steps_are_removed_and_later_ones_move_up():
    """Row 1 is active at steps 0, 2 and 4 of 5, row 0 at all of them; scores are row · 10 + step."""
    score = np.broadcast_to((np.arange(2)[:, None] * 10 + np.arange(5))[..., None, None, None], (2, 5, 1, 2, 3))
    ids = np.broadcast_to(np.arange(5)[None, :, None], (2, 5, 3))
    places = np.ones((2, 5, 3), dtype=bool)
    track = planted(score, masked=places, committed=places, token_id=ids)
    active = np.array([[True] * 5, [True, False, True, False, True]])
    moved = active_steps(track, active).data
    assert moved["score"].dims == track.data["score"].dims
    assert moved["score"][0, :, 0, 0, 0].values.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(moved["score"][1, :, 0, 1, 2], [10, 12, 14, np.nan, np.nan])
    assert moved["token_id"][1, :, 0].values.tolist() == [0, 2, 4, -1, -1]
    assert moved["masked"][1, :, 0].values.tolist() == [True, True, True, False, False]
    assert "unmask_step" not in moved
    assert active_steps(track, active[:, :][[1, 1]]).steps == 3


def compare_rows(model, settings, only=None, **record):
    """Check that the rows of a batch have the same tracks as alone; how many steps each has, and which are its own."""
    together, lengths = own_run(model, PROMPTS, settings, **record), []
    for row, prompt in enumerate(PROMPTS):
        alone = own_run(model, [prompt], settings, **record)
        steps, padding = alone.track.steps, together.run.real.shape[1] - alone.run.real.shape[1]
        lengths.append(steps)
        assert alone.own.all()
        assert together.own[row].sum() == steps
        part = together.track.isel(batch=row).data
        assert part["score"].isel(step=slice(steps, None)).isnull().all()
        variables = only or [*alone.track.data]
        kept, expected = (
            data[variables].drop_vars(("batch", "step", "pos"))
            for data in (part.isel(step=slice(0, steps), pos=slice(padding, None)), alone.track.data)
        )
        if "final_id" in variables:  # end tokens follow a row that has ended, until the last row has
            kept["final_id"] = kept["final_id"].where(expected["final_id"] >= 0, -1)
        xr.testing.assert_allclose(kept, expected, rtol=1e-3, atol=1e-4)
    return lengths, together.own


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny_llada", {"threshold": 0.9, "block_length": 12}),  # rows end their blocks at different steps
        ("tiny_llada", {"cfg_scale": 0.5, "gen_length": 8, "steps": 4, "temperature": 0.5}),
        ("tiny_llama", {}),  # rows end at different steps
        ("tiny_llama", {"use_cache": False, "temperature": 0.7, "gen_length": 6}),
    ],
)
def test_a_row_in_a_batch_has_the_same_track_as_alone(name, settings, request):
    lengths, own = compare_rows(request.getfixturevalue(name), settings, record_sinks=Record(["values", "stream"]))
    if "gen_length" not in settings:
        assert len(set(lengths)) > 1
        assert not own.all()


def test_a_row_that_waits_for_others_is_not_active(toy):
    """A row ends when its mean entropy is below a bound, which only one of the two is after the first step."""
    model = toy("tiny-canvas")
    settings, means = {"gen_length": 8, "max_denoising_steps": 4, "stability_threshold": 0}, []
    hook = ("denoise.hook_entropy", lambda value, hook: means.append(value.mean(dim=1)))
    sinklens.generate(model, PROMPTS, hooks=[hook], progress=False, confidence_threshold=0.0, **settings)
    _, own = compare_rows(model, settings | {"confidence_threshold": float(means[0].mean())}, ["score"])
    assert not own.all()
