"""The device check keeps all findings when a part crashes or hangs, and runs on a CPU."""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from sinklens.devices import check
from sinklens.devices.check import MARK, Report, run_part
from sinklens.devices.findings import Finding
from sinklens.devices.parts import PARTS, Part

PART = Part("runs", "complete runs", 0.5)
SCRIPT = f"""
import json, os, signal, subprocess, sys, time
def say(what): print({MARK!r} + json.dumps({{"part": "runs", "what": what, "status": "passed"}}), flush=True)
print("something else on standard output")
say("first")
"""
ENDS = {
    "ends normally": ("say('second')", None),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11"),
    "raises": ("raise ValueError('no such kernel')", "exit status 1: .*ValueError: no such kernel"),
    "hangs": ("time.sleep(600)", "stopped after 3 s"),
}


@pytest.mark.parametrize("end", ENDS)
def test_findings_of_a_part_are_kept_however_it_ends(end):
    code, failure = ENDS[end]
    found, started = [], time.monotonic()
    run_part(PART, [sys.executable, "-c", SCRIPT + code], 3.0 if end == "hangs" else 60.0, found.append)
    assert time.monotonic() - started < 60
    assert [finding.what for finding in found if finding.status == "passed"] == ["first", "second"][
        : 1 + (failure is None)
    ]
    failed = [finding for finding in found if finding.status == "failed"]
    assert len(failed) == (failure is not None)
    if failure is not None:
        assert re.search(failure, failed[0].detail), failed[0].detail


def test_stopping_a_part_also_stops_its_child_processes():
    wait = "time.sleep(600)"
    code = f"child = subprocess.Popen([sys.executable, '-c', 'import time; {wait}'])\nsay(str(child.pid))\n{wait}"
    found = []
    run_part(PART, [sys.executable, "-c", SCRIPT + code], 15.0, found.append)
    child = int(found[1].what)
    deadline = time.monotonic() + 60  # a killed process may take a moment to end
    while _runs(child):
        assert time.monotonic() < deadline, "the child process of the part is still running"
        time.sleep(0.05)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_finding_is_written_to_disk_immediately(tmp_path):
    report = Report(tmp_path / "out.json", "cpu")
    for number in range(3):
        report.add(Finding("runs", f"claim {number}", "passed", "ünïcode"))
        content = json.loads(report.out.read_text())
        assert [finding["what"] for finding in content["findings"]] == [f"claim {n}" for n in range(number + 1)]
    assert content["device"] == "cpu"
    assert os.listdir(tmp_path) == ["out.json"], "a partly written file is left"


@pytest.mark.parametrize(("part", "status", "fails"), [
    ("runs", "failed", True), ("speed", "failed", False), ("runs", "not checked", False), ("runs", "passed", False),
])  # fmt: skip
def test_only_a_failure_about_correctness_fails_the_check(tmp_path, part, status, fails):
    report = Report(tmp_path / "out.json", "cpu")
    report.add(Finding(part, "a claim", status))
    assert report.failed() is fails


def test_time_that_a_part_does_not_use_goes_to_later_parts(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(check, "run_part", lambda part, command, limit, keep: limits.append(limit))
    check.check(Report(tmp_path / "out.json", "cpu"), list(PARTS), 600.0, tmp_path)
    shares = [part.share for part in PARTS]
    wanted = [600 * share / sum(shares[place:]) for place, share in enumerate(shares)]
    assert limits == pytest.approx(wanted, rel=0.01)
    assert limits[-1] == pytest.approx(600, rel=0.01)


def test_on_a_cpu_the_check_runs_and_reports_what_it_could_not_check(tmp_path):
    """Three of the parts, by the command that a user types; the others are tested separately."""
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "sinklens.devices.check",
        "--device",
        "cpu",
        "--out",
        out,
        "--conformance",
        tmp_path,
    ]
    chosen = ["environment", "hooking", "spreading"]
    done = subprocess.run(
        [*command, "--only", *chosen], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert list(content["seconds"]) == chosen
    statuses = {(finding["part"], finding["status"]) for finding in content["findings"]}
    assert statuses >= {("hooking", "passed"), ("environment", "noted"), ("environment", "not checked")}
    assert "failed" not in {status for _, status in statuses}
    assert "Not checked, and why:" in done.stdout
    assert "it takes two GPUs; there are none" in done.stdout


def test_a_failing_part_gives_exit_status_1_and_the_other_parts_still_run(tmp_path, monkeypatch, capsys):
    def run(part, command, limit, keep):
        keep(Finding(part.name, "a claim", "failed" if part.name == "runs" else "passed", "why"))

    monkeypatch.setattr(check, "run_part", run)
    given = ["--device", "cpu", "--out", str(tmp_path / "out.json")]
    assert check.main([*given, "--only", "environment", "kernels"]) == 0
    assert check.main(given) == 1
    output = capsys.readouterr()
    assert "FAILED  runs: a claim: why" in output.err
    assert "Failed:\n  runs: a claim: why" in output.out
    assert len(json.loads((tmp_path / "out.json").read_text())["findings"]) == len(PARTS)
