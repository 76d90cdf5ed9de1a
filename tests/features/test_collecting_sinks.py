"""A store of runs holds the tracks of single runs, resumes after a kill, and needs no more memory for more runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from building import random_model

import sinklens
import sinklens.sinks.run_store as run_store
from sinklens.errors import SettingError, TrackError
from sinklens.features import collect_sinks
from sinklens.sinks import EpsilonOverMean, Record, RunStore, TopK

HERE = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": str(HERE.parent)}
GIVEN = {"gen_length": 4, "steps": 4, "block_length": 2}
LENGTHS = (5, 9, 3, 7, 5)


def prompts(number=5):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 59, (LENGTHS[one % 5],), generator=draw).tolist() for one in range(number)]


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def alone(model):
    """A run of each prompt."""
    return [sinklens.generate(model, torch.tensor([one]), progress=False, **GIVEN) for one in prompts()]


@pytest.fixture
def small(monkeypatch):
    """Shards of two runs, so that a store has several."""
    monkeypatch.setattr(run_store, "SHARD", 2 * 4 * (3 * 6 * 13 * 4))


def check(store, alone, tolerance=1e-5):
    """The store's tracks are those of single runs, padded on the left."""
    for row, run in enumerate(alone):
        track, length = store.track(row), run.sinks.data.sizes["pos"]
        own = track.data.isel(pos=slice(-length, None))
        np.testing.assert_allclose(own["score"], run.sinks["score"], atol=tolerance, rtol=tolerance)
        for name in ("token_id", "masked", "committed", "is_real", "unmask_step"):
            np.testing.assert_array_equal(own[name], run.sinks[name], name)
        assert np.isnan(track["score"][..., :-length]).all()
        assert not track["is_real"][..., :-length].any()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("batch", [2, 1, 5])
def test_a_store_holds_the_tracks_of_single_runs_whatever_the_batch(model, alone, small, tmp_path, batch):
    store = collect_sinks(model, prompts(), tmp_path / "runs.zarr", batch=batch, **GIVEN)
    assert (len(store), store.finished) == (5, True)
    check(store, alone)
    together = store.track(slice(1, 4))
    assert together.data.sizes["batch"] == 3
    expected = [run.sinks.detect().sum().item() for run in alone[1:4]]
    assert together.detect().sum(("step", "layer", "head", "pos")).values.tolist() == expected
    assert [track.data.sizes["batch"] for track in store.tracks(2)] == [2, 2, 1]


def test_runs_that_are_longer_than_a_shard_are_divided_by_steps(model, alone, monkeypatch, tmp_path):
    monkeypatch.setattr(run_store, "SHARD", 2 * (3 * 6 * 13 * 4))
    store = collect_sinks(model, prompts(), tmp_path / "runs.zarr", batch=2, **GIVEN)
    assert store.group["score"].chunks[:2] == store.group["score"].shards[:2] == (1, 2)
    check(store, alone)


def test_many_short_runs_share_files_and_each_is_read_alone(model, tmp_path, monkeypatch):
    store = collect_sinks(model, prompts(30), tmp_path / "runs.zarr", **GIVEN)
    files = [file for file in (tmp_path / "runs.zarr" / "score").rglob("*") if file.is_file()]
    assert len(files) == 2  # the metadata and one shard
    assert store.group["score"].chunks[0] == 1
    read = []
    get = zarr.Array.__getitem__
    monkeypatch.setattr(zarr.Array, "__getitem__", lambda self, key: read.append(self.name) or get(self, key))
    track = store.track(3)
    assert "/score" not in read
    assert track["score"].shape[0] == 1


def test_the_strongest_keys_are_those_of_the_track(model, alone, small, tmp_path):
    store = collect_sinks(model, prompts(), tmp_path / "runs.zarr", keep="top", top_k=3, batch=2, **GIVEN)
    data = store.dataset()
    assert "score" not in data
    for row, run in enumerate(alone):
        shift = data.sizes["pos"] - run.sinks.data.sizes["pos"]
        best = run.sinks.top(3).values[0]
        np.testing.assert_array_equal(data["top_pos"].values[row], best + shift)
        scores = np.take_along_axis(run.sinks["score"].values[0], best, axis=-1)
        np.testing.assert_allclose(data["top_score"].values[row], scores, atol=1e-5)
    with pytest.raises(TrackError, match=r"keeps only top, which is no track; .* keep='all'"):
        store.track(0)


@pytest.mark.parametrize("detector", [None, TopK(2)])
def test_the_sinks_are_those_that_the_detector_finds(model, alone, tmp_path, detector, monkeypatch):
    monkeypatch.setattr(run_store, "ROWS", 32)
    store = collect_sinks(
        model, prompts(), tmp_path / "runs.zarr", keep="sinks", detector=detector, batch=2, **GIVEN
    )  # fmt: skip
    for row, run in enumerate(alone):
        found = run.sinks.detect(detector or EpsilonOverMean()).values[0]
        step, layer, head, pos = np.nonzero(found)
        shift = store.dataset().sizes["pos"] - run.sinks.data.sizes["pos"]
        sinks = store.sinks(row)
        expected = sorted(zip(step, layer, head, pos + shift, strict=True))
        columns = (sinks[name].values for name in ("step", "layer", "head", "pos"))
        assert sorted(zip(*columns, strict=True)) == expected
        np.testing.assert_allclose(np.sort(sinks["score"]), np.sort(run.sinks["score"].values[0][found]), atol=1e-5)
    with pytest.raises(TrackError, match=r"run 5 does not exist; the store has 5"):
        store.sinks(5)


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_scores_are_rounded_to_the_type_and_take_half_the_room(model, alone, tmp_path, dtype, digits):
    wide = collect_sinks(model, prompts(), tmp_path / "wide.zarr", **GIVEN)
    store = collect_sinks(model, prompts(), tmp_path / "narrow.zarr", dtype=dtype, **GIVEN)
    check(store, alone, tolerance=digits)
    kind = getattr(torch, dtype)
    expected = torch.from_numpy(wide.dataset()["score"].values).to(kind).float().numpy()
    np.testing.assert_array_equal(store.dataset()["score"].values.astype(np.float32), expected)

    def size(store):
        return sum(file.stat().st_size for file in (store.path / "score").rglob("*") if file.is_file())

    assert size(store) < 0.75 * size(wide)


def test_other_quantities_are_stored_beside_the_scores(model, tmp_path):
    store = collect_sinks(model, prompts(), tmp_path / "runs.zarr", quantities=["values"], keep="top", **GIVEN)
    run = sinklens.generate(
        model, torch.tensor([prompts()[1]]), record_sinks=Record(["values"]), progress=False, **GIVEN
    )  # fmt: skip
    np.testing.assert_allclose(store.dataset()["value_norm"][1], run.sinks["value_norm"][0], atol=1e-5)


def test_the_same_call_resumes_and_another_is_refused(model, alone, small, tmp_path):
    path, seen = tmp_path / "runs.zarr", []

    def stop(done, total):
        seen.append(done)
        if done == 3:
            raise KeyboardInterrupt("third")

    with pytest.raises(KeyboardInterrupt, match="third"):
        collect_sinks(model, prompts(), path, batch=1, report=stop, **GIVEN)
    assert len(RunStore(path)) == 3
    assert not RunStore(path).finished
    store = collect_sinks(model, prompts(), path, batch=4, report=lambda done, total: seen.append(done), **GIVEN)
    assert seen == [1, 2, 3, 5]
    check(store, alone)
    with pytest.raises(SettingError, match=r"recorded with other keep, detector; choose another path"):
        collect_sinks(model, prompts(), path, keep="sinks", detector=EpsilonOverMean(), **GIVEN)


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_collecting_sinks import GIVEN, prompts, random_model
import sinklens.sinks.run_store as run_store
from sinklens.features import collect_sinks
run_store.SHARD = 2 * 4 * (3 * 6 * 13 * 4)
collect_sinks(random_model(), prompts(40), sys.argv[1], batch=2, report=lambda done, total: time.sleep(0.2), **GIVEN)
"""


@pytest.mark.extended
def test_a_killed_process_leaves_a_store_that_the_same_call_completes(model, small, tmp_path):
    path = tmp_path / "runs.zarr"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(HERE)], env=ENV)
    until = time.monotonic() + 120
    while time.monotonic() < until and not ((path / "zarr.json").exists() and len(RunStore(path)) >= 6):
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    killed = len(RunStore(path))
    assert 6 <= killed < 40
    store = collect_sinks(model, prompts(40), path, batch=2, **GIVEN)
    whole = collect_sinks(model, prompts(40), tmp_path / "whole.zarr", batch=5, **GIVEN)
    for name in ("score", "token_id", "is_real", "unmask_step"):
        np.testing.assert_allclose(store.dataset()[name], whole.dataset()[name], atol=1e-5, err_msg=name)


MEMORY = """
import json, resource, sys
sys.path.insert(0, sys.argv[2])
from test_collecting_sinks import GIVEN, prompts, random_model
from sinklens.features import collect_sinks
from sinklens.sinks import run_store
run_store.SHARD = 2**20
given = GIVEN | {"gen_length": 32, "steps": 32}
peaks = {}
def keep(done, total):
    peaks[done] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
collect_sinks(random_model(), prompts(int(sys.argv[3])), sys.argv[1], batch=5, report=keep, **given)
print(json.dumps(peaks))
"""


def peaks(tmp_path, number):
    """Peak memory in kB after each batch."""
    call = [sys.executable, "-c", MEMORY, str(tmp_path / "runs.zarr"), str(HERE), str(number)]
    done = subprocess.run(call, env=ENV, check=True, capture_output=True, text=True)
    return {int(one): size for one, size in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.extended
def test_memory_does_not_grow_with_the_number_of_runs(tmp_path):
    """200 such runs of 32 steps have 20 MB of scores and canvases; the allocator's pools are full after as many."""
    found = peaks(tmp_path, 400)
    assert found[400] - found[200] < 7_500


@pytest.mark.parametrize(("prompts", "given", "match"), [
    ([[1]], {"keep": "best"}, r"keep must be one of all, top, sinks; got 'best'"),
    ([[1]], {"keep": "top", "detector": TopK(1)}, r"detector= belongs to keep='sinks'; with keep='top' leave it out"),
    ([[1]], {"dtype": "int8"}, r"dtype must be one of float32, float16, bfloat16; got 'int8'"),
    ([], {}, r"needs a list of at least one prompt"),
    ([[1]], {}, r"is not a store of runs; make one with features.collect_sinks"),
])  # fmt: skip
def test_wrong_arguments_say_what_is_allowed(model, tmp_path, unchecked, prompts, given, match):
    with pytest.raises(SettingError, match=match):
        collect_sinks(model, prompts, tmp_path, **given, **GIVEN)
