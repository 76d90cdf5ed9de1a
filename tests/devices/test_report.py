"""Outcomes of tests become findings, in the JSON file and in the table."""

import json

import pytest

from sinklens.devices.report import Finding, Report, findings_of


def outcome(status, longrepr=None, when="call", **properties):
    return pytest.TestReport(
        "test_runs.py::test_twice", ("test_runs.py", 1, "test_twice"), {}, status, longrepr, when,
        user_properties=list(properties.items()), duration=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(("report", "wanted"), [
    (outcome("passed", what="twice", detail="8 steps"), Finding("runs", "twice", "passed", "8 steps", seconds=0.5)),
    (
        outcome("passed", what="twice", detail="5 pairs", value=1.5, aim=1.02),
        Finding("runs", "twice", "measured", "5 pairs", 1.5, 1.02, 0.5),
    ),
    (
        outcome("skipped", ("test_runs.py", 1, "Skipped: it takes two GPUs"), "setup", what="twice"),
        Finding("runs", "twice", "not checked", "it takes two GPUs", seconds=0.5),
    ),
    (
        outcome("failed", "worker 'gw0' crashed", "???"),
        Finding("runs", "test_twice", "failed", "worker 'gw0' crashed", seconds=0.5),
    ),
    (
        outcome("failed", "the device is gone", "setup", what="twice"),
        Finding("runs", "twice", "failed", "the device is gone", seconds=0.5),
    ),
])  # fmt: skip
def test_an_outcome_is_one_finding(report, wanted):
    assert list(findings_of(report)) == [wanted]


def test_a_phase_that_only_prepares_is_no_finding_and_a_fact_is_one():
    assert not list(findings_of(outcome("passed", when="setup", what="twice")))
    fact, found = findings_of(outcome("passed", what="twice", threads=4))
    assert fact == Finding("runs", "threads", "noted", "4")
    assert found.status == "passed"


def test_every_finding_is_written_to_disk_immediately(tmp_path):
    report = Report(tmp_path / "out.json", "cpu")
    for number in range(3):
        report.pytest_runtest_logreport(outcome("passed", what=f"claim {number}", detail="ünïcode"))
        content = json.loads(report.out.read_text())
        assert [finding["what"] for finding in content["findings"]] == [f"claim {n}" for n in range(number + 1)]
    assert (content["device"], content["seconds"]) == ("cpu", {"runs": 1.5})
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"], "a partly written file is left"


@pytest.mark.parametrize(("parts", "status"), [(["runs"], 1), (["speed"], 0), (["speed", "runs"], 1), ([], 1)])
def test_only_a_failure_about_correctness_fails_the_check(tmp_path, parts, status):
    report = Report(tmp_path / "out.json", "cpu", [Finding(part, "a claim", "failed") for part in parts])
    assert report.exit_status(1) == status
    assert report.exit_status(2) == 2, "an interrupted check"


def test_the_table_counts_findings_and_lists_the_noteworthy_ones(tmp_path):
    findings = [
        Finding("runs", "the tokens", "passed"), Finding("runs", "twice", "failed", "canvases differ"),
        Finding("speed", "ratio", "measured", "5 pairs", 1.5, 1.02),
        Finding("runs", "two GPUs", "not checked", "there is one"),
    ]  # fmt: skip
    lines = Report(tmp_path / "out.json", "cpu", findings, {"runs": 3.2, "speed": 60.0}).table()
    assert lines[1].split()[:7] == ["runs", "1", "1", "1", "0", "3", "s"]
    assert lines[2].split()[:7] == ["speed", "0", "0", "0", "1", "60", "s"]
    assert "  runs: twice: canvases differ" in lines
    assert "  runs: two GPUs: there is one" in lines
    assert "  ratio: 1.500 (aim: at most 1.02, missed); 5 pairs" in lines
