"""Runs in a folder outlive the lab, killed or closed; without one, nothing remains."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from building import random_hf
from lab_client import Client

import sinklens
from sinklens.errors import SinklensError
from sinklens.lab import session
from sinklens.lab.execution import LiveRun
from sinklens.lab.history import History
from sinklens.lab.loading import lab_models
from sinklens.lab.outcome import Outcome
from sinklens.lab.refusal import Refused
from sinklens.lab.session import LabModel, Session

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"


@pytest.fixture(scope="module")
def run(tiny_llada):
    """A short run."""
    return sinklens.generate(tiny_llada, PROMPT, gen_length=4)


def test_an_outcome_is_the_run_it_came_from(run, tiny_llada, tmp_path):
    """Written, read and turned back into a `Generation`."""
    history = History(tmp_path)
    history.save("a", {"created": 0.0}, {}, Outcome.of(run))
    found = History(tmp_path).load("a").generation(tiny_llada)
    for name in ("canvas", "undecided", "unmask_step", "real"):
        assert (getattr(found, name) == getattr(run, name)).all(), name
    assert (found.answers, found.settings, found.seed) == (run.answers, run.settings, run.seed)
    assert found.sinks.data.attrs == run.sinks.data.attrs
    for name in run.sinks.data.variables:
        np.testing.assert_array_equal(found.sinks.data[name], run.sinks.data[name], err_msg=str(name))


def test_damaged_and_unfinished_files_are_skipped(run, tmp_path):
    history = History(tmp_path)
    history.save("good", {"created": 0.0}, {}, Outcome.of(run))
    complete = (tmp_path / "runs" / "good.npz").read_bytes()
    (tmp_path / "runs" / "cut.npz").write_bytes(complete[: len(complete) // 2])
    (tmp_path / "runs" / ".good.123.part.npz").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"cut\.npz is not a run of the lab and was skipped"):
        assert [kept.id for kept in History(tmp_path).runs()] == ["good"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"could not create .*file.* Choose another folder for --keep"):
        History(tmp_path / "file")


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
    assert finished(opened, run) == "cancelled"
    assert opened.run(run).facts["steps_run"] == 0
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
    History(tmp_path).save("empty", {"created": 0.0}, {}, Outcome.of(run))
    with pytest.warns(UserWarning, match=r"the run empty in .* is incomplete and was skipped: KeyError"):
        same = Session([LabModel("mine", first, "")], tmp_path)
    assert same.model_of(kept) is first
    same.close()
    with pytest.warns(UserWarning, match="is incomplete"):
        changed = Session([LabModel("mine", other, "")], tmp_path)
    with pytest.raises(Refused, match=r"the run was made by other weights called 'mine'; open the lab with these"):
        changed.model_of(kept)
    changed.close()


def started(keep: Path) -> tuple[subprocess.Popen, str]:
    """A lab in another process, and its link."""
    command = [sys.executable, "-m", "sinklens.cli", "lab", "tiny-llada", "--no-browser", "--keep", str(keep)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    link = next(line.strip() for line in process.stdout if line.startswith("  http"))
    return process, link


@pytest.mark.extended
def test_a_killed_lab_comes_back_with_its_finished_runs(tmp_path):
    """SIGKILL between two steps of a run; the finished run, a link and the next run are as if nothing had happened."""
    process, link = started(tmp_path)
    try:
        client = Client(link).follow()
        done = client.run(prompt=PROMPT, settings={"gen_length": 4})
        run = done["summary"]["id"]
        state = client.http.post("/api/state", json={"runs": [run]}).json()["link"]
        lost = client.submit(prompt="Question: 1", settings={"gen_length": 100})
        client.wait(lambda event: event.kind == "step" and event.data["run"] == lost)
        assert client.get(f"/api/runs/{lost}")["summary"]["status"] == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    client.close()
    process, link = started(tmp_path)
    try:
        client = Client(link)
        assert [entry["id"] for entry in client.get("/api/session")["runs"]] == [run]
        assert client.get(f"/api/runs/{run}") == json.loads(json.dumps(done))
        assert client.get(f"/api/state/{state}") == {"runs": [run]}
        replayed = client.run(prompt=PROMPT, settings={"gen_length": 4}, replay=run)
        assert replayed["canvas"] == done["canvas"]
        assert client.get(f"/api/runs/{run}/pattern", step=1, layer=0)["shape"] == [6, 28, 28]
        client.close()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert f"The lab is closed. Its runs are in {tmp_path}." in process.stdout.read()


@pytest.mark.slow
def test_two_hundred_runs_do_not_grow_the_lab(tmp_path):
    """The resident memory after 220 runs is at most 5 % above that after 20."""
    process, link = started(tmp_path)
    try:
        client = Client(link).follow()
        status = Path(f"/proc/{process.pid}/status")
        sizes = []
        for number in range(220):
            chips = [{"kind": "mask_sinks", "top_k": 1 + number % 4}]
            client.run(prompt=PROMPT, settings={"gen_length": 8}, seed=number, chips=chips if number % 2 else [])
            if number in (19, 219):
                sizes.append(int(status.read_text().split("VmRSS:")[1].split()[0]))
        print(f"resident kB after 20 and 220 runs: {sizes}, {sizes[1] / sizes[0] - 1:+.2%}")
        assert sizes[1] <= 1.05 * sizes[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
