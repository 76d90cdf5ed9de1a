"""Sink tracks and detectors against hand-made attention."""

import subprocess
import sys

import numpy as np
import pytest

import sinklens
from sinklens.errors import SinklensError, TrackError
from sinklens.sinks import EpsilonOverMean, SinkTrack, TopK, build_track
from sinklens.tasks.word_problems import held_out


def planted(score, real=None):
    """A track of one head from scores [step, pos]."""
    score = np.asarray(score, dtype=np.float32)
    steps, length = score.shape
    places = np.zeros((1, steps, length), dtype=bool)
    real = np.ones((1, length), dtype=bool) if real is None else np.asarray([real])
    return build_track(
        score[None, :, None, None],
        np.zeros((1, steps, length), dtype=np.int64),
        places,
        places,
        real,
        np.full((1, length), -1),
        {"model": "planted", "prompt_length": 2},
    )


MOVING = [[0.2, 3.2, 0.3, 0.3], [0.2, 0.3, 3.2, 0.3], [1.0, 1.0, 1.0, 1.0]]


def test_a_planted_sink_is_found_where_it_is_and_nowhere_else():
    """Scores sum to 4; the others' mean is 0.267, so 3.2 exceeds it by more than 2.9 but not by 3."""
    found = planted(MOVING).detect(EpsilonOverMean(epsilon=2.9)).to_numpy()[0, :, 0, 0]
    assert found.tolist() == [[False, True, False, False], [False, False, True, False], [False] * 4]
    assert not planted(MOVING).detect(EpsilonOverMean(epsilon=3.0)).any()


def test_the_paper_s_inequality_is_evaluated_literally_per_unit():
    track = planted(MOVING)
    score = np.array(MOVING)
    for unit, factor in (("sum", 1.0), ("percent", 25.0), ("fraction", 0.25)):
        for epsilon in (0.0, 0.5):
            literal = np.zeros_like(score, dtype=bool)
            for step in range(3):
                for j in range(4):
                    others = [score[step, k] * factor for k in range(4) if k != j]
                    literal[step, j] = score[step, j] * factor > sum(others) / 3 + epsilon
            found = track.detect(EpsilonOverMean(epsilon, unit)).to_numpy()[0, :, 0, 0]
            assert found.tolist() == literal.tolist(), (unit, epsilon)


def test_epsilon_three_in_fractions_finds_nothing_and_warns():
    with pytest.warns(UserWarning, match=r"no score exceeds 1, so epsilon = 3.0 can never be met"):
        assert not planted(MOVING).detect(EpsilonOverMean(3.0, "fraction")).any()


def test_padding_is_no_sink_and_no_other_position():
    """Position 0 is padding: the mean of the others is taken over three real positions."""
    track = planted([[9.0, 2.0, 0.5, 0.5]], real=[False, True, True, True])
    found = track.detect(EpsilonOverMean(1.4)).to_numpy()[0, 0, 0, 0]
    assert found.tolist() == [False, True, False, False]
    assert track.top(1).item() == 1
    assert not track.detect(TopK(3)).to_numpy()[..., 0].any()


def test_top_k_ranks_and_the_trajectory_follows_the_strongest():
    track = planted(MOVING)
    assert track.top(2).to_numpy()[0, 0, 0, 0].tolist() == [1, 2]
    assert track.trajectory(0, 0).tolist()[:2] == [1, 2]
    found = track.detect(TopK(2)).to_numpy()[0, 0, 0, 0]
    assert found.tolist() == [False, True, True, False]


def test_a_head_that_attends_to_nothing_has_no_strongest_key():
    """Not position 0, which would look like a sink at the start token."""
    track = planted([[0.0, 0.0, 0.0, 0.0], [0.2, 0.3, 3.2, 0.3]])
    assert track.trajectory(0, 0).tolist() == [-1, 2]
    assert not track.detect(EpsilonOverMean(0.0)).isel(step=0).any()


def test_units_are_shares_of_the_whole():
    track = planted(MOVING)
    np.testing.assert_allclose(track.scores("fraction").to_numpy()[0, 0, 0, 0], [0.05, 0.8, 0.075, 0.075], rtol=1e-6)
    np.testing.assert_allclose(track.scores("percent").sum("pos").to_numpy(), 100.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda track: track.top(0), r"k lies between 1 and 4"),
        (lambda track: track.top(5), r"k lies between 1 and 4"),
        (lambda track: track.detect(TopK(5)), r"k lies between 1 and 4"),
        (lambda track: track.trajectory(1, 0), r"layer 1 does not exist; this track has 1, 0 to 0"),
        (lambda track: track.trajectory(0, 0, batch=2), r"batch 2 does not exist"),
    ],
)
def test_a_wrong_question_is_refused(ask, text):
    with pytest.raises(TrackError, match=text):
        ask(planted(MOVING))


def test_a_saved_track_opens_as_it_was(tiny_llada, tmp_path):
    track = sinklens.generate(tiny_llada, held_out(1)[0].prompt).sinks
    opened = SinkTrack.open(track.save(tmp_path / "sinks.nc"))
    assert opened.data.drop_attrs().equals(track.data.drop_attrs())
    assert opened.data.attrs["model"] == "tiny-llada"
    assert opened.trajectory(2, 1).tolist() == track.trajectory(2, 1).tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["sinks.nc"]


def test_scores_of_a_run_sum_to_the_number_of_real_tokens(tiny_llada):
    prompts = [problem.prompt for problem in held_out(6)]
    run = sinklens.generate(tiny_llada, prompts)
    sums = run.sinks.scores().sum("pos")
    real = run.real.sum(dim=1).numpy()
    assert len(set(real.tolist())) > 1
    for row, count in enumerate(real):
        np.testing.assert_allclose(sums.isel(batch=row).to_numpy(), count, rtol=1e-4)


def test_masked_and_committed_follow_the_canvas(tiny_llada):
    run = sinklens.generate(tiny_llada, held_out(1)[0].prompt)
    data = run.sinks.data
    committed = data["committed"].to_numpy()[0]
    for step, place in zip(*committed.nonzero(), strict=True):
        assert run.unmask_step[0, place] == step
    assert committed.sum() == 24
    assert data["masked"].to_numpy()[0].sum() == sum(range(1, 25))


def test_a_truncated_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(TrackError, match=r"does not exist"):
        SinkTrack.open(tmp_path / "nothing.nc")
    whole = planted(MOVING).save(tmp_path / "sinks.nc").read_bytes()
    (tmp_path / "cut.nc").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrackError, match=r"not a whole NetCDF-4 file"):
        SinkTrack.open(tmp_path / "cut.nc")
    foreign = planted(MOVING).data.drop_attrs()
    foreign.to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with pytest.raises(TrackError, match=r"no sink track of this version"):
        SinkTrack.open(tmp_path / "foreign.nc")
    with pytest.raises(TrackError, match=r"lacks score"):
        SinkTrack(foreign.drop_vars("score"))


def test_a_full_disk_leaves_no_half_file_and_says_so(tmp_path):
    """A real limit: the process may not write files above 2 KB."""
    code = f"""
import resource, signal
import numpy as np
from sinklens.sinks import build_track
track = build_track(np.random.rand(1, 50, 2, 2, 40).astype("float32"), *(np.zeros((1, 50, 40)),) * 3,
                    np.ones((1, 40), bool), np.zeros((1, 40)), {{"prompt_length": 1}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
from sinklens.errors import SinklensError
try:
    track.save(r"{tmp_path / "sinks.nc"}")
except SinklensError as error:
    print("refused:", "could not write" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "refused: True" in done.stdout, done.stderr[-1500:]
    assert list(tmp_path.iterdir()) == []


def test_saving_where_nothing_can_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"could not write .* Make room or choose another place"):
        planted(MOVING).save(tmp_path / "file" / "sinks.nc")
