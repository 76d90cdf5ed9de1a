"""Check in under ten minutes that sinklens works on this machine's accelerator.

    python -m sinklens.devices.check [--out FILE] [--only PART ...] [--device D] [--minutes N]

Each part runs in a separate process and is stopped at its time limit. Every finding is written to the JSON file
immediately, and a table is printed at the end. The exit status is 1 if a part about correctness failed or was stopped.
Without an accelerator the same parts run on the CPU, at small sizes, and report what they could not check.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from sinklens.atomic import atomic_write
from sinklens.devices.findings import Finding, carry_out, closing
from sinklens.devices.parts import PARTS, Part, Setting

MARK = "sinklens-finding "  # prefix of the lines on a part's standard output that hold a finding
START = 20.0  # seconds that a process may take to start, in addition to the part's time
REFERENCE = Path("..") / "shared" / "conformance"


@dataclass
class Report:
    """The findings so far, and the file they are written to.

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

    def add(self, finding: Finding) -> None:
        """Add a finding, and write it to disk."""
        self.findings.append(finding)
        self.write()
        if finding.status == "failed":
            print(f"FAILED  {finding.part}: {finding.what}: {finding.detail}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Write the file atomically: a reader sees the old version or the new one."""
        content = {
            "device": self.device,
            "seconds": self.seconds,
            "findings": [asdict(finding) for finding in self.findings],
        }
        with atomic_write(self.out) as part:
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def failed(self) -> bool:
        """Whether a part about correctness failed."""
        correct = {part.name for part in PARTS if part.correctness}
        return any(finding.status == "failed" and finding.part in correct for finding in self.findings)


def run_part(part: Part, command: list[str], limit: float, keep: Callable[[Finding], None]) -> None:
    """Run one part in a new process group; findings made before a crash or a timeout are kept.

    Args:
        command: command line of the process, which prints findings on lines that begin with `MARK`.
        limit: seconds after which the group is killed.
        keep: called with each finding.
    """
    environment = {"OMP_NUM_THREADS": "1"} if "cpu" in command else {}  # tiny models gain nothing from more threads
    environment = environment | os.environ | {"PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True
        )
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            _kill(process)

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    keep(Finding(**json.loads(line.removeprefix(MARK))))
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process)
        if stopped.is_set():
            keep(Finding(part.name, "the part ends within its time limit", "failed", f"stopped after {limit:.0f} s"))
        elif status:
            detail = f"exit status {status}: {_tail(stderr)}"
            keep(Finding(part.name, "the part runs to completion", "failed", detail))


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill the process and its children, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(stderr: IO[str]) -> str:
    stderr.seek(0)
    return " | ".join(line.strip() for line in stderr.read().splitlines()[-4:])[-600:]


def inside(part: Part, setting: Setting) -> None:
    """Run a part in this process and print its findings."""
    for finding in carry_out(part.name, part.claims(setting), setting.until):
        shown = asdict(finding)
        if (
            part.name == "environment"
            and finding.status == "passed"
            and not finding.what.startswith(("the ", "Triton "))
        ):
            shown["status"] = "noted"
        print(MARK + json.dumps(shown), flush=True)


def prepare(device: str) -> None:
    """Configure a part's process before it imports Triton or computes: Triton's interpreter without a GPU, no TF32."""
    if device.startswith("cuda"):
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def found_device() -> str:
    """The accelerator of this machine, or "cpu"."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    return "cuda:0" if accelerator.type == "cuda" else accelerator.type


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sinklens.devices.check", description=(__doc__ or "").split("\n")[0]
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--out", type=Path, default=Path("sinklens-check.json"), help="JSON file (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"some of: {', '.join(names)}")
    parser.add_argument("--device", help="e.g. cuda:1 or cpu; by default this machine's accelerator")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for all parts (%(default)s)")
    parser.add_argument(
        "--conformance", type=Path, default=REFERENCE, help="folder of reference data (%(default)s, if it exists)"
    )
    parser.add_argument("--inside", choices=names, help=argparse.SUPPRESS)  # run one part in this process
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)  # time for that part
    return parser


def main(given: list[str] | None = None) -> int:
    """Run the check, or one part of it, and return the exit status."""
    options = arguments().parse_args(given)
    device = options.device or found_device()
    by_name = {part.name: part for part in PARTS}
    if options.inside:
        prepare(device)
        import torch

        until = time.monotonic() + options.seconds
        inside(by_name[options.inside], Setting(torch.device(device), until, options.conformance))
        return 0
    report, chosen = Report(options.out, device), [by_name[name] for name in options.only or by_name]
    print(f"sinklens on {device}; findings are written to {options.out}", flush=True)
    check(report, chosen, options.minutes * 60, options.conformance)
    words = {part.name: part.about for part in PARTS}
    print("\n".join(["", *closing(report.findings, report.seconds, words)]))
    return int(report.failed())


def check(report: Report, parts: list[Part], seconds: float, conformance: Path) -> None:
    """Run the parts one after the other; time that a part does not use goes to the later ones."""
    ends, shares = time.monotonic() + seconds, sum(part.share for part in parts)
    for part in parts:
        started = time.monotonic()
        limit = max(10.0, (ends - started) * part.share / shares)
        shares -= part.share
        command = [
            sys.executable, "-m", "sinklens.devices.check", "--inside", part.name, "--device", report.device,
            "--seconds", str(max(5.0, limit - START)), "--conformance", str(conformance),
        ]  # fmt: skip
        run_part(part, command, limit, report.add)
        report.seconds[part.name] = round(time.monotonic() - started, 1)
        report.write()
        statuses = [finding.status for finding in report.findings if finding.part == part.name]
        counts = {status: statuses.count(status) for status in ("passed", "failed", "not checked", "measured")}
        print(f"{part.name}: {', '.join(f'{n} {status}' for status, n in counts.items() if n)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
