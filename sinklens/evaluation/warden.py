"""The parent's side of a jail (jail.py): start it, give it its orders, hear its reports, end it.

A jail starts as a fresh Python with a clean environment in a session of its own, and waits. So several start at the
same time, and each gets its orders when its turn has come. It ends with the parent, even one that is killed.

One way this fails: the interpreter does not start with a clean environment, because it needs a variable that is not
passed on. `wait_until_ready` then says what it printed.
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

START_LIMIT = 60.0  # seconds for a jail to come up, on a busy machine
# Starts jail.py without the package around it, whose import takes seconds and needs what a jail does not have.
BOOT = """
import sys, types
for name, folder in zip(("sinklens", "sinklens.evaluation"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from sinklens.evaluation.jail import main
main()
"""


class Jail:
    """A jail as its parent sees it.

    Attributes:
        process: its first process.
        listen: where its reports come from.
        ready: the report with which the inmate began; empty before.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", listen: IO[bytes], orders: bytes) -> None:
        self.process, self.listen = process, listen
        self.ready: dict[str, Any] = {}
        self._orders, self._rest = orders, b""
        self._early: list[dict[str, Any]] = []  # reports that came with the one that it is ready

    def begin(self) -> None:
        """Give it its orders."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # why it is gone, the report says
            pipe.write(self._orders)

    def wait_until_ready(self) -> None:
        """Wait until all limits are in force and the inmate begins.

        Raises:
            SinklensError: a step of the set-up failed.
        """
        until = time.monotonic() + START_LIMIT
        with selectors.DefaultSelector() as selector:
            selector.register(self.listen, selectors.EVENT_READ)
            while not self.ready:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise SinklensError(f"a jail was not ready after {START_LIMIT:.0f} s; is the machine overloaded?")
                lines = self.reports()
                if lines is None:
                    raise SinklensError(f"a jail ended before it was ready: {self._complaint()}")
                self.ready = next((line for line in lines if "ready" in line), {})
                self._early = [line for line in lines if "ready" not in line]  # it may have ended by now

    def reports(self) -> list[dict[str, Any]] | None:
        """Reports that have come; None when no more will.

        Raises:
            SinklensError: one of them tells of a step that failed.
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
        return said.decode(errors="replace").strip()[-500:] or "it said nothing"

    def end(self) -> None:
        """Kill all of it."""
        if self.process.returncode is None:  # else the number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _parse(line: bytes) -> dict[str, Any]:
    """A report; empty if it is none, which then nobody of ours wrote."""
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


@contextmanager
def jailed(
    role: str, task: Mapping[str, Any], settings: Mapping[str, Any], ends: tuple[IO[bytes], IO[bytes]], heard: bool
) -> Iterator[Jail]:
    """Start a jail; end it, and throw its working folder away, with the block.

    Args:
        role: "candidate", "checker" or "nobody".
        task: what that role is given (roles.py).
        settings: "level", "limits" and "left_out" (jail.py).
        ends: its ends of the pipes for calls and replies.
        heard: whether its output is wanted.
    """
    folder = tempfile.mkdtemp(prefix="sinklens-")
    try:
        with ExitStack() as stack:
            listen, report = pipe(stack)
            places = {"report": report.fileno(), "calls": ends[0].fileno(), "replies": ends[1].fileno()}
            orders = {"role": role, "task": task, "folder": folder, "parent": os.getpid(), "readable": readable()}
            text = json.dumps({**orders, **settings, **places}).encode()
            inmate = Jail(_start(tuple(places.values()), heard), listen, text)
            stack.callback(_close, inmate.process)
            stack.callback(inmate.end)
            report.close()
            yield inmate
    finally:
        _throw_away(folder)


def pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """A pipe's reading and writing end, closed with the stack."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))


def _start(ends: tuple[int, ...], heard: bool) -> "subprocess.Popen[bytes]":
    here = Path(__file__).resolve().parent
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets in the same order every time, so the same verdict
        "MALLOC_ARENA_MAX": "1",  # else each thread takes 64 MiB of address space
    }
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some Pythons do not start without
        environment["LD_LIBRARY_PATH"] = libraries
    return subprocess.Popen(
        # no packages, no path but the standard library's
        [sys.executable, "-s", "-S", "-P", "-c", BOOT, str(here.parent), str(here)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if heard else subprocess.DEVNULL,
        stderr=subprocess.PIPE if heard else subprocess.DEVNULL,
        cwd="/",
        env=environment,
        pass_fds=ends,
        start_new_session=True,
    )


@cache
def readable() -> tuple[str, ...]:
    """What Python reads when it imports from its standard library."""
    paths = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/nix/store", "/gnu/store"]
    paths += [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    bases = {"base": sys.base_prefix, "installed_base": sys.base_prefix}  # not those of a virtual environment
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
            with suppress(OSError):  # orders that nobody read
                stream.close()


def _throw_away(folder: str) -> None:
    """Remove a working folder; a process that is just ending may still hold it for a moment."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
