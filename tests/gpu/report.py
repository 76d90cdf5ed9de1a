"""The findings of the check: the JSON file, and the table at the end.

A test's outcome is a finding. It is described by the first line of the test's docstring, with the values of its
parameters. Details and figures are recorded as properties of the test; a property of another name is a fact.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from sinklens.utils.atomic import atomic_write

PARTS = {  # in the order in which they run
    "environment": "the device, its memory, and package versions",
    "conformance": "logits and patterns against the CPU and reference data",
    "runs": "complete runs against the CPU, and the same run twice",
    "hooking": "hooks, traces, edits, replay, masks, guidance, caches",
    "captured": "CUDA graphs against the same passes without them",
    "kernels": "Triton kernels and PyTorch's operators against the formula",
    "peak": "memory above a plain pass, and running out of it",
    "spreading": "layers on several devices or offloaded, and Ray",
    "quantized": "quantized weights: self-check, and logits against full precision",
    "speed": "ratios and figures",
}
FindingStatus = Literal["passed", "failed", "not checked", "measured", "noted"]


@dataclass(frozen=True)
class Finding:
    """The outcome of a test.

    Attributes:
        part: the part of the check.
        what: what was tested.
        status: the outcome; "noted" for facts about the machine.
        detail: the figure, or why the test failed or was skipped.
        value: a figure that neither passes nor fails; None for other outcomes.
        aim: upper limit to aim for; None if there is no aim.
        seconds: time that the test took.
    """

    part: str
    what: str
    status: FindingStatus
    detail: str = ""
    value: float | None = None
    aim: float | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.part}: {self.what}: {self.detail}"
        met = (
            "" if self.aim is None else f" (aim: at most {self.aim:g}, {'met' if self.value <= self.aim else 'missed'})"
        )
        return f"{self.what}: {self.value:.3f}{met}; {self.detail}"


def part_of(path: str | Path) -> str:
    """The part that a file or a test belongs to."""
    return Path(str(path).partition("::")[0]).stem.removeprefix("test_")


def findings_of(report: pytest.TestReport) -> Iterator[Finding]:
    """The facts that a phase of a test recorded, and its outcome; none for setup and teardown that pass."""
    if report.passed and report.when != "call":
        return
    part, what = part_of(report.nodeid), report.nodeid.partition("::")[2]  # that is all a crash leaves
    recorded: dict[str, Any] = {"what": what, "detail": "", "value": None, "aim": None} | dict(report.user_properties)
    what, detail, value, aim = (recorded.pop(name) for name in ("what", "detail", "value", "aim"))
    for name, fact in recorded.items():
        yield Finding(part, name, "noted", str(fact))
    status: FindingStatus = "passed" if value is None else "measured"
    if report.failed:
        status, detail, value, aim = "failed", _reason(report), None, None
    elif report.skipped:
        status, detail = "not checked", _reason(report)
    yield Finding(part, what, status, detail, value, aim, round(report.duration, 3))


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped."""
    found = report.longrepr
    if isinstance(found, tuple):
        return found[2].removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)  # a crashed worker leaves a text
    return " ".join((crash.message if crash else str(found)).removeprefix("AssertionError: ").split())[:600]


@dataclass
class Report:
    """A pytest plugin that collects findings and writes them.

    Attributes:
        out: the file, rewritten with every finding.
        device: the device under test.
        findings: findings of all parts.
        seconds: time that each part took.
    """

    out: Path
    device: str
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    line: Callable[[str], object] = print

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Print every figure and every failure as it comes."""
        self.line = session.config.get_terminal_writer().line

    def pytest_report_header(self) -> str:
        """What is checked, and where the findings are."""
        return f"sinklens on {self.device}; findings are written to {self.out}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the findings of a test, and write them atomically: a reader sees the old file or the new one."""
        part = part_of(report.nodeid)
        self.seconds[part] = self.seconds.get(part, 0.0) + report.duration
        found = [*findings_of(report)]
        self.findings += found
        for finding in found:
            if finding.status in ("measured", "failed"):
                self.line(f"\n{finding}")
        if found:
            seconds = {part: round(took, 1) for part, took in self.seconds.items()}
            listed = [asdict(finding) for finding in self.findings]
            content = {"device": self.device, "seconds": seconds, "findings": listed}
            with atomic_write(self.out) as file:
                file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def exit_status(self, status: int) -> int:
        """Pytest's exit status, or 0 if only measurements failed."""
        failed = {finding.part for finding in self.findings if finding.status == "failed"}
        empty = status == pytest.ExitCode.NO_TESTS_COLLECTED  # --only may name tests of the other stage
        return 0 if empty or (status == pytest.ExitCode.TESTS_FAILED and failed == {"speed"}) else status

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Set the exit status."""
        session.exitstatus = self.exit_status(exitstatus)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        terminalreporter.section("sinklens")
        for line in self.table() if self.findings else ():
            terminalreporter.line(line)

    def table(self) -> list[str]:
        """The counts of each part, and the findings that say more than "passed"."""
        columns: tuple[FindingStatus, ...] = ("passed", "failed", "not checked", "measured")
        width = max(map(len, self.seconds), default=4) + 2
        lines = [f"{'part':{width}}{'passed':>7}{'failed':>8}{'not checked':>13}{'measured':>10}{'time':>8}   about"]
        for part, took in self.seconds.items():
            statuses = [finding.status for finding in self.findings if finding.part == part]
            n = [statuses.count(status) for status in columns]
            lines.append(f"{part:{width}}{n[0]:7}{n[1]:8}{n[2]:13}{n[3]:10}{took:6.0f} s   {PARTS.get(part, '')}")
        for title, status in (("Failed", "failed"), ("Not checked, and why", "not checked"), ("Measured", "measured")):
            chosen = [finding for finding in self.findings if finding.status == status]
            lines += ["", f"{title}:", *(f"  {finding}" for finding in chosen)] if chosen else []
        return lines
