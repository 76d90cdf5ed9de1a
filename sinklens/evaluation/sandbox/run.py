"""Run a generated program against a task's tests so that it can harm neither the system nor its own verdict.

The program and the tests run in two sandboxed processes (bubblewrap.py), joined by two pipes that carry plain values
(wire_format.py). The tests call the program's function through the pipe, and only the tests' process can report.
**A program passes only if the tests' ``check`` returned, in a process that the program cannot reach.** Printing a
success marker, exiting with status 0, replacing what ``assert`` relies on, objects that equal everything: all of that
happens in the program's own process and has no effect on the verdict.

The sandbox gives no network, no other processes (threads count), no files but Python's own library and an empty folder,
no inherited environment, and limits on time, memory, files and output. The system's files, processes and sockets do not
exist inside, and everything the program started ends with it. Programs can import the standard library only, so a
verdict does not depend on what is installed; random numbers and set order are the same every time.

Without bubblewrap, or where it cannot make namespaces, nothing runs; nor does anything run on macOS and Windows.

Limits of this design: it is not a virtual machine, so a program that exploits a kernel bug can escape. And tests are
trusted with the verdict (not with the system): tests that execute what a program returns give their verdict away.
"""

import json
import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import IO, Any, Literal, cast

from sinklens.errors import SettingError, SinklensError
from sinklens.evaluation.sandbox.bubblewrap import FILES, Child, bwrap, is_real_root, pipe, start_child, version

Status = Literal["passed", "failed", "timeout", "memory", "output", "files", "killed", "exited"]

CHECK = 0.05  # seconds between looks at the working folders
LAST_WORDS = 1.0  # seconds after the verdict in which late output is still read
CHECKER_MEMORY = 512  # least MiB for the tests' own process


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: wall-clock time from the program's first line to the end of the tests, and its processor time.
        memory_mb: MiB of address space, including about 30 for Python itself.
        processes: threads; new processes are refused.
        file_mb: MiB per file, and of the working folder in total.
        output_kb: KiB printed to both streams together.
    """

    seconds: float | int = 10.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, least in {"seconds": 0.1, "memory_mb": 64, "processes": 1, "file_mb": 1, "output_kb": 1}.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < 1e6:
                raise SettingError(f"Limits({name}={value!r}) is out of range; give {least} or more.")


@dataclass(frozen=True)
class Isolation:
    """What stands between a program and the system.

    Attributes:
        layers: what is in force; empty where nothing is run.
        missing: why nothing is run, and what to do; empty otherwise.
    """

    layers: tuple[str, ...]
    missing: str = ""

    def __str__(self) -> str:
        return ", ".join(self.layers) or f"none: {self.missing}"


@dataclass(frozen=True)
class Outcome:
    """The result of running one program.

    Attributes:
        status: "passed": the tests ran to completion without an error; "failed": a test failed or the program raised;
            "timeout"; "memory"; "output" and "files": it printed or wrote more than allowed; "killed": by a signal;
            "exited": it ended before the tests did.
        detail: one line on what happened; empty if passed.
        exit_code: of the program's process, negative for a signal; None if it was killed from outside.
        stdout, stderr: what it printed, up to the limit.
        seconds: wall-clock time from the program's first line.
        isolation: what was in force.
    """

    status: Status
    detail: str
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float
    isolation: Isolation

    @property
    def passed(self) -> bool:
        """Whether the tests ran to completion without an error."""
        return self.status == "passed"


@cache
def available_isolation() -> Isolation:
    """The isolation of programs on this system, probed once, or why none is available."""
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        return Isolation((), f"bubblewrap needs Linux, this is {system}. Use Linux, a container or a virtual machine")
    try:
        name = f"bubblewrap {'.'.join(map(str, version(bwrap())))}"
        with ExitStack() as stack:
            calls, replies = pipe(stack), pipe(stack)
            stack.enter_context(start_child("candidate", asdict(Limits()), calls[0], replies[1])).wait_until_ready()
    except SinklensError as error:
        return Isolation((), str(error))
    owner = "a user of its own" if is_real_root() else "user namespace"
    return Isolation((name, owner, "system-call filter", "resource limits", "clean environment"))


def run_program(
    program: str, test: str, entry_point: str, *, helpers: str = "", limits: Limits | None = None
) -> Outcome:
    """Run `program`, then `test` against its function.

    Args:
        program: Python source that defines the function: a prompt joined with its completion.
        test: Python source that defines ``check(candidate)``, which raises if the function is wrong.
        entry_point: the function's name. The tests may also call it by that name.
        helpers: more Python source that the tests need, such as the task's prompt, whose other functions they call.
            It is trusted like the tests, so it must never be a completion.
        limits: what the program may use.

    Raises:
        SinklensError: the isolation is unavailable, or the tests fail to run regardless of the program.
    """
    limits = limits or Limits()
    isolation = available_isolation()
    if not isolation.layers:
        raise SinklensError(f"generated programs are not run here: {isolation.missing}.")
    key = secrets.token_hex(16)
    with _pair(limits) as (candidate, checker):
        for child in (checker, candidate):
            child.wait_until_ready()
        checker.begin({"test": test, "helpers": helpers, "entry_point": entry_point, "key": key})
        candidate.begin({"program": program, "entry_point": entry_point})
        return _Watch(checker, candidate, limits, key).outcome(isolation)


@contextmanager
def _pair(limits: Limits) -> Iterator[tuple[Child, Child]]:
    """Two connected sandboxed processes that wait for their tasks."""
    own, theirs = asdict(limits), asdict(replace(limits, memory_mb=max(limits.memory_mb, CHECKER_MEMORY)))
    with ExitStack() as stack:
        calls, replies = pipe(stack), pipe(stack)
        checker = stack.enter_context(start_child("checker", theirs, calls[1], replies[0]))
        candidate = stack.enter_context(start_child("candidate", own, calls[0], replies[1]))
        for end in (*calls, *replies):
            end.close()  # so that either side notices when the other exits
        yield candidate, checker


class _Watch:
    """Waits for a verdict, an exceeded limit or the end of the time, whichever comes first."""

    def __init__(self, checker: Child, candidate: Child, limits: Limits, key: str) -> None:
        self._processes = {"the tests' own process": checker, "the program": candidate}
        self._checker, self._candidate, self._limits, self._key = checker, candidate, limits, key
        self._verdict: dict[str, Any] | None = None
        self._printed = {"stdout": bytearray(), "stderr": bytearray()}
        self._overfilled = ""  # who made too many files

    def outcome(self, isolation: Isolation) -> Outcome:
        """The program's outcome.

        Raises:
            SinklensError: the tests do not run.
        """
        started = time.monotonic()
        with selectors.DefaultSelector() as selector:
            self._register(selector)
            self._listen(selector, started + self._limits.seconds, lambda: self._verdict is None)
            seconds = time.monotonic() - started
            self._until = time.monotonic() + (LAST_WORDS if self._verdict is not None else 0)
            self._listen(selector, self._until, lambda: True)
        status, detail = self._status()
        most = self._limits.output_kb * 1024
        out, err = (bytes(text[:most]).decode(errors="replace") for text in self._printed.values())
        return Outcome(status, detail, self._code(self._candidate), out, err, seconds, isolation)

    def _register(self, selector: selectors.BaseSelector) -> None:
        process = self._candidate.process
        selector.register(self._checker.reports, selectors.EVENT_READ, "report")
        for name, source in {"stdout": process.stdout, "stderr": process.stderr}.items():
            selector.register(cast(IO[bytes], source), selectors.EVENT_READ, name)

    def _listen(self, selector: selectors.BaseSelector, until: float, wanted: Callable[[], bool]) -> None:
        """Read until that time, until nothing more is wanted, until it is too much, or until all has arrived."""
        while wanted() and selector.get_map() and not self._exceeded() and (left := until - time.monotonic()) > 0:
            for event, _ in selector.select(min(left, CHECK)):
                if not self._take(event.data, event.fd):
                    selector.unregister(event.fileobj)

    def _take(self, name: str, place: int) -> bool:
        """Read from one source; False when it is exhausted."""
        data = os.read(place, 2**16)
        if name in self._printed:
            self._printed[name] += data
        elif self._verdict is None:
            self._verdict = _parsed(data) if data else {"verdict": "lost"}
        return bool(data)

    def _exceeded(self) -> bool:
        for who, child in self._processes.items():
            if child.overfilled(self._limits.file_mb):
                self._overfilled = who
        return bool(self._overfilled) or self._flooded()

    def _flooded(self) -> bool:
        return sum(map(len, self._printed.values())) > self._limits.output_kb * 1024

    def _code(self, child: Child) -> int | None:
        return child.exit_code(self._until - time.monotonic())

    def _status(self) -> tuple[Status, str]:
        if self._overfilled:
            most = f"{self._limits.file_mb} MiB, or more than {FILES} files"
            return "files", f"{self._overfilled} wrote more than {most}"
        if self._flooded():
            return "output", f"it printed more than {self._limits.output_kb} KiB"
        if self._verdict is None:
            return "timeout", f"not done after {self._limits.seconds} s"
        detail = self._verdict.get("detail", "")
        match self._verdict["verdict"]:
            case "passed" if self._verdict.get("key") == self._key:
                return "passed", ""
            case "broken":
                raise SinklensError(
                    f"the tests fail to run regardless of the program: {detail}. They need a `check` that takes the "
                    f"function; pass other functions they call as helpers="
                )
            case "failed" if self._verdict.get("kind") == "MemoryError":
                return "memory", detail
            case "failed":
                return "failed", detail
            case "gone":
                return self._gone(self._candidate, "the program")
            case "lost":
                return self._gone(self._checker, "the tests' own process")
        return "failed", "a verdict that the checker did not send"

    def _gone(self, child: Child, who: str) -> tuple[Status, str]:
        """How a process ended that should still be running."""
        code = self._code(child)
        if code == -signal.SIGXCPU:
            return "timeout", f"{who} used up {self._limits.seconds} s of processor time"
        if code is not None and code < 0:
            return "killed", f"{who} was killed by {signal.Signals(-code).name}"
        return "exited", f"{who} ended before the tests did, with status {'unknown' if code is None else code}"


def _parsed(report: bytes) -> dict[str, Any]:
    """A report; one that the tests' own process garbled is no verdict."""
    try:
        found = json.loads(report)
    except ValueError:
        found = None
    return found if isinstance(found, dict) and "verdict" in found else {"verdict": "garbled"}
