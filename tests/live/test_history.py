"""Runs in a folder outlive the lab, killed or closed; without one, nothing remains."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from building import random_hf
from lab_client import Client
from lab_page import PROMPT

import sinklens
from sinklens.errors import SinklensError
from sinklens.live import session
from sinklens.live.execution import LiveRun
from sinklens.live.history import MOST_BYTES, RunHistory
from sinklens.live.loading import lab_models
from sinklens.live.outcome import ARRAYS, RunOutcome
from sinklens.live.refusal import Refused
from sinklens.live.session import LabModel, Session
from sinklens.live.spec import RunSpec


@pytest.fixture(scope="module")
def run(tiny_llada):
    """A short run."""
    return sinklens.generate(tiny_llada, PROMPT, gen_length=4)


def test_an_outcome_is_the_run_it_came_from(run, tiny_llada, tmp_path):
    """Written, read and turned back into a `Generation`."""
    RunHistory(tmp_path).save("a", {}, {}, RunOutcome.of(run))
    found = RunHistory(tmp_path).load("a").generation(tiny_llada, None)
    for name in ("canvas", "undecided", "unmask_step", "real"):
        assert (getattr(found, name) == getattr(run, name)).all(), name
    assert (found.answers, found.settings, found.seed) == (run.answers, run.settings, run.seed)
    assert found.sinks.data.attrs == run.sinks.data.attrs
    for name in run.sinks.data.variables:
        np.testing.assert_array_equal(found.sinks.data[name], run.sinks.data[name], err_msg=str(name))


SUMMARY = {"created": 1.0, "status": "done", "steps_run": 4, "text": "a"}
SPEC = RunSpec("tiny-llada", PROMPT).to_json()


def test_a_damaged_file_is_listed_and_the_others_open(run, tmp_path):
    RunHistory(tmp_path).save("good", SUMMARY, SPEC, RunOutcome.of(run))
    complete = (tmp_path / "runs" / "good.npz").read_bytes()
    (tmp_path / "runs" / "cut.npz").write_bytes(complete[: len(complete) // 2])
    (tmp_path / "runs" / ".good.123.part.npz").write_bytes(b"")
    (tmp_path / "runs" / "ends with a space .npz").write_bytes(complete)
    with pytest.warns(UserWarning, match=r"cut\.npz is damaged, or not a run of this version of the lab: BadZipFile"):
        cut, good = RunHistory(tmp_path).runs()
    assert (cut.id, cut.status, cut.damaged, good.id) == ("cut", "failed", True, "good")
    assert (good.spec, good.facts["text"]) == (RunSpec.from_json(SPEC), "a")


def other_files(folder: Path) -> dict[str, str]:
    """Files that are no run of a folder, and what is said of each."""
    runs, elsewhere = folder / "keep" / "runs", folder / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(runs / "good.npz", elsewhere / "run.npz")
    named = {"zero": "/dev/zero", "null": "/dev/null", "stdin": "/proc/self/fd/0", "run": elsewhere / "run.npz"}
    for name, target in named.items():
        (runs / f"{name}.npz").symlink_to(target)
    (runs / "none.npz").symlink_to("none")
    (runs / "loop.npz").symlink_to("loop.npz")
    (runs / "folder.npz").mkdir()
    os.mkfifo(runs / "pipe.npz")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(runs / "socket.npz"))
    listener.close()
    with (runs / "huge.npz").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with ZipFile(runs / "record.npz", "w") as archive, archive.open("record.npy", "w") as part:
        for _ in range(65):
            part.write(bytes(1_000_000))
    with ZipFile(runs / "overlap.npz", "w") as archive:
        archive.writestr("record.npy", bytes(1000))
        archive.filelist.extend(archive.filelist * 9)
    links, irregular = "it is a link that leads out of the folder; remove it", "it is not a regular file"
    return dict.fromkeys(named, links) | dict.fromkeys(("none", "loop", "folder", "pipe", "socket"), irregular) | {
        "huge": "it has 4,000,000,001 bytes, and a run at most 4,000,000,000; remove it",
        "record": "its record is too large", "overlap": "its arrays overlap",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_only_regular_files_of_the_folder_are_read(run, tmp_path):
    """When the lab opens, and when a file that was a run is read again."""
    history = RunHistory(tmp_path / "keep")
    history.save("good", SUMMARY, SPEC, RunOutcome.of(run))
    said = other_files(tmp_path)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    errors = {found.id: found.facts["error"] for found in RunHistory(tmp_path / "keep").runs()}
    assert errors.pop("good") is None
    assert set(errors) == set(said)
    for name, text in said.items():
        assert text in errors[name], errors[name]
        with pytest.raises(Refused, match="the run's file can no longer be read") as caught:
            history.load(name)
        assert text in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000
    with pytest.raises(SinklensError, match=r"could not delete .*folder\.npz.* Delete it by hand"):
        history.remove("folder")
    history.remove("run")
    assert (tmp_path / "elsewhere" / "run.npz").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SinklensError, match=r"other/runs is a link\. Remove it, or choose another"):
        RunHistory(tmp_path / "other")


def test_labs_that_share_a_folder_overwrite_nothing(tiny_llada, tmp_path):
    """Two labs write at once; a third lists the runs of both, and one that another deleted is named as gone."""
    labs = [Session(lab_models([model]), tmp_path) for model in (tiny_llada, "tiny-llada")]
    body = {"prompt": "Question: 1", "settings": {"gen_length": 2}}
    mine = [[opened.submit(body | {"seed": seed}) for seed in range(4)] for opened in labs]
    for opened, runs in zip(labs, mine, strict=True):
        assert {finished(opened, run) for run in runs} == {"done"}
    third = Session(lab_models([tiny_llada]), tmp_path)
    assert {run["id"] for run in third.runs()} == {*mine[0], *mine[1]}
    for run, expected in {run: labs[at].outcome(run)[1].canvas for at in range(2) for run in mine[at]}.items():
        np.testing.assert_array_equal(third.outcome(run)[1].canvas, expected)
    labs[0].remove(mine[0][0])
    with pytest.raises(Refused, match=r"the run's file can no longer be read: it was deleted\. Run it again\."):
        third.outcome(mine[0][0])
    third.remove(mine[0][0])
    for opened in (*labs, third):
        opened.close()


DAMAGED = {  # name: (what differs in the summary, what differs in the record, text)
    "a summary with NaN": ({"seconds": float("nan")}, {}, "its record is not valid JSON"),
    "a time without end": ({"created": float("inf")}, {}, "its record is not valid JSON"),
    "a time that is text": ({"created": "1"}, {}, "its time is not a number"),
    "a text with half a surrogate pair": ({"text": "\ud800"}, {}, "its record is not valid JSON"),
    "a text that is an object": ({"text": {"a": 1}}, {}, "text of its summary has the wrong type"),
    "a status that is code": ({"status": "<script>"}, {}, "its status is unknown"),
    "steps that are text": ({"steps_run": "4"}, {}, "steps_run of its summary has the wrong type"),
    "a seed that is code": ({}, {"spec": SPEC | {"seed": "1); exit("}}, "seed must be an integer"),
    "no specification": ({}, {"spec": {}}, "the record of a run lacks fields"),
    "a summary that is a list": ({}, {"summary": [1]}, "TypeError"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_forged_record_is_listed_as_damaged(run, tmp_path, name):
    summary, record, text = DAMAGED[name]
    forged = {"summary": SUMMARY | summary, "spec": SPEC, "outcome": RunOutcome.of(run).record()} | record
    RunHistory(tmp_path)
    np.savez(tmp_path / "runs" / "forged.npz", record=np.array(json.dumps(forged)))
    with pytest.warns(UserWarning, match=text):
        (found,) = RunHistory(tmp_path).runs()
    assert text in found.facts["error"]
    json.dumps(found.facts, allow_nan=False).encode()


BROKEN = {  # array -> what a forged file has instead
    "canvas": np.zeros((3, 2)), "score": np.zeros((1, 2, 3, 4), dtype=np.float32), "real": np.zeros(3, dtype=bool),
    "committed": np.array([["a"]]), "unmask_step": np.zeros((2, 2), dtype=np.int64),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_forged_arrays_are_refused_when_they_are_read(run, tmp_path, name):
    outcome, history = RunOutcome.of(run), RunHistory(tmp_path)
    arrays = {entry: getattr(outcome, entry) for entry in ARRAYS} | {name: BROKEN[name]}
    record = json.dumps({"summary": SUMMARY, "spec": SPEC, "outcome": outcome.record()})
    np.savez(tmp_path / "runs" / "forged.npz", record=np.array(record), **arrays)
    with pytest.raises(Refused, match=r"the run's file can no longer be read: .* Run it again\."):
        history.load("forged")


def test_a_run_that_cannot_be_written_is_held_until_the_lab_closes(tiny_llada, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"could not create .*file.* Choose another folder for --keep"):
        RunHistory(tmp_path / "file")
    opened = Session(lab_models([tiny_llada]), tmp_path)
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("in the way, like a full disk")
    kept = opened.submit({"prompt": PROMPT, "settings": {"gen_length": 4}})
    assert (finished(opened, kept), opened.outcome(kept)[1].steps) == ("done", 4)
    assert re.match(r"could not write .* The run is lost when the lab closes\.", opened.runs()[0]["error"])
    opened.close()


def test_a_late_error_keeps_the_finished_steps(tiny_llada, tmp_path, monkeypatch):
    """In step 3 of 8, and after the last step."""
    opened, before = Session(lab_models([tiny_llada]), tmp_path), LiveRun.before
    body = {"prompt": PROMPT, "settings": {"gen_length": 8}}

    def fail(*given):
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(LiveRun, "before", lambda self, step, state: fail() if step == 3 else before(self, step, state))
        halted = opened.submit(body)
        assert finished(opened, halted) == "failed"
    with monkeypatch.context() as broken:
        broken.setattr(Session, "_right", fail)
        late = opened.submit(body)
        assert finished(opened, late) == "failed"
    whole = opened.submit(body)
    assert finished(opened, whole) == "done"
    canvas = opened.outcome(whole)[1].canvas
    np.testing.assert_array_equal(opened.outcome(halted)[1].canvas, canvas[:4])
    np.testing.assert_array_equal(opened.outcome(late)[1].canvas, canvas)
    opened.close()
    again = Session(lab_models([tiny_llada]), tmp_path)
    assert {run["id"]: run["steps_run"] for run in again.runs()} == {halted: 3, late: 8, whole: 8}
    assert "the run crashed with OSError: the disk is gone" in again.run(halted).facts["error"]
    again.close()


def finished(opened: Session, run: str) -> str:
    """Wait for the end of a run; returns its status."""
    while opened.run(run).status in ("queued", "running"):
        opened.thread.compute(lambda: None).result(60)
    return opened.run(run).status


def test_without_a_folder_nothing_remains_and_the_oldest_runs_go(tiny_llada, monkeypatch):
    monkeypatch.setattr(session, "MOST_KEPT", 2)
    opened = Session(lab_models([tiny_llada]))
    folder = opened.history.folder
    ids = []
    for seed in range(4):
        ids.append(opened.submit({"prompt": "Question: 1", "settings": {"gen_length": 2}, "seed": seed}))
        finished(opened, ids[-1])
    assert [entry["id"] for entry in opened.runs()] == ids[-2:]
    assert {file.stem for file in (folder / "runs").iterdir()} == set(ids[-2:])
    opened.close()
    assert not folder.exists()


def test_a_run_cancelled_before_it_has_begun_does_not_run(tiny_llada, monkeypatch):
    """It has left the queue, and its first step is not prepared yet."""
    opened = Session(lab_models([tiny_llada]))
    begun, released, prepare = threading.Event(), threading.Event(), LiveRun.__init__

    def wait(self, *given):
        begun.set()
        assert released.wait(60)
        prepare(self, *given)

    monkeypatch.setattr(LiveRun, "__init__", wait)
    run = opened.submit({"prompt": PROMPT, "settings": {"gen_length": 4}})
    assert begun.wait(60)
    opened.cancel(run)
    released.set()
    assert (finished(opened, run), opened.run(run).facts["steps_run"]) == ("cancelled", 0)
    opened.close()


def test_a_kept_run_is_read_with_the_weights_that_made_it(run, tmp_path):
    first, changed_hf = sinklens.load(random_hf("llama")), random_hf("llama")
    with torch.no_grad():
        changed_hf.lm_head.weight[3] *= 2
    other = sinklens.load(changed_hf)
    opened = Session([LabModel("mine", first, "")], tmp_path)
    kept = opened.submit({"ids": [3, 4, 5], "settings": {"gen_length": 4}})
    assert finished(opened, kept) == "done"
    opened.close()
    RunHistory(tmp_path).save("empty", {"created": 0.0}, {}, RunOutcome.of(run))
    with pytest.warns(UserWarning, match=r"empty\.npz is damaged, or not a run of this version of the lab: KeyError"):
        same = Session([LabModel("mine", first, "")], tmp_path)
    assert same.model_of(kept) is first
    with pytest.raises(Refused, match="the run is failed and has no finished steps to read"):
        same.outcome("empty")
    with pytest.raises(Refused, match=r"empty\.npz is damaged, or not a run of this version of the lab"):
        same.spec("empty")
    same.remove("empty")
    same.close()
    changed = Session([LabModel("mine", other, "")], tmp_path)
    with pytest.raises(Refused, match=r"the run was made by other weights called 'mine'; open the lab with these"):
        changed.model_of(kept)
    changed.close()


def started(keep: Path | None, **environment: str) -> tuple[subprocess.Popen, list[str]]:
    """A lab in another process, its address and its token."""
    command = [sys.executable, "-m", "sinklens.cli", "lab", "tiny-llada", "--no-browser"]
    command += [] if keep is None else ["--keep", str(keep)]
    given = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given)
    assert process.stdout is not None
    return process, [process.stdout.readline().split()[-1] for _ in range(2)]


@pytest.mark.extended
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_lab_that_a_signal_ends_leaves_no_file(tmp_path, name, running):
    """While it waits, and in the middle of a run; the terminal and its shell may both send one."""
    process, link = started(None, TMPDIR=str(tmp_path))
    try:
        client = Client(*link).follow()
        client.run(prompt=PROMPT, settings={"gen_length": 4})
        if running:
            run = client.submit(prompt="Question: 1", settings={"gen_length": 100})
            client.wait(lambda event: event.kind == "step" and event.data["run"] == run)
        assert [any(folder.iterdir()) for folder in tmp_path.glob("sinklens-lab-*")] == [True, True]
        for _ in range(1 if name == "SIGINT" else 3):
            process.send_signal(signal.Signals[name])
        assert process.wait(30) == 0
        assert "The lab is closed." in process.stdout.read()
    finally:
        process.kill()
    assert list(tmp_path.glob("sinklens-*")) == []


@pytest.mark.extended
def test_a_killed_lab_comes_back_with_its_finished_runs(tmp_path):
    """SIGKILL between two steps of a run; the finished run and the next run are as if nothing had happened."""
    process, link = started(tmp_path)
    try:
        client = Client(*link).follow()
        done = client.run(prompt=PROMPT, settings={"gen_length": 4})
        run = done["summary"]["id"]
        lost = client.submit(prompt="Question: 1", settings={"gen_length": 100})
        client.wait(lambda event: event.kind == "step" and event.data["run"] == lost)
        assert client.get(f"/api/runs/{lost}")["summary"]["status"] == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    client.close()
    process, link = started(tmp_path)
    try:
        client = Client(*link)
        assert [entry["id"] for entry in client.get("/api/session")["runs"]] == [run]
        assert client.get(f"/api/runs/{run}") == json.loads(json.dumps(done))
        assert client.run(prompt=PROMPT, settings={"gen_length": 4}, replay=run)["canvas"] == done["canvas"]
        assert client.get(f"/api/runs/{run}/pattern", step=1, layer=0)["shape"] == [6, 28, 28]
        client.close()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert f"The lab is closed. Its runs are in {tmp_path}." in process.stdout.read()
