"""The child's side of the sandbox: turn an ordinary process into one that can reach nothing.

The parent (parent.py) starts it as a fresh Python. It reads its orders from standard input and becomes up to three
processes:

- the *outer process* requests the new namespaces, then waits.
- the *first process* of those namespaces swaps the file system for a small tree in memory, drops its privileges, starts
  the worker and reports how the worker ended. When it ends, the kernel ends every process of the namespace.
- the *worker* applies the resource limits, the system-call filter and Landlock, then plays its role (programs.py).

Without namespaces, the outer and the first process are the same one, and the filter keeps the worker from forking.

Reports are lines of JSON: {"trouble": text} when a step failed; {"ready": layers, "missing": reasons} when the worker
starts; {"exit": code, "why": limit} when it ended (a negative code is a signal); and the checker's {"verdict": ...}.

Known failure: a container may forbid one of the set-up's system calls. The report names the call.
"""

import errno
import json
import math
import os
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from sinklens.evaluation.sandbox import programs
from sinklens.evaluation.sandbox.seccomp import (
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    UnavailableError,
    call,
    drop_privileges,
    filter_calls,
    limit_files,
)

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
RELATIVE_TIMES = (os.ST_RELATIME, 1 << 21)  # the only flag that statvfs and mount number differently
BOX = "/box"  # the working folder, as the worker sees it in namespaces
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
FILES = 64  # open files, and files in a working folder on the system's own disk
OVERTIME = 5.0  # seconds past the limit after which the first process kills the worker itself
CHECK = 0.05  # seconds between checks of time and working folder


class Report:
    """Sends lines of JSON to the parent."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __call__(self, **line: Any) -> None:
        """Send one line; ignore a parent that has exited."""
        with suppress(OSError):
            os.write(self.pipe, json.dumps(line).encode() + b"\n")


def main() -> None:
    """Read the orders, carry them out, and exit."""
    with suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # the kernel kills this process first when memory runs out
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes of this user cannot look inside
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.dont_write_bytecode = True
    text = sys.stdin.buffer.read()
    if not text:  # the parent exited or closed the pipe
        os._exit(1)
    orders = json.loads(text)
    report = Report(orders["report"])
    try:
        if os.getppid() != orders["parent"]:
            os._exit(1)
        _isolate(orders, report)
    except BaseException as error:  # noqa: BLE001 the parent has to learn of every error
        report(trouble=_describe(error))
    os._exit(1)


def _isolate(orders: dict[str, Any], report: Report) -> None:
    layers: list[str] = []
    inside = orders["level"] == "namespaces"
    if inside:
        user = _leave_namespaces(layers)
        first = os.fork()
        if first:
            os.waitpid(first, 0)
            os._exit(0)
        _leave_files(orders, user)
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        os.chdir(orders["folder"])
    drop_privileges()
    worker = os.fork()
    if not worker:
        _become(orders, report, layers)
    _watch(worker, orders, report, None if inside else orders["folder"])


def _leave_namespaces(layers: list[str]) -> int:
    """Enter new namespaces; return the user id that the worker will run under."""
    kinds = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NET
    layers += ["mount, process, network, IPC and host name namespaces"]
    user, group = os.geteuid(), os.getegid()
    unused = 62_000 + os.getpid() % 3000  # belongs to nobody, and stays unique while this process lives
    if user == 0 and _exists(unused):
        call("unshare", kinds)
        layers += ["a user of its own"]
        return unused
    call("unshare", kinds | NEW_USER)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root owns these files
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    layers += ["user namespace"]
    return user


def _exists(user: int) -> bool:
    """Whether this user id exists; a user namespace may map fewer."""
    spans = [[int(number) for number in line.split()] for line in _lines("/proc/self/uid_map")]
    return any(first <= user < first + count for first, _, count in spans)


def _leave_files(orders: dict[str, Any], user: int) -> None:
    """Replace the file system by a tree in memory: what Python reads, three devices and the working folder."""
    root = orders["folder"]
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NO_SETUID, "size=1m,nr_inodes=1k,mode=755")
    for path in orders["readable"]:
        _show(path, root)
    for path in DEVICES:
        _show(path, root, read_only=False)
    box = root + BOX
    os.mkdir(box)
    size = f"size={orders['limits']['file_mb']}m,nr_inodes={FILES * 16},mode=700"
    _mount("tmpfs", box, "tmpfs", NO_SETUID | NO_DEVICES | NO_PROGRAMS, size)
    if user != os.geteuid():
        os.chown(box, user, user)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    _mount(None, "/", None, REMOUNT | BIND | READ_ONLY | NO_SETUID)
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(BOX)


def _show(path: str, root: str, read_only: bool = True) -> None:
    """Make `path` appear below `root`."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, BIND | RECURSIVE)
    if read_only:
        for place in _mounts_in(target):
            _mount(None, place, None, REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES | _flags(place))


def _mounts_in(target: str) -> list[str]:
    """`target` and every mount below it."""
    places = []
    for line in _lines("/proc/self/mountinfo"):
        place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4])  # blanks come as \040
        if place == target or place.startswith(target + "/"):
            places.append(place)
    return places


def _flags(place: str) -> int:
    """The mount flags that an ordinary user may not remove."""
    flags = os.statvfs(place).f_flag
    kept = flags & (NO_SETUID | NO_DEVICES | NO_PROGRAMS | os.ST_NOATIME | os.ST_NODIRATIME)
    asked, setting = RELATIVE_TIMES
    return kept | (setting if flags & asked else 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    try:
        call("mount", *texts[:3], flags, texts[3])
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source or kind or 'flags'} at {target})") from error


def _become(orders: dict[str, Any], report: Report, layers: list[str]) -> None:
    """Apply every limit, then play the role; never returns."""
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if orders["level"] == "namespaces":
            os.setsid()  # so a signal to its own group cannot reach its ancestors
        missing = _confine(orders, layers)
    except BaseException as error:  # noqa: BLE001 the parent has to learn of every error
        report(trouble=_describe(error))
        os._exit(1)
    report(ready=layers, missing=missing)
    calls, replies = orders["calls"], orders["replies"]
    if orders["role"] == "checker":
        programs.checker(orders["task"], calls, replies, report)
    elif orders["role"] == "candidate":
        os.close(report.pipe)
        programs.candidate(orders["task"], calls, replies)
    programs.finish()


def _confine(orders: dict[str, Any], layers: list[str]) -> list[str]:
    """Apply limits, Landlock and filter; return what was unavailable, with reasons."""
    limits, inside = orders["limits"], orders["level"] == "namespaces"
    others = 2 if inside else _threads_of(os.getuid())
    cpu, megabyte = math.ceil(limits["seconds"]), 2**20
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte, None),
        (resource.RLIMIT_NOFILE, FILES, None),
        (resource.RLIMIT_NPROC, others + limits["processes"], None),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte, None),
        (resource.RLIMIT_MSGQUEUE, 0, None),
        (resource.RLIMIT_MEMLOCK, 0, None),
    ):
        _limit(kind, soft, soft if hard is None else hard)
    layers += ["resource limits", "new session", "clean environment"]
    missing = []
    steps = {
        "Landlock": lambda: limit_files(orders["readable"], BOX if inside else orders["folder"], DEVICES),
        "system-call filter": lambda: filter_calls(shared_files=not inside),
    }
    for name, step in steps.items():
        try:
            if name in orders.get("skipped_layers", ()):
                raise UnavailableError(errno.ECANCELED, "skipped")
            step()
            layers.append(name)
        except UnavailableError as error:
            if name == "system-call filter" and not inside:
                raise
            missing.append(f"{name}: {error.strerror}")
    return missing


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit; keep a tighter one that is already in force."""
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


def _threads_of(user: int) -> int:
    """Threads that this user runs now; RLIMIT_NPROC counts all of them."""
    total = 0
    for place in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in _lines(f"/proc/{place}/status"))
            total += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return total


def _describe(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return repr(error)
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()


def _watch(worker: int, orders: dict[str, Any], report: Report, folder: str | None) -> None:
    """Wait for the worker; kill it when it runs over time or overfills a working folder on the system's disk."""
    for pipe in (orders["calls"], orders["replies"]):
        os.close(pipe)
    until, most = time.monotonic() + orders["limits"]["seconds"] + OVERTIME, orders["limits"]["file_mb"] * 2**20
    why = ""

    def look(*_: object) -> None:
        nonlocal why
        if time.monotonic() > until:
            why = "time"
        elif folder is not None and _overflows(folder, most):
            why = "files"
        if why:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, CHECK, CHECK)
    ended = 0
    while ended != worker:  # the first process of a namespace inherits every orphan
        ended, status = os.waitpid(-1, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    report(exit=os.waitstatus_to_exitcode(status), why=why)
    os._exit(0)


def _overflows(folder: str, most: int) -> bool:
    """Whether a flat folder holds more bytes or files than allowed."""
    total = 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
            if total > most or count > FILES:
                return True
    return False
