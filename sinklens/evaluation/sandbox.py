"""Running a generated program against a task's tests, so that neither system nor verdict depends on its good will.

The program and the tests run in two processes, each in a jail of its own (jail.py), joined by two pipes on which plain
values travel (literals.py). The tests call the program's function by pipe, and only the tests' process can write to the
report. **A program passes only if the tests' ``check`` returned, in a process that the program cannot reach.** Printing
a success marker, leaving with status 0, replacing what ``assert`` relies on, objects that equal everything: all that
happens in the program's own process and comes to nothing.

The jail gives no network, no process but its own (threads count), no files but Python's own library and an empty
folder, no inherited environment, and limits of time, memory, files and output. Two levels:

- "namespaces": Linux namespaces of users, mounts, processes, network, IPC; made by root or by an ordinary user. The
  system's files, processes and sockets are not there at all, and whatever was started ends with the jail. The filter
  of system calls and Landlock hold besides.
- "process": where namespaces are forbidden (many containers, Ubuntu 24.04 and later). The filter alone keeps the
  program to one process without sockets or signals, and Landlock keeps it from files; without Landlock, which
  `Isolation.missing` then says, it can read and write what you can, the memory of your processes included.

macOS and Windows have neither; there nothing is run. Programs import the standard library and nothing else, so that a
verdict does not depend on what is installed; they get the same random numbers and the same order of sets every time.

What this does not do: it is no virtual machine. Who knows a hole in the kernel's own interfaces can leave. And tests
are trusted with the verdict (not with the system): tests that execute what a program returns give it theirs.
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
from sinklens.evaluation.warden import Jail, jailed, pipe

Level = Literal["namespaces", "process", "none"]
Status = Literal["passed", "failed", "timeout", "memory", "output", "files", "killed", "exited"]

LEFT_OUT: tuple[str, ...] = ()  # layers that tests leave out, to see that the others hold by themselves
LAST_WORDS = 1.0  # seconds after the verdict, for output that is under way
CHECKER_MEMORY = 512  # MiB at least for the tests' own process


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: on the clock, from the program's first line to the end of the tests; its processor time too.
        memory_mb: MiB of address space, Python's own 30 or so included.
        processes: threads and processes; where the filter of system calls works, further processes are refused
            outright, so these are threads.
        file_mb: MiB of a file, and of the whole working folder.
        output_kb: KiB printed, both streams together.
    """

    seconds: float | int = 10.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, least in {"seconds": 0.1, "memory_mb": 64, "processes": 1, "file_mb": 1, "output_kb": 1}.items():
            value = getattr(self, name)
            if not least <= value < 1e6:
                raise SettingError(f"Limits({name}={value}) is out of range; give {least} or more.")


@dataclass(frozen=True)
class Isolation:
    """What stands between a program and the system.

    Attributes:
        level: "namespaces", "process", or "none" where nothing is run.
        layers: what is in force.
        missing: what is not, each with its reason.
    """

    level: Level
    layers: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.level}: {', '.join(self.layers) or 'nothing'}"]
        return "; ".join([*parts, *(f"not {reason}" for reason in self.missing)])


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        status: "passed", the tests ran to their end and held; "failed", a test did not hold or the program raised;
            "timeout"; "memory"; "output" and "files", it printed or wrote more than allowed; "killed", by a signal;
            "exited", it ended before the tests did.
        detail: what happened in a line; empty if passed.
        exit_code: of the program's process, negative for a signal; None if it had to be ended from outside.
        stdout, stderr: what it printed, up to the limit.
        seconds: on the clock, from the program's first line.
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
        """Whether the tests ran to their end and held."""
        return self.status == "passed"


@cache
def available_isolation() -> Isolation:
    """The strongest isolation this system gives, tried out once, and why not more."""
    if sys.platform != "linux":
        system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        reason = (
            f"namespaces, filter of system calls, Landlock: {system} has none of them, so a program could reach the "
            f"network, your files and other processes; on macOS the memory limit does not bind either"
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
    """Isolation of a jail in which nothing happens.

    Raises:
        SinklensError: it could not be set up.
    """
    with ExitStack() as stack:
        probe = stack.enter_context(jailed("nobody", {}, _settings(level, Limits()), pipe(stack), heard=True))
        probe.begin()
        try:
            probe.wait_until_ready()
        except SinklensError as error:
            raise SinklensError(f"{error}{_hint()}" if level == "namespaces" else str(error)) from error
        return _isolation(level, probe)


def _settings(level: Level, limits: Limits) -> dict[str, Any]:
    return {"level": level, "limits": asdict(limits), "left_out": LEFT_OUT}


def _isolation(level: Level, inmate: Jail) -> Isolation:
    return Isolation(level, tuple(inmate.ready["ready"]), tuple(inmate.ready["missing"]))


def _hint() -> str:
    """Why an ordinary user gets no namespaces here, if the system says so."""
    switches = {
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "AppArmor keeps them from ordinary users (Ubuntu)"),
        "kernel/unprivileged_userns_clone": ("0", "they are switched off for ordinary users"),
        "user/max_user_namespaces": ("0", "they are switched off"),
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
    """Run `program`, and `test` against its function.

    Args:
        program: Python source that defines the function: a prompt joined with its completion.
        test: Python source that defines ``check(candidate)``, which raises if the function is wrong.
        entry_point: the function's name. The tests may also call it by that name.
        helpers: Python source that the tests need besides: the task's prompt, whose other functions they call.
            Trusted like the tests, so never a completion.
        limits: what the program may use.
        require: the weakest isolation to accept, "namespaces" or "process"; the strongest there is gets used.

    Raises:
        SinklensError: the isolation cannot be had, or the tests do not run, whatever the program does.
        SettingError: `require` is unknown.
    """
    limits = limits or Limits()
    level = _granted(require)
    key = secrets.token_hex(16)
    tests = {"test": test, "helpers": helpers, "entry_point": entry_point, "key": key}
    with _pair(level, limits, {"program": program, "entry_point": entry_point}, tests) as (candidate, checker):
        checker.begin()
        checker.wait_until_ready()  # so the key is out of reach before the program begins
        candidate.begin()
        candidate.wait_until_ready()
        return _Watch(checker, candidate, limits, key).outcome(_isolation(level, candidate))


@contextmanager
def _pair(level: Level, limits: Limits, program: dict[str, Any], tests: dict[str, Any]) -> Iterator[tuple[Jail, Jail]]:
    """Two jails that can talk to each other and are still waiting for their orders."""
    own = _settings(level, limits)
    theirs = _settings(level, replace(limits, memory_mb=max(limits.memory_mb, CHECKER_MEMORY)))
    with ExitStack() as stack:
        calls, replies = pipe(stack), pipe(stack)
        checker = stack.enter_context(jailed("checker", tests, theirs, (calls[1], replies[0]), heard=False))
        candidate = stack.enter_context(jailed("candidate", program, own, (calls[0], replies[1]), heard=True))
        for end in (*calls, *replies):
            end.close()  # so that either side sees when the other is gone
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
            f"namespaces were required, and this system gives isolation by {found}. Allow namespaces, or accept the "
            f"weaker isolation with require='process'."
        )
    return found.level


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """A pipe's reading and writing end, closed with the stack."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))


class _Watch:
    """Waits for a verdict, for a limit to be passed, or for the time to run out, whichever is first."""

    def __init__(self, checker: Jail, candidate: Jail, limits: Limits, key: str) -> None:
        self._checker, self._candidate, self._limits, self._key = checker, candidate, limits, key
        self._verdict: dict[str, Any] | None = None
        self._ends: dict[str, dict[str, Any]] = {}
        self._printed = {"stdout": bytearray(), "stderr": bytearray()}

    def outcome(self, isolation: Isolation) -> Outcome:
        """What became of the program.

        Raises:
            SinklensError: the tests do not run.
        """
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            self._register(selector)
            self._listen(selector, begun + self._limits.seconds, lambda: self._verdict is None)
            seconds = time.monotonic() - begun
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
        """Take in what comes until that time, or until it is not wanted, or too much, or all has come."""
        while wanted() and selector.get_map() and not self._overflowed():
            events = selector.select(max(0.0, until - time.monotonic()))
            if not events:
                return
            for event, _ in events:
                if not self._take(event.data, event.fd):
                    selector.unregister(event.fileobj)

    def _take(self, name: str, place: int) -> bool:
        """Take in what has come from one source; False when no more will."""
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
                    f"the tests do not run, whatever the program does: {detail}. They need a `check` that takes the "
                    f"function; what else they call is given by helpers="
                )
            case "failed" if self._verdict.get("kind") == "MemoryError":
                return "memory", detail
            case "failed":
                return "failed", detail
            case "gone":
                return self._gone("candidate", "the program")
            case "lost":
                return self._gone("checker", "the tests' own process")
        return "failed", "a verdict that is not the checker's"

    def _gone(self, name: str, who: str) -> tuple[Status, str]:
        """How a process ended that should not have."""
        end = self._ends.get(name, {})
        code = end.get("exit")
        if end.get("why") == "files":
            return "files", f"{who} wrote more than {self._limits.file_mb} MiB, or more files than allowed"
        if code == -signal.SIGXCPU or end.get("why") == "time":
            return "timeout", f"{who} used up {self._limits.seconds} s of processor time"
        if code is not None and code < 0:
            return "killed", f"{who} was killed by {signal.Signals(-code).name}"
        return "exited", f"{who} ended before the tests did, with status {'unknown' if code is None else code}"
