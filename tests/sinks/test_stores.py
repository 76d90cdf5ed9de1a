"""Recordings on disk: equal to those in memory, complete at every moment, of the documented size; and reduced ones."""

import gc
import json
import time
import warnings
import weakref

import numpy as np
import pytest
import xarray as xr
from asked import PROMPTS
from tracks import Killed, assert_equal, disk_full_beyond, killed_at_write

import sinklens
from sinklens.errors import SettingError, SinklensError, TrackError
from sinklens.interventions import MaskSinks
from sinklens.sinks import Record, SinkTrack
from sinklens.sinks.steps import Steps, StoredSteps

QUANTITIES = ["values", "stream", "outputs"]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_a_run_on_disk_equals_the_run_in_memory(shipped, tmp_path, monkeypatch):
    """Also after the working directory has changed."""
    kept = sinklens.generate(shipped, PROMPTS, gen_length=5, record_sinks=Record(QUANTITIES)).sinks
    monkeypatch.chdir(tmp_path)
    run = sinklens.generate(shipped, PROMPTS, gen_length=5, record_sinks=Record(QUANTITIES, out="run.zarr"))
    monkeypatch.chdir("/")
    for track in (run.sinks, SinkTrack.open(tmp_path / "run.zarr")):
        assert_equal(track, kept)
        assert track.finished
    assert run.sinks.vocabulary[run.tokens[0, -1].item()] == shipped.tokenizer.decode(run.tokens[0, -1:])


def test_the_steps_of_a_run_on_disk_do_not_stay_in_memory(tiny_llada, tmp_path, monkeypatch):
    """Arrays of earlier steps that are alive when a step is appended: at most those being written."""
    appended, alive, append = [], [], StoredSteps.append

    def watch(self, step):
        alive.append(sum(array() is not None for array in appended))
        appended.extend(map(weakref.ref, (kept := append(self, step)).values()))
        return kept

    monkeypatch.setattr(StoredSteps, "append", watch)
    sinklens.generate(tiny_llada, PROMPTS[0], gen_length=5, record_sinks=Record(QUANTITIES, out=tmp_path / "run.zarr"))
    assert len(appended) == 5 * 11
    assert max(alive) <= 11


def small_step(step, size=4):
    """One step of hand-made variables: [1, ...]."""
    noise = np.random.default_rng(step)
    places = np.arange(size)[None]
    return {
        "score": noise.exponential(size=(1, 1, 1, size)).astype(np.float32),
        "token_id": np.where(places < step + 1, 7, 1).astype(np.int32),
        "masked": places >= step + 1,
        "committed": places == step + 1,
    }


AXES = {"score": ("layer", "head", "pos")}
ATTRS = {"model": "hand-made", "prompt_length": 1}


def recorded(path, steps=4):
    """Use a store as a run does; yields after every finished step."""
    store = StoredSteps(path, AXES, steps + 1)  # planned for one step more than will run
    real = np.array([[True] * 4])
    for step in range(steps):
        store.describe(ATTRS | {"vocabulary": '{"7": "x"}'}, {"is_real": real})
        store.append(small_step(step))
        store.flush()
        yield step + 1
    store.describe(ATTRS, {"is_real": real, "unmask_step": np.array([[-1, 0, 1, 2]])})
    assert store.dataset().sizes["step"] == steps
    yield steps


@pytest.mark.extended
def test_a_run_killed_at_any_write_leaves_its_finished_steps(tmp_path, monkeypatch):
    """Interrupt at every write in turn."""
    outcomes = []
    for number in range(1, 1000):
        path, done = tmp_path / f"{number}.zarr", 0
        with killed_at_write(number, monkeypatch) as written:
            try:
                for done in recorded(path):
                    pass
            except Killed:
                pass
            else:
                assert SinkTrack.open(path).finished
                break
        if done == 0:
            with pytest.raises(
                TrackError, match=r"does not exist|is not a sink track|holds no step|not a complete Zarr store"
            ):
                SinkTrack.open(path)
            continue
        track = SinkTrack.open(path)
        assert (track.steps, track.finished) == (done, False), written[-1]
        for step in range(done):
            for name, value in small_step(step).items():
                np.testing.assert_array_equal(track.data[name].isel(step=step), value)
        assert track.data["unmask_step"].to_numpy().tolist() == [[-1, *(min(step, done) for step in range(3))]]
        assert track.data["is_real"].all()
        outcomes.append(done)
    assert set(outcomes) == {1, 2, 3, 4}
    assert number > 30


@pytest.fixture(scope="module")
def complete(tiny_llada):
    """The complete run that the tests below interrupt: 8 steps of three prompts."""
    return sinklens.generate(tiny_llada, PROMPTS, gen_length=8, record_sinks=Record(["values"]))


def interrupted(model, step, record=False):
    """The run `complete`, stopped in mid-step."""
    with sinklens.trace(model, PROMPTS, gen_length=8, record_sinks=record) as t:
        for _ in t.steps[step]:
            t["blocks.2.hook_resid_pre"]
            t.stop()
    return t


@pytest.mark.parametrize("kind", ["tiny_llada", "tiny_llama"])
def test_a_run_that_fails_leaves_the_steps_before(request, complete, tmp_path, kind):
    def fail(value, hook):
        if hook.step == 3:
            raise Killed

    with pytest.raises(Killed):  # noqa: PT011
        sinklens.generate(
            request.getfixturevalue(kind), PROMPTS, gen_length=8, hooks=[("blocks.1.hook_resid_pre", fail)],
            record_sinks=Record(["values"], out=tmp_path / "run.zarr"),
        )  # fmt: skip
    track = SinkTrack.open(tmp_path / "run.zarr")
    assert (track.steps, track.finished) == (3, False)
    assert "unfinished" in repr(track)
    decided = track.data["unmask_step"].isel(pos=slice(track.prompt_length, None)).to_numpy()
    if kind == "tiny_llama":
        assert decided.tolist() == [[0, 1, 2, *[3] * 5]] * 3
    else:
        assert_equal(track, complete.sinks, steps=3)
        np.testing.assert_array_equal(track.data["unmask_step"], interrupted(complete.model, 3).unmask_step)
    assert (track.data["unmask_step"].isel(pos=slice(0, track.prompt_length)) == -1).all()
    assert_equal(SinkTrack.open(track.save(tmp_path / "again.nc")), track)


def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_steps_before(tiny_llada, complete, tmp_path):
    def fill(value, hook):
        if hook.step == 3:
            while json.loads((tmp_path / "run.zarr" / "zarr.json").read_text())["attributes"]["written"] < 3:
                time.sleep(0.01)  # step 2 is being written
            limit.__enter__()

    limit = disk_full_beyond(500)
    record = Record(["values"], out=tmp_path / "run.zarr")
    message = r"could not write to .*run\.zarr: .*too large.*The 3 steps before this one are complete; open them with"
    try:
        with pytest.raises(SinklensError, match=message):
            sinklens.generate(
                tiny_llada, PROMPTS, gen_length=8, hooks=[("blocks.2.hook_resid_pre", fill)], record_sinks=record
            )
    finally:
        limit.__exit__(None, None, None)
    track = SinkTrack.open(tmp_path / "run.zarr")
    assert (track.steps, track.finished) == (3, False)
    assert_equal(track, complete.sinks, steps=3)


def test_a_run_stopped_in_a_block_has_the_steps_it_finished(tiny_llada, complete, tmp_path):
    t = interrupted(tiny_llada, 3, Record(["values"], out=tmp_path / "run.zarr"))
    for track in (t.sinks, SinkTrack.open(tmp_path / "run.zarr")):
        assert (track.steps, track.finished) == (3, True)
        assert_equal(track, complete.sinks, steps=3)
        np.testing.assert_array_equal(track.data["unmask_step"], t.unmask_step)
    assert (t.unmask_step == 3).any()


def test_a_run_stopped_in_its_first_step_has_no_track_and_no_store(tiny_llada, tmp_path):
    for record in (True, Record(out=tmp_path / "run.zarr")):
        assert interrupted(tiny_llada, 0, record).sinks is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", [None, "run.zarr"])
def test_a_run_that_ends_early_has_only_the_steps_that_ran(tiny_llada, tmp_path, to):
    record = Record(["values"], out=None if to is None else tmp_path / to, patterns=[(1, 0), (23, 0)])
    run = sinklens.generate(tiny_llada, PROMPTS, threshold=0.9, record_sinks=record)
    assert 1 < run.steps_run < 24
    assert run.sinks.steps == run.steps_run
    assert not run.sinks.data["value_norm"].isnull().any()
    np.testing.assert_array_equal(run.sinks.data["token_id"], run.canvas[:, :-1])
    assert set(run.patterns) == {(1, 0)}
    if to is not None:
        assert_equal(SinkTrack.open(tmp_path / to), run.sinks)


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "killed"])
def test_plain_xarray_opens_a_recording_without_a_warning(tmp_path, stopped):
    store = StoredSteps(tmp_path / "run.zarr", AXES, 4)
    for step in range(2):
        store.describe(ATTRS, {"is_real": np.ones((1, 4), bool)})
        store.append(small_step(step))
    store.flush()
    if not stopped:
        store.describe(ATTRS, {"unmask_step": np.array([[-1, 0, 1, 2]])})
        store.dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opener in (xr.open_dataset, xr.open_zarr):
            data = opener(tmp_path / "run.zarr")
            assert ("unmask_step" in data) != stopped
            for step in range(2):
                np.testing.assert_array_equal(data["score"].isel(step=step), small_step(step)["score"])
            assert data["score"].isel(step=[2, 3]).isnull().all()


@pytest.mark.usefixtures("unchecked")
def test_a_recording_needs_a_new_path_and_reduce_is_a_function(tmp_path):
    path = tmp_path / "mine.zarr"
    path.mkdir()
    for make, text in (
        (lambda: Record(out=path), r"mine\.zarr already exists; choose another path"),
        (lambda: StoredSteps(path, AXES, 4), "already exists"),
        (lambda: Record(reduce=3), "reduce must be a function or None; got 3"),
        (lambda: Record(reduce=print, out="run.zarr"), r"without out=; got .* and out='run.zarr'"),
    ):
        with pytest.raises(SettingError, match=text):
            make()


def test_steps_in_main_memory_are_copied_once():
    store, given = Steps(AXES, 3), [small_step(0), small_step(1)]
    kept = [store.append(step)["score"] for step in given]
    given[1]["score"][:] = 0.0
    found = store.dataset()["score"].to_numpy()
    assert np.shares_memory(found, kept[1])
    np.testing.assert_array_equal(found[:, -1], small_step(1)["score"])


def test_of_two_runs_that_race_to_one_path_the_later_is_refused_and_the_other_keeps_its_steps(tmp_path):
    """Both find the path free before either writes to it."""
    first, second = (StoredSteps(tmp_path / "run.zarr", AXES, 2) for _ in range(2))
    first.append(small_step(0)), first.flush()
    with pytest.raises(SettingError, match=r"run\.zarr already exists"):
        second.append(small_step(1)), second.flush()
    first.append(small_step(1)), first.flush()
    assert first.dataset().sizes["step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.zarr"]


def test_a_reducing_run_hands_over_consecutive_parts_and_keeps_neither_them_nor_places(tiny_llada, monkeypatch):
    monkeypatch.setattr("sinklens.sinks.steps.AT_ONCE", 20_000)
    names = ("score", "value_norm", "token_id", "masked", "committed")
    parts, alive, most = [], [], []

    def reduce(track):
        gc.collect()
        alive.append(weakref.ref(track))
        most.append(sum(one() is not None for one in alive))
        parts.append({name: track[name].to_numpy().copy() for name in names})
        assert track.prompt_length == kept.prompt_length

    settings = {"gen_length": 8, "hooks": MaskSinks(top_k=1)}
    kept = sinklens.generate(tiny_llada, PROMPTS[0], record_sinks=Record(["values"]), **settings)
    reduced = sinklens.generate(tiny_llada, PROMPTS[0], record_sinks=Record(["values"], reduce=reduce), **settings)
    assert 2 < len(parts) < kept.steps_run
    for name in names:
        joined = np.concatenate([part[name] for part in parts], axis=1)
        np.testing.assert_array_equal(joined, kept.sinks[name].to_numpy())
    assert max(most) <= 2  # the part at hand, and the argument of the call before
    assert (len(kept.chosen), len(reduced.chosen), reduced.sinks) == (1, 0, None)
    assert reduced.tokens.equal(kept.tokens)
