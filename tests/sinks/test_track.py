"""Sink tracks: units, ranks and indices against hand-made patterns, and tracks of runs against their patterns."""

import numpy as np
import pytest
from tracks import LENGTH, made, planted

from sinklens.errors import SettingError, TrackError
from sinklens.sinks import SinkTrack, TopK

MOVING = [[0.2, 3.2, 0.3, 0.3], [0.2, 0.3, 3.2, 0.3], [1.0, 1.0, 1.0, 1.0]]
both_kinds = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


@both_kinds
@pytest.mark.parametrize("unit", ["sum", "fraction", "percent", "visible"])
def test_every_unit_matches_its_definition_on_the_full_pattern(causal, unit):
    """Loops over queries: all that exist, or those that can see the key; an all-zero head has zeros."""
    track, pattern, there = made(causal)
    scores = track.scores(unit)
    assert scores.dims == ("batch", "step", "layer", "head", "pos")
    for place in np.ndindex(*scores.shape):
        (b, t, layer, h, j), got = place, float(scores.to_numpy()[place])
        if not there[b, t, j]:
            assert np.isnan(got)
            continue
        queries = [i for i in range(LENGTH) if there[b, t, i]]
        if unit == "visible" and causal:
            queries = [i for i in queries if i >= j]
        total = sum(pattern[b, t, layer, h, i, j] for i in queries)
        expected = {"sum": total, "percent": 100 * total / len(queries)}.get(unit, total / len(queries))
        assert got == pytest.approx(expected, rel=1e-5), place
    assert (scores.isel(layer=-1, head=-1).fillna(0) == 0).all()


@both_kinds
def test_ranks_match_a_sorted_list(causal):
    track, pattern, there = made(causal, seed=3)
    top, sums = track.top(LENGTH).to_numpy(), pattern.sum(-2)
    for b, t, layer, h in np.ndindex(*top.shape[:4]):
        exist = [j for j in range(LENGTH) if there[b, t, j]]
        ranked = sorted(exist, key=lambda j: -sums[b, t, layer, h, j]) if sums[b, t, layer, h].any() else []
        assert top[b, t, layer, h].tolist() == ranked + [-1] * (LENGTH - len(ranked))


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda track: track.top(0), r"k must be between 1 and 4"),
        (lambda track: track.top(5), r"k must be between 1 and 4"),
        (lambda track: track.detect(TopK(5)), r"k must be between 1 and 4"),
        (lambda track: track.trajectory(1, 0), r"layer 1 does not exist; this track has 1, 0 to 0"),
        (lambda track: track.trajectory(0, 0, row=2), r"batch 2 does not exist"),
        (lambda track: track.isel(step=3), r"step 3 does not exist; this track has 3, 0 to 2"),
        (lambda track: track.isel(step=[0, -4]), r"step -4 does not exist"),
        (lambda track: track.isel(step=True), r"step must be an integer from 0 to 2; got True"),
        (lambda track: track.isel(step=1.7), r"step must be an integer from 0 to 2; got 1.7"),
        (lambda track: track.isel(step="1"), r"step must be an integer from 0 to 2; got '1'"),
        (
            lambda track: track.isel(step=np.array([True, False, True])),
            r"step must be an integer from 0 to 2; got True",
        ),
        (
            lambda track: track.isel(layer=[]),
            r"layer=\[\] selects no layer of this track, which has 1; select at least one",
        ),
        (
            lambda track: track.isel(step=slice(3, 9)),
            r"step=slice\(3, 9, None\) selects no step of this track, which has 3",
        ),
        (lambda track: track.trajectory(0.0, 0), r"layer must be an integer from 0 to 0; got 0.0"),
        (lambda track: track.trajectory(0, False), r"head must be an integer from 0 to 0; got False"),
        (
            lambda track: track.isel(step=[1, 2]).isel(step=2),
            r"step 2 does not .* It is part of a track and holds steps \[1, 2\]",
        ),
        (lambda track: track.top(True), r"k must be between 1 and 4, the number of positions; got True"),
        (lambda track: SinkTrack.concat([track, "track"]), r"tracks must be a list of SinkTrack; got \[SinkTrack"),
        (lambda track: track["real"], r"no variable 'real'; it holds .*score.* Nearest: is_real"),
        (lambda track: track["value_norm"], r"holds no value_norm\. Record it .*Record\(\['values'\]\)"),
        (
            lambda track: SinkTrack(track.data.drop_vars(["score", "is_real"])),
            r"not a sink track: it lacks score, is_real",
        ),
        (
            lambda track: planted(MOVING, value_norms=np.zeros((3, 4))),
            r"unknown variables value_norms; known: value_norm, stream_peak, .*output_rank",
        ),
        (lambda track: track.isel(pos=0), r"a track can be cut along batch, step, layer or head; got 'pos'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_invalid_query_is_rejected(ask, text):
    with pytest.raises((SettingError, TrackError), match=text):
        ask(planted(MOVING))


def test_a_part_of_a_track_holds_that_part_and_keeps_its_indices():
    track = made(True).track
    part = track.isel(step=[0, -1], head=np.int64(2), layer=slice(1, None), batch=1)
    assert dict(part.data["score"].sizes) == {"batch": 1, "step": 2, "layer": 1, "head": 1, "pos": LENGTH}
    expected = track.scores("visible").to_numpy()[1:, [0, -1], 1:, 2:]
    np.testing.assert_array_equal(part.scores("visible").to_numpy(), expected)
    assert part.data["step"].to_numpy().tolist() == [0, track.steps - 1]
    assert (part.prompt_length, part.causal, part.steps) == (track.prompt_length, True, 2)
    np.testing.assert_array_equal(
        part.need("value_norm")["value_norm"], track.need("value_norm")["value_norm"][1:, [0, -1], 1:, 2:]
    )


def test_only_values_recorded_on_padding_are_masked():
    track, _, there = made(False)
    needed = track.need("value_norm", "stream_channel", "stream_median")
    for name in ("value_norm", "stream_channel"):
        shown = there.reshape(2, 3, *[1] * (needed[name].ndim - 3), LENGTH)
        np.testing.assert_array_equal(needed[name], np.where(shown, track.data[name], np.nan))
    np.testing.assert_array_equal(needed["stream_median"], track.data["stream_median"])


def test_a_track_returns_its_variables_by_name():
    track = made(False, unlike=["value_norm"]).track
    assert track["score"].identical(track.data["score"])
    assert track["step"].to_numpy().tolist() == [0, 1, 2]
    assert ("score" in track, "is_real" in track, "value_norm" in track, "real" in track) == (True, True, False, False)
    assert set(track) == set(track.data.data_vars)
    assert all(getattr(track.data, name).identical(track[name]) for name in track)  # no method of xarray hides one
