"""Run a generated program against a task's tests so that it can harm neither the system nor its own verdict.

The program and the tests run in two sandboxed processes (child.py), joined by two pipes that carry plain values
(wire_format.py). The tests call the program's function through the pipe, and only the tests' process can write to the
report. **A program passes only if the tests' ``check`` returned, in a process that the program cannot reach.** Printing
a success marker, exiting with status 0, replacing what ``assert`` relies on, objects that equal everything: all of that
happens in the program's own process and has no effect on the verdict.

The sandbox gives no network, no other processes (threads count), no files but Python's own library and an empty folder,
no inherited environment, and limits on time, memory, files and output. There are two levels:

- "namespaces": Linux namespaces for users, mounts, processes, network and IPC, created by root or by an ordinary user.
  The system's files, processes and sockets do not exist inside, and everything the program started ends with it. The
  system-call filter and Landlock apply as well.
- "process": used where namespaces are forbidden (many containers, Ubuntu 24.04 and later). The filter alone keeps the
  program to one process without sockets or signals, and Landlock blocks files. Without Landlock, which
  `Isolation.missing` then reports, the program can read and write what you can, your processes' memory included.

macOS and Windows have neither; nothing runs there. Programs can import the standard library only, so a verdict does not
depend on what is installed; random numbers and set order are the same every time.

Limits of this design: it is not a virtual machine, so a program that exploits a kernel bug can escape. And tests are
trusted with the verdict (not with the system): tests that execute what a program returns give their verdict away.
"""

import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, cast

from sinklens.errors import SettingError, SinklensError
from sinklens.evaluation.sandbox.parent import Child, pipe, start_child

Level = Literal["namespaces", "process", "none"]
Status = Literal["passed", "failed", "timeout", "memory", "output", "files", "killed", "exited"]

LAST_WORDS = 1.0  # seconds after the verdict in which late output is still read
CHECKER_MEMORY = 512  # least MiB for the tests' own process


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: wall-clock time from the program's first line to the end of the tests, and its processor time.
        memory_mb: MiB of address space, including about 30 for Python itself.
        processes: threads and processes. Where the system-call filter works, new processes are refused, so this
            counts threads.
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
        level: "namespaces", "process", or "none" where nothing is run.
        layers: what is in force.
        missing: what is unavailable, each with its reason.
    """

    level: Level
    layers: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.level}: {', '.join(self.layers) or 'nothing'}"]
        return "; ".join([*parts, *(f"not {reason}" for reason in self.missing)])


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
    """The strongest isolation this system offers, probed once, and why it is not stronger."""
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        reason = (
            f"namespaces, system-call filter, Landlock: {system} has none of them, so a program could reach the "
            f"network, your files and other processes; on macOS the memory limit is not enforced either"
        )
        return Isolation("none", (), (reason,))
    reasons: list[str] = []
    levels: tuple[Level, ...] = ("namespaces", "process")
    for level in levels:
        try:
            found = _probe(level)
            return replace(found, missing=(*reasons, *found.missing))
        except SinklensError as error:
            reasons.append(f"{level}: {error}")
    return Isolation("none", (), tuple(reasons))


def _probe(level: Level) -> Isolation:
    """The isolation of a sandboxed process that does nothing.

    Raises:
        SinklensError: it could not be set up.
    """
    with ExitStack() as stack:
        probe = stack.enter_context(start_child("nobody", {}, _settings(level, Limits()), pipe(stack), capture=True))
        probe.begin()
        try:
            probe.wait_until_ready()
        except SinklensError as error:
            raise SinklensError(f"{error}{_hint()}" if level == "namespaces" else str(error)) from error
        return _isolation(level, probe)


def _settings(level: Level, limits: Limits) -> dict[str, Any]:
    return {"level": level, "limits": asdict(limits)}


def _isolation(level: Level, child: Child) -> Isolation:
    return Isolation(level, tuple(child.ready["ready"]), tuple(child.ready["missing"]))


def _hint() -> str:
    """Why an ordinary user cannot create namespaces here, if the system says so."""
    switches = {
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "AppArmor forbids them to ordinary users (Ubuntu)"),
        "kernel/unprivileged_userns_clone": ("0", "they are disabled for ordinary users"),
        "user/max_user_namespaces": ("0", "they are disabled"),
    }
    for name, (value, meaning) in switches.items():
        with suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == value:
                return f" ({meaning}: sysctl {name.replace('/', '.')}={value})"
    return " (a container may forbid them)"


def run_program(
    program: str,
    test: str,
    entry_point: str,
    *,
    helpers: str = "",
    limits: Limits | None = None,
    require: str = "namespaces",
) -> Outcome:
    """Run `program`, then `test` against its function.

    Args:
        program: Python source that defines the function: a prompt joined with its completion.
        test: Python source that defines ``check(candidate)``, which raises if the function is wrong.
        entry_point: the function's name. The tests may also call it by that name.
        helpers: more Python source that the tests need, such as the task's prompt, whose other functions they call.
            It is trusted like the tests, so it must never be a completion.
        limits: what the program may use.
        require: the weakest isolation to accept, "namespaces" or "process"; the strongest available is used.

    Raises:
        SinklensError: the isolation is unavailable, or the tests fail to run regardless of the program.
        SettingError: `require` is unknown.
    """
    limits = limits or Limits()
    level = _granted(require)
    key = secrets.token_hex(16)
    tests = {"test": test, "helpers": helpers, "entry_point": entry_point, "key": key}
    with _pair(level, limits, {"program": program, "entry_point": entry_point}, tests) as (candidate, checker):
        checker.begin()
        checker.wait_until_ready()  # so the key is out of reach before the program starts
        candidate.begin()
        candidate.wait_until_ready()
        return _Watch(checker, candidate, limits, key).outcome(_isolation(level, candidate))


@contextmanager
def _pair(
    level: Level, limits: Limits, program: dict[str, Any], tests: dict[str, Any]
) -> Iterator[tuple[Child, Child]]:
    """Two connected sandboxed processes that wait for their orders."""
    own = _settings(level, limits)
    theirs = _settings(level, replace(limits, memory_mb=max(limits.memory_mb, CHECKER_MEMORY)))
    with ExitStack() as stack:
        calls, replies = pipe(stack), pipe(stack)
        checker = stack.enter_context(start_child("checker", tests, theirs, (calls[1], replies[0]), capture=False))
        candidate = stack.enter_context(start_child("candidate", program, own, (calls[0], replies[1]), capture=True))
        for end in (*calls, *replies):
            end.close()  # so that either side notices when the other exits
        yield candidate, checker


def _granted(require: str) -> Level:
    if require not in ("namespaces", "process"):
        raise SettingError(f"require={require!r} is unknown; use 'namespaces' or 'process'.")
    found = available_isolation()
    if found.level == "none":
        raise SinklensError(
            f"generated programs are not run here: {'; '.join(found.missing)}. Score them on Linux, in a container or "
            f"a virtual machine."
        )
    if require == "namespaces" and found.level != "namespaces":
        raise SinklensError(
            f"namespaces were required, but this system offers isolation by {found}. Allow namespaces, or accept the "
            f"weaker isolation with require='process'."
        )
    return found.level


class _Watch:
    """Waits for a verdict, an exceeded limit or the end of the time, whichever comes first."""

    def __init__(self, checker: Child, candidate: Child, limits: Limits, key: str) -> None:
        self._checker, self._candidate, self._limits, self._key = checker, candidate, limits, key
        self._verdict: dict[str, Any] | None = None
        self._ends: dict[str, dict[str, Any]] = {}
        self._printed = {"stdout": bytearray(), "stderr": bytearray()}

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
            if self._verdict is not None:
                self._listen(selector, time.monotonic() + LAST_WORDS, lambda: True)
        status, detail = self._status()
        most = self._limits.output_kb * 1024
        out, err = (bytes(text[:most]).decode(errors="replace") for text in self._printed.values())
        code = self._ends.get("candidate", {}).get("exit")
        return Outcome(status, detail, code, out, err, seconds, isolation)

    def _register(self, selector: selectors.BaseSelector) -> None:
        process = self._candidate.process
        for name, source in {
            "checker": self._checker.listen,
            "candidate": self._candidate.listen,
            "stdout": process.stdout,
            "stderr": process.stderr,
        }.items():
            selector.register(cast(IO[bytes], source), selectors.EVENT_READ, name)

    def _listen(self, selector: selectors.BaseSelector, until: float, wanted: Callable[[], bool]) -> None:
        """Read until that time, until nothing more is wanted, until it is too much, or until all has arrived."""
        while wanted() and selector.get_map() and not self._overflowed():
            events = selector.select(max(0.0, until - time.monotonic()))
            if not events:
                return
            for event, _ in events:
                if not self._take(event.data, event.fd):
                    selector.unregister(event.fileobj)

    def _take(self, name: str, place: int) -> bool:
        """Read from one source; False when it is exhausted."""
        if name in self._printed:
            data = os.read(place, 2**16)
            self._printed[name] += data
            return bool(data)
        lines = (self._checker if name == "checker" else self._candidate).reports()
        for line in lines or ():
            if "verdict" in line and name == "checker":
                self._verdict = line
            if "exit" in line:
                self._ends[name] = line
        if name == "checker" and lines is None and self._verdict is None:
            self._verdict = {"verdict": "lost"}
        return lines is not None

    def _overflowed(self) -> bool:
        return sum(map(len, self._printed.values())) > self._limits.output_kb * 1024

    def _status(self) -> tuple[Status, str]:
        if self._overflowed():
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
                return self._gone("candidate", "the program")
            case "lost":
                return self._gone("checker", "the tests' own process")
        return "failed", "a verdict that the checker did not send"

    def _gone(self, name: str, who: str) -> tuple[Status, str]:
        """How a process ended that should still be running."""
        end = self._ends.get(name, {})
        code = end.get("exit")
        if end.get("why") == "files":
            return "files", f"{who} wrote more than {self._limits.file_mb} MiB, or more files than allowed"
        if code == -signal.SIGXCPU or end.get("why") == "time":
            return "timeout", f"{who} used up {self._limits.seconds} s of processor time"
        if code is not None and code < 0:
            return "killed", f"{who} was killed by {signal.Signals(-code).name}"
        return "exited", f"{who} ended before the tests did, with status {'unknown' if code is None else code}"
