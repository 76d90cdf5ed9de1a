"""Sinks by state and fate, on planted canvases with known survival."""

import numpy as np
import pytest
import xarray as xr
from planting import planted

from sinklens.analyses.renoising import sinks_by_state, state_rows, survival_rows

ROWS = 40


def rows_of(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def planted_canvases(survives, on_noise=0.5, on_accepted=0.5, seed=0, accepted=0.5):
    """Two steps of one head on an answer of eight positions; each is noise or accepted, at random, at either step.

    Args:
        survives: state before, state after -> probability that a sink stays one; True is accepted.
    """
    rng = np.random.default_rng(seed)
    before, after = (rng.random((ROWS, 8)) < accepted for _ in range(2))
    sink = rng.random((ROWS, 8)) < np.where(before, on_accepted, on_noise)
    kept = np.vectorize(lambda one, other: survives[one, other])(before, after)
    later = sink & (rng.random((ROWS, 8)) < kept)
    score = np.where(np.stack([sink, later], axis=1), 90.0, 0.5)[:, :, None, None]
    masked = ~np.stack([before, after], axis=1)
    prompt = np.full((*score.shape[:-1], 2), 0.5)
    track = planted(
        np.concatenate([prompt, score], axis=-1), masked=np.pad(masked, ((0, 0), (0, 0), (2, 0))), prompt_length=2
    )
    return sinks_by_state(track)


STAY = {(one, other): 0.8 for one in (True, False) for other in (True, False)}


def test_survival_by_fate_is_measured():
    data = planted_canvases(STAY | {(True, False): 0.2})
    found = survival_rows("m", data, seed=0)
    (difference,) = rows_of(found, measure="difference", group="renoised", matched="step, place")
    assert difference["low"] < -0.6 < difference["high"]
    assert difference["high"] < -0.3
    (rate,) = rows_of(found, measure="rate", group="decided, then undecided")
    assert rate["estimate"] == pytest.approx(0.2, abs=0.1)
    (other,) = rows_of(found, measure="difference", group="decided", matched="step, place")
    assert other["low"] < 0 < other["high"]


def test_a_preference_for_accepted_positions_is_measured_and_its_absence_is_not_taken_for_one():
    equal = rows_of(state_rows("m", planted_canvases(STAY), 0), group="decided", matched="step, place")[0]
    assert equal["low"] < 1 < equal["high"]
    data = planted_canvases(STAY, on_noise=0.2, on_accepted=0.6)
    (preferred,) = rows_of(state_rows("m", data, 0), group="decided", matched="step, place")
    assert preferred["estimate"] == pytest.approx(3, rel=0.35)
    assert preferred["low"] > 1.5


def test_a_place_that_has_more_sinks_is_compared_with_itself():
    """Place 0 has a sink and is mostly accepted, place 1 has none: crude, accepted positions look better."""
    rng = np.random.default_rng(1)
    accepted = rng.random((60, 2)) < np.array([0.9, 0.1])
    score = np.where(np.array([True, False]), 90.0, 0.5) * np.ones((60, 1))
    track = planted(
        np.concatenate([np.full((60, 2), 0.5), score], axis=1)[:, None, None, None],
        masked=np.pad(~accepted, ((0, 0), (2, 0)))[:, None], prompt_length=2,
    )  # fmt: skip
    found = state_rows("m", sinks_by_state(track), 0)
    assert rows_of(found, group="decided", matched="nothing")[0]["estimate"] > 4
    assert rows_of(found, group="decided", matched="step, place")[0]["estimate"] == pytest.approx(1)


def test_the_last_step_of_a_row_has_no_fate():
    data = planted_canvases(STAY)
    assert data["survived_at"].isel(step=1).isnull().all()
    assert data["decided_next_at"].isel(step=1).isnull().all()
    assert data["sinks_at"].notnull().all()
    xr.testing.assert_equal(data["decided_next_at"].isel(step=0), data["decided_at"].isel(step=1).assign_coords(step=0))


def test_states_that_templates_explain_are_compared_within_them():
    """In one template, positions are accepted early and have sinks; in the other, neither."""
    parts = [
        planted_canvases(STAY, on_noise=rate, on_accepted=rate, accepted=accepted, seed=seed)
        for seed, (rate, accepted) in enumerate(((0.7, 0.85), (0.1, 0.15)) * 4)
    ]
    data = xr.concat(parts, dim="prompt")
    (alone,) = rows_of(state_rows("m", data, 0), group="decided", matched="step, place")
    assert alone["low"] > 1.5
    data = data.assign_coords(prompt_group=("prompt", np.repeat(np.arange(8), ROWS).astype(str)))
    (within,) = rows_of(state_rows("m", data, 0), group="decided", matched="step, place, group")
    assert within["low"] < 1 < within["high"]
    assert within["groups"] == 8
