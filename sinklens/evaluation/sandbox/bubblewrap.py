"""Starts a Python process in a bubblewrap sandbox, hands it a task, reads its reports, and kills it.

bubblewrap (``bwrap``) makes the namespaces: no network, no other processes, no files but Python's library, three
devices and an empty folder in memory. The process inside (child.py) limits its own resources. It has no capabilities
and runs as one of two users:

- started by root, under an id that belongs to nobody: root would own the files inside, and the kernel does not limit
  root's threads.
- started by an ordinary user, or by the root of a container that maps few ids, in a user namespace.

A process starts at once and waits for its task, so several can start at the same time. It ends when its parent ends,
even if the parent was killed.

Known failure: a container or the kernel forbids namespaces. `SinklensError` then quotes bubblewrap and says what to do.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from sinklens.errors import SinklensError
from sinklens.evaluation.sandbox.seccomp import INSTALL, compiled_filter

START_LIMIT = 60.0  # seconds a process may take to start on a busy machine
FILES = 1024  # files in a working folder
CODE, BOX = "/code", "/box"  # this package and the working folder, as the process sees them
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# Starts child.py without importing the package around it, which takes seconds and needs files that are not there.
BOOT = f"""
import sys, types
for name in ("sinklens", "sinklens.evaluation", "sinklens.evaluation.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["{CODE}"]
from sinklens.evaluation.sandbox.child import main
main()
"""
# The kernel kills this process first when memory runs out.
EXPENDABLE = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")


class Child:
    """A sandboxed process, seen from its parent.

    Attributes:
        process: bubblewrap, which passes on the exit status; its output streams are the sandboxed process's own.
        reports: the socket on which reports arrive.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", reports: socket.socket) -> None:
        self.process, self.reports = process, reports
        self._folder = -1  # no handle yet

    def wait_until_ready(self) -> None:
        """Wait until the process is isolated and waits for its task.

        Raises:
            SinklensError: it did not get there.
        """
        try:
            ready, folders, _, _ = socket.recv_fds(self.reports, 100, 1)
        except TimeoutError as error:
            raise SinklensError(
                f"a sandboxed process was not ready after {START_LIMIT:.0f} s; is the machine overloaded?"
            ) from error
        if not ready:
            self.end()
            assert self.process.stderr is not None
            said = self.process.stderr.read(2000).decode(errors="replace").strip()[-500:] or "it printed nothing"
            raise SinklensError(f"bubblewrap cannot isolate a program on this machine: {said}. {_advice()}")
        (self._folder,) = folders

    def begin(self, task: Mapping[str, Any]) -> None:
        """Hand it the task, the input of its role (programs.py)."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(task).encode())

    def overfilled(self, file_mb: int) -> bool:
        """Whether its working folder holds more MiB or files than allowed.

        bubblewrap before 0.7 sets no limit on bytes, and none sets one on files.
        """
        usage = os.statvfs(self._folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        return used > file_mb * 2**20 or usage.f_files - usage.f_ffree > FILES

    def exit_code(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None if it has not ended after that time."""
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code - 128 in signal.valid_signals() else code

    def end(self) -> None:
        """Kill it and all its processes."""
        if self.process.returncode is None:  # otherwise the process id may have been reused
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Kill it and close what connects it to its parent."""
        self.end()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):  # a task that was not read
                    stream.close()
        if self._folder != -1:
            os.close(self._folder)


@contextmanager
def start_child(role: str, limits: Mapping[str, Any], calls: IO[bytes], replies: IO[bytes]) -> Iterator[Child]:
    """Start a sandboxed process; kill it when the block ends.

    Args:
        role: "candidate" or "checker".
        limits: what it may use (`Limits`).
        calls, replies: its ends of the pipes to the other one.

    Raises:
        SinklensError: bubblewrap or libseccomp is missing.
    """
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        ours.settimeout(START_LIMIT)
        rules = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        rules.write(compiled_filter())
        rules.seek(0)
        user = secrets.randbelow(2**30) + 2**30 if is_real_root() else None
        places = {"report": theirs.fileno(), "calls": calls.fileno(), "replies": replies.fileno()}
        settings = json.dumps({"role": role, "limits": dict(limits), "user": user, **places})
        command = [*EXPENDABLE, *_isolation(limits["file_mb"], user), "--seccomp", str(rules.fileno()), "--"]
        command += [_python(), "-B", "-s", "-S", "-P", "-c", BOOT, settings]  # the standard library alone
        child = Child(_start(command, (*places.values(), rules.fileno())), ours)
        stack.callback(child.close)
        theirs.close()
        yield child


def pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """A pipe's reading and writing end, closed with the stack."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", 0)), stack.enter_context(open(write, "wb", 0))


def bwrap() -> str:
    """The path of bubblewrap's program.

    Raises:
        SinklensError: it is not installed.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise SinklensError(f"bubblewrap is not installed (no `bwrap` on PATH). Install it: {INSTALL}")
    return found


@cache
def version(program: str) -> tuple[int, ...]:
    """The version of a ``bwrap``, for example (0, 8, 0)."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(number) for number in said.split()[-1].split(".")) if said.strip() else ()


def _advice() -> str:
    """What to do where bubblewrap cannot make namespaces."""
    switches = {
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),  # Ubuntu 24.04 and later
        "kernel/unprivileged_userns_clone": ("0", "1"),
        "user/max_user_namespaces": ("0", "10000"),
    }
    for name, (closed, opened) in switches.items():
        with suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == closed:
                return f"Namespaces are switched off; as root: sysctl -w {name.replace('/', '.')}={opened}"
    return (
        "A container needs permission for namespaces: start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


def is_real_root() -> bool:
    """Whether this process is root and every user id exists, so that another one can be taken."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _isolation(file_mb: int, user: int | None) -> list[str]:
    """bubblewrap's options, with the program itself."""
    program = bwrap()
    spaces = ["ipc", "pid", "net", "uts", "cgroup-try", *(["user"] if user is None else [])]
    words = [program, *(f"--unshare-{space}" for space in spaces), "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL"]
    nobody, setters = ("--uid", "65534", "--gid", "65534"), ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    words += nobody if user is None else setters
    for folder in dict.fromkeys(parent for path in (*readable(), *DEVICES) for parent in _parents(path)):
        words += ["--dir", folder]  # else only bubblewrap's own user may enter it
    for path in readable():
        words += ["--ro-bind", path, path]
    words += ["--ro-bind", str(Path(__file__).resolve().parent), CODE]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    words += ["--perms", "0777", *(["--size", str(file_mb * 2**20)] if version(program) >= (0, 7) else [])]
    return [*words, "--tmpfs", BOX, "--remount-ro", "/", "--chdir", BOX]


def _parents(path: str) -> list[str]:
    """The folders above a path, outermost first, without the root."""
    return [str(parent) for parent in reversed(Path(path).parents[:-1])]


def _start(command: list[str], ends: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets iterate in the same order every time, so verdicts repeat
        "MALLOC_ARENA_MAX": "1",  # otherwise each thread takes 64 MiB of address space
    }
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some Python builds do not start without it
        environment["LD_LIBRARY_PATH"] = libraries
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment,
        pass_fds=ends,
        start_new_session=True,
    )


def _python() -> str:
    return os.path.realpath(sys.executable)  # not the virtual environment's link


@cache
def readable() -> tuple[str, ...]:
    """The paths Python reads when it starts and imports from its standard library."""
    paths = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/nix/store", "/gnu/store"]
    paths += [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", _python()]
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
