"""The parent's side of the sandbox: start a child process (child.py), send its orders, read its reports, kill it.

A child starts as a fresh Python with a clean environment in its own session, and waits. Several can therefore start at
the same time and receive their orders later. A child ends when its parent ends, even if the parent was killed.

Known failure: the interpreter needs an environment variable that is not passed on and does not start.
`wait_until_ready` then reports what it printed.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from sinklens.errors import SinklensError

START_LIMIT = 60.0  # seconds a child may take to start on a busy machine
# Starts child.py without importing the package around it, which takes seconds and needs files the child cannot see.
BOOT = """
import sys, types
for name, folder in zip(("sinklens", "sinklens.evaluation", "sinklens.evaluation.sandbox"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from sinklens.evaluation.sandbox.child import main
main()
"""


class Child:
    """A sandboxed process, seen from its parent.

    Attributes:
        process: its first process.
        listen: the pipe its reports arrive on.
        ready: the report sent when the worker started; empty before that.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", listen: IO[bytes], orders: bytes) -> None:
        self.process, self.listen = process, listen
        self.ready: dict[str, Any] = {}
        self._orders, self._rest = orders, b""
        self._early: list[dict[str, Any]] = []  # reports that arrived together with "ready"

    def begin(self) -> None:
        """Send its orders."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # the report says why it exited
            pipe.write(self._orders)

    def wait_until_ready(self) -> None:
        """Wait until all limits are in force and the worker starts.

        Raises:
            SinklensError: a step of the set-up failed.
        """
        until = time.monotonic() + START_LIMIT
        with selectors.DefaultSelector() as selector:
            selector.register(self.listen, selectors.EVENT_READ)
            while not self.ready:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise SinklensError(
                        f"a sandboxed process was not ready after {START_LIMIT:.0f} s; is the machine overloaded?"
                    )
                lines = self.reports()
                if lines is None:
                    raise SinklensError(f"a sandboxed process ended before it was ready: {self._complaint()}")
                self.ready = next((line for line in lines if "ready" in line), {})
                self._early = [line for line in lines if "ready" not in line]  # it may have ended already

    def reports(self) -> list[dict[str, Any]] | None:
        """Reports received so far; None when no more will arrive.

        Raises:
            SinklensError: one of them reports a failed step.
        """
        data = os.read(self.listen.fileno(), 2**16)
        early, self._early = self._early, []
        if not data:
            return early or None
        *lines, self._rest = (self._rest + data).split(b"\n")
        parsed = [report for report in map(_parse, lines) if report]
        for line in parsed:
            if "trouble" in line:
                raise SinklensError(line["trouble"])
        return early + parsed

    def _complaint(self) -> str:
        self.end()
        said = self.process.stderr.read(2000) if self.process.stderr else b""
        return said.decode(errors="replace").strip()[-500:] or "it printed nothing"

    def end(self) -> None:
        """Kill the child and all its processes."""
        if self.process.returncode is None:  # otherwise the process id may have been reused
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _parse(line: bytes) -> dict[str, Any]:
    """A parsed report; empty for a line that is not one of ours."""
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


@contextmanager
def start_child(
    role: str, task: Mapping[str, Any], settings: Mapping[str, Any], ends: tuple[IO[bytes], IO[bytes]], capture: bool
) -> Iterator[Child]:
    """Start a sandboxed process; kill it and delete its working folder when the block ends.

    Args:
        role: "candidate", "checker" or "nobody".
        task: the role's input (programs.py).
        settings: "level" and "limits" (child.py).
        ends: its ends of the pipes for calls and replies.
        capture: whether to read its output.
    """
    folder = tempfile.mkdtemp(prefix="sinklens-")
    try:
        with ExitStack() as stack:
            listen, report = pipe(stack)
            places = {"report": report.fileno(), "calls": ends[0].fileno(), "replies": ends[1].fileno()}
            orders = {"role": role, "task": task, "folder": folder, "parent": os.getpid(), "readable": readable()}
            text = json.dumps({**orders, **settings, **places}).encode()
            child = Child(_start(tuple(places.values()), capture), listen, text)
            stack.callback(_close, child.process)
            stack.callback(child.end)
            report.close()
            yield child
    finally:
        _delete(folder)


def pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """A pipe's reading and writing end, closed with the stack."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))


def _start(ends: tuple[int, ...], capture: bool) -> "subprocess.Popen[bytes]":
    here = Path(__file__).resolve().parent
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets iterate in the same order every time, so verdicts repeat
        "MALLOC_ARENA_MAX": "1",  # otherwise each thread takes 64 MiB of address space
    }
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some Python builds do not start without it
        environment["LD_LIBRARY_PATH"] = libraries
    return subprocess.Popen(
        # no packages: only the standard library is importable
        [sys.executable, "-s", "-S", "-P", "-c", BOOT, *map(str, (here.parent.parent, here.parent, here))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if capture else subprocess.DEVNULL,
        stderr=subprocess.PIPE if capture else subprocess.DEVNULL,
        cwd="/",
        env=environment,
        pass_fds=ends,
        start_new_session=True,
    )


@cache
def readable() -> tuple[str, ...]:
    """The paths Python reads when it imports from its standard library."""
    paths = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/nix/store", "/gnu/store"]
    paths += [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    bases = {"base": sys.base_prefix, "installed_base": sys.base_prefix}  # not the virtual environment's
    bases |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    paths += [sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")]
    paths += [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")]
    paths += ["/etc/ld.so.cache", "/usr/share/zoneinfo"]
    chosen: list[str] = []
    for path in paths:
        for form in dict.fromkeys((os.path.normpath(path), os.path.realpath(path))):
            if os.path.exists(form) and not any(form == have or form.startswith(have + "/") for have in chosen):
                chosen.append(form)
    return tuple(chosen)


def _close(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):  # unread orders
                stream.close()


def _delete(folder: str) -> None:
    """Delete a working folder; an ending process may hold it for a moment."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
