"""Run a generated program against a task's tests so that it can harm neither the system nor its own verdict.

The program and the tests run in two processes (sandboxed.py), each isolated by bubblewrap (``bwrap``): no network, no
other processes (threads count), nothing to read but Python's library and three devices, nothing to write, no inherited
environment, limits on time, memory and output. **A program passes only if the tests' ``check`` returned, in a process
that the program cannot reach.** A filter, compiled by libseccomp, refuses the system calls that bubblewrap does not
close. Verdicts are reproducible: random numbers and the order of sets are the same every time.

If started by root, a process runs under an id that belongs to nobody, since the kernel does not limit root's threads;
otherwise it runs in a user namespace. It ends with everything it started, even when its parent is killed.

Limits of this design: it is not a virtual machine, so a program that exploits a kernel bug can escape. The filter is a
deny list: a call that a later kernel adds is allowed until it is listed. Tests are trusted with the verdict (not with
the system). A program that writes a file fails. Where bubblewrap is missing or cannot make namespaces, nothing runs.
"""

import ctypes
import errno
import json
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from sinklens.errors import SinklensError, require
from sinklens.utils.arguments import check_arguments, checked

START_LIMIT = 60.0  # seconds a process may take to start on a busy machine
LAST_WORDS = 1.0  # seconds after the verdict in which late output is still read
CHECKER_MEMORY = 512  # least MiB for the tests' own process
LIBRARY = "libseccomp.so.2"
INSTALL = (
    "apt-get install bubblewrap libseccomp2 (Debian, Ubuntu), dnf install bubblewrap libseccomp (Fedora, RHEL), "
    "pacman -S bubblewrap libseccomp (Arch)"
)
PERMIT = (
    "Namespaces may be switched off; as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), "
    "kernel.unprivileged_userns_clone=1 or user.max_user_namespaces=10000. A container needs permission for them: "
    "start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined"
)
REFUSED = (
    "memfd_create memfd_secret shmget msgget semget add_key request_key keyctl unshare setns ptrace process_vm_readv "
    "process_vm_writev pidfd_getfd socket io_uring_setup bpf perf_event_open userfaultfd"
)  # memory outside the limits; namespaces and processes; large parts of the kernel
REFUSED_AS = dict.fromkeys(REFUSED.split(), errno.EPERM) | {
    "fork": errno.EAGAIN, "vfork": errno.EAGAIN, "clone": errno.EAGAIN, "clone3": errno.ENOSYS,
}  # fmt: skip
"""System call -> its error. clone may make threads, and replaces clone3, whose flags a filter cannot read."""
ALLOW, ERROR = 0x7FFF0000, 0x00050000  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO
NO_THREAD = struct.pack("=IIQQ", 0, 7, 0x10000, 0)  # argument 0 & CLONE_THREAD == 0, as scmp_arg_cmp
PYTHON = os.path.realpath(sys.executable)  # not the virtual environment's link
CODE = "/sandboxed.py"  # as the process sees it
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets iterate in the same order every time, so verdicts repeat
    "MALLOC_ARENA_MAX": "1",  # otherwise each thread takes 64 MiB of address space
}
# The kernel kills this process first when memory runs out.
EXPENDABLE = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: wall-clock time from the program's first line to the end of the tests.
        memory_mb: MiB of address space, including about 30 for Python itself.
        processes: threads; new processes are refused.
        output_kb: KiB printed to both streams together.
    """

    seconds: Annotated[float | int, Ge(0.1), Lt(10**6)] = 10.0
    memory_mb: Annotated[int, Ge(64), Lt(10**6)] = 512
    processes: Annotated[int, Ge(1), Lt(10**6)] = 16
    output_kb: Annotated[int, Ge(1), Lt(10**6)] = 64

    def __post_init__(self) -> None:
        check_arguments(self)


@dataclass(frozen=True)
class Isolation:
    """What stands between a program and the system: the `layers` in force, or why no program is run (`missing`)."""

    layers: tuple[str, ...]
    missing: str = ""

    def __str__(self) -> str:
        return ", ".join(self.layers) or f"none: {self.missing}"


@dataclass(frozen=True)
class Outcome:
    """The result of running one program.

    Attributes:
        status: "passed": the tests ran to completion without an error; "failed": a test failed or the program raised;
            "timeout"; "memory"; "output": it printed more than allowed; "killed": by a signal; "exited": it ended
            before the tests did.
        detail: one line on what happened; empty if passed.
        printed: what it printed to both streams, up to the limit.
        seconds: wall-clock time from the program's first line.
        isolation: what was in force.
    """

    status: Literal["passed", "failed", "timeout", "memory", "output", "killed", "exited"]
    detail: str
    printed: str
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
        return Isolation((), f"bubblewrap needs Linux, this is {sys.platform}. Use a container or a virtual machine")
    try:
        with ExitStack() as stack:
            _Child(stack, Pipe()[0], Limits(), 64).wait_until_ready()
    except SinklensError as error:
        return Isolation((), str(error))
    name = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    owner = "a user of its own" if is_real_root() else "user namespace"
    return Isolation((name, owner, "system-call filter", "resource limits", "clean environment"))


@checked
def run_program(
    program: str, test: str, entry_point: str, *, helpers: str = "", limits: Limits | None = None, reference: str = ""
) -> Outcome:
    """Run `program`, then `test` against its function.

    Args:
        program: Python source that defines the function: a prompt joined with its completion.
        test: Python source that defines ``check(candidate)``, which raises if the function is wrong.
        entry_point: the function's name. The tests may also call it by that name.
        helpers: more Python source that the tests need, such as the task's prompt, whose other functions they call.
            It is trusted like the tests, so it must never be a completion.
        limits: what the program may use.
        reference: a correct program. If the tests run to an end with it but not with `program`, `program` failed.

    Raises:
        SinklensError: the isolation is unavailable, or the tests fail to run, with `reference` too if it is given.
    """
    limits = limits or Limits()
    isolation = available_isolation()
    require(isolation.layers, f"generated programs are not run here: {isolation.missing}.", SinklensError)
    with ExitStack() as stack:
        ends = Pipe()
        checker = _Child(stack, ends[0], limits, max(limits.memory_mb, CHECKER_MEMORY))
        candidate = _Child(stack, ends[1], limits, limits.memory_mb)
        for child in (checker, candidate):
            child.wait_until_ready()
        started = time.monotonic()
        checker.begin(test=test, helpers=helpers, entry_point=entry_point)
        candidate.begin(program=program, entry_point=entry_point)
        status, detail = _verdict(checker, candidate, limits)
        if status == "broken":
            require(
                reference and run_program(reference, test, entry_point, helpers=helpers, limits=limits).passed,
                f"the tests fail to run regardless of the program: {detail}. They need a `check` that takes the "
                f"function; pass other functions they call as helpers=",
                SinklensError,
            )
            status = "failed"
        return Outcome(status, detail, candidate.text(limits.output_kb), time.monotonic() - started, isolation)


class _Child:
    """A sandboxed process that waits for its task; `stack` kills it and everything it started.

    Its end of the pipe between the two processes is closed here, so that either notices when the other exits.
    """

    def __init__(self, stack: ExitStack, pipe: Connection, limits: Limits, memory_mb: int) -> None:
        self.reports, report = Pipe(duplex=False)
        files = [tempfile.TemporaryFile(buffering=0) for _ in range(2)]  # noqa: SIM115 the stack closes them
        self.printed, rules = map(stack.enter_context, files)
        rules.write(compiled_filter())
        rules.seek(0)
        user = secrets.randbelow(2**30) + 2**30 if is_real_root() else None
        sizes = {"AS": memory_mb * 2**20, "FSIZE": limits.output_kb * 1024 + 1}  # one more shows that it is too much
        sizes |= {"NPROC": limits.processes + 2, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}  # bwrap's own 2
        settings = {"report": report.fileno(), "pipe": pipe.fileno(), "user": user, "limits": sizes}
        command = [*EXPENDABLE, *_bubblewrap(user), "--seccomp", str(rules.fileno()), "--", PYTHON]
        command += ["-B", "-s", "-S", "-P", "-X", "int_max_str_digits=0", CODE, json.dumps(settings)]  # no packages
        libraries = os.environ.get("LD_LIBRARY_PATH")  # some Python builds do not start without it
        with pipe, report:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self.printed, stderr=subprocess.STDOUT, cwd="/",
                env=ENVIRONMENT | ({"LD_LIBRARY_PATH": libraries} if libraries else {}),
                pass_fds=[end.fileno() for end in (report, pipe, rules)], start_new_session=True,
            )  # fmt: skip
        stack.callback(self.close)

    def wait_until_ready(self) -> None:
        """Wait until the process is isolated and waits for its task."""
        require(
            self.reports.poll(START_LIMIT),
            f"a sandboxed process was not ready after {START_LIMIT:.0f} s; is the machine overloaded?",
            SinklensError,
        )
        try:
            self.reports.recv_bytes()
        except EOFError as error:
            said = self.text(2).strip()[-500:] or "it printed nothing"
            raise SinklensError(f"bubblewrap cannot isolate a program on this machine: {said}. {PERMIT}") from error

    def begin(self, **task: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(task).encode())

    def text(self, most: int) -> str:
        """The first `most` KiB that it printed."""
        return os.pread(self.printed.fileno(), most * 1024, 0).decode(errors="replace")

    def ended(self, who: str) -> tuple[Any, str]:
        """How the process ended, which should still be running."""
        with suppress(subprocess.TimeoutExpired):
            if (number := self.process.wait(LAST_WORDS) - 128) in signal.valid_signals():
                return "killed", f"{who} was killed by {signal.Signals(number).name}"
        return "exited", f"{who} ended before the tests did, with status {self.process.returncode}"

    def close(self) -> None:
        """Kill it and all its processes."""
        if self.process.poll() is None:  # otherwise the process id may have been reused
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.reports, suppress(OSError), self.process:  # a task that was not read
            pass


def _verdict(checker: _Child, candidate: _Child, limits: Limits) -> tuple[Any, str]:
    """Status and detail: a verdict, an exceeded limit or the end of the allowed time, whichever comes first."""
    verdict, detail = "timeout", f"not done after {limits.seconds} s"
    if checker.reports.poll(limits.seconds):
        verdict = "lost"
        with suppress(EOFError):
            verdict, detail = json.loads(checker.reports.recv_bytes(2**16))
        with suppress(subprocess.TimeoutExpired):
            candidate.process.wait(LAST_WORDS)
    if os.fstat(candidate.printed.fileno()).st_size > limits.output_kb * 1024:
        return "output", f"it printed more than {limits.output_kb} KiB"
    if verdict == "lost":
        return checker.ended("the tests' own process")
    return candidate.ended("the program") if verdict == "gone" else (verdict, detail)


def is_real_root() -> bool:
    """Whether this process is root and every user id exists, so that another one can be taken."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _bubblewrap(user: int | None) -> list[str]:
    """bubblewrap's program and options."""
    program = shutil.which("bwrap")
    if program is None:
        raise SinklensError(f"bubblewrap is not installed (no `bwrap` on PATH). Install it: {INSTALL}")
    words = [program, *(f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try"))]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if user is None:
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    else:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    places = [(path, "--ro-bind-try") for path in _readable()] + [(path, "--dev-bind") for path in DEVICES]
    for folder in dict.fromkeys(above for path, _ in places for above in reversed(Path(path).parents[:-1])):
        words += ["--dir", str(folder)]  # else only bubblewrap's own user may enter it
    for path, bind in places:
        words += [bind, path, path]
    words += ["--ro-bind", str(Path(__file__).with_name("sandboxed.py")), CODE]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def _readable() -> list[str]:
    """The paths Python reads when it starts and imports from its standard library."""
    bases = (sys.base_prefix, sys.base_exec_prefix)  # not the virtual environment's
    paths = [
        "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/nix/store", "/gnu/store", "/etc/ld.so.cache",
        *(f"{base}/{folder}" for base in bases for folder in ("lib", "lib64")), PYTHON, "/usr/share/zoneinfo",
        os.path.dirname(os.__file__),
        *(folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")),
    ]  # fmt: skip
    return list(dict.fromkeys(form for path in paths for form in (os.path.normpath(path), os.path.realpath(path))))


@cache
def compiled_filter() -> bytes:
    """The filter for this machine, as a BPF program; it also kills programs that call by another instruction set."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise SinklensError(f"libseccomp is not installed ({error}). Install it: {INSTALL}") from error
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))
    results = []
    for name, code in REFUSED_AS.items():
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # else this libseccomp does not know the call
            action = ctypes.c_uint32(ERROR | code)
            results.append(library.seccomp_rule_add_array(rules, action, number, int(name == "clone"), NO_THREAD))
    with tempfile.TemporaryFile() as file:
        results.append(library.seccomp_export_bpf(rules, file.fileno()))
        require(
            min(results) >= 0,
            f"libseccomp cannot compile the filter: {os.strerror(-min(results))}. {INSTALL}",
            SinklensError,
        )
        return os.pread(file.fileno(), 2**16, 0)
