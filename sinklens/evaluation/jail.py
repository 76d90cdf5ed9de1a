"""The child's side of sandbox.py: from an ordinary process to one that has nothing.

Started by sandbox.py as a Python of its own, it reads its orders from the standard input, and is up to three processes:

- the *keeper*, in which new namespaces are asked for. It waits.
- the *first process* of those namespaces. It leaves the system's files for a small tree in memory, gives up its rights,
  starts the inmate and reports how that ended. With it ends every process of its namespace, whoever started it.
- the *inmate*, which takes on limits, the filter of system calls and Landlock, and then its role (roles.py).

Without namespaces keeper and first process are one; the filter then keeps the inmate a single process.

Reports are lines of JSON: {"trouble": text} if a step failed; {"ready": layers, "missing": reasons} when the inmate
begins; {"exit": code, "why": limit} when it ended, negative for a signal; and the checker's {"verdict": ...}.

One way this fails: a system call of the set-up that some container forbids. The report says which.
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

from sinklens.evaluation import roles
from sinklens.evaluation.confinement import (
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
RELATIVE_TIMES = (os.ST_RELATIME, 1 << 21)  # the one flag whose number differs between asking and setting
BOX = "/box"  # the working folder, as the inmate sees it in namespaces
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
FILES = 64  # that may be open, and that may lie in a working folder on the system's own disk
OVERTIME = 5.0  # seconds after which the first process ends the inmate itself, were there nobody else to do so
CHECK = 0.05  # seconds between looks at time and working folder


class Report:
    """Lines of JSON to the parent."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __call__(self, **line: Any) -> None:
        """Send one line; a parent that is gone is no trouble here."""
        with suppress(OSError):
            os.write(self.pipe, json.dumps(line).encode() + b"\n")


def main() -> None:
    """Read the orders, become what they say, and end."""
    with suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, this goes first
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # other processes of this user cannot look inside
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.dont_write_bytecode = True
    text = sys.stdin.buffer.read()
    if not text:  # the parent ended, or changed its mind
        os._exit(1)
    orders = json.loads(text)
    report = Report(orders["report"])
    try:
        if os.getppid() != orders["parent"]:
            os._exit(1)
        _jail(orders, report)
    except BaseException as error:  # noqa: BLE001 whatever it is, the parent has to hear of it
        report(trouble=_said(error))
    os._exit(1)


def _jail(orders: dict[str, Any], report: Report) -> None:
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
    inmate = os.fork()
    if not inmate:
        _become(orders, report, layers)
    _watch(inmate, orders, report, None if inside else orders["folder"])


def _leave_namespaces(layers: list[str]) -> int:
    """Ask for namespaces of our own; the user that the inmate is to be."""
    kinds = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NET
    layers += ["mount, process, network, IPC and host name namespaces"]
    user, group = os.geteuid(), os.getegid()
    unused = 62_000 + os.getpid() % 3000  # nobody's, and for as long as this process lives nobody else's
    if user == 0 and _exists(unused):
        call("unshare", kinds)
        layers += ["a user of its own"]
        return unused
    call("unshare", kinds | NEW_USER)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else these files belong to root
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    layers += ["user namespace"]
    return user


def _exists(user: int) -> bool:
    """Whether there are users up to this number; inside a user namespace there may be fewer."""
    spans = [[int(number) for number in line.split()] for line in _lines("/proc/self/uid_map")]
    return any(first <= user < first + count for first, _, count in spans)


def _leave_files(orders: dict[str, Any], user: int) -> None:
    """Exchange the system's files for a tree in memory: what Python reads, three devices and the working folder."""
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
    """`target` and the mounts that came along below it."""
    places = []
    for line in _lines("/proc/self/mountinfo"):
        place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4])  # blanks come as \040
        if place == target or place.startswith(target + "/"):
            places.append(place)
    return places


def _flags(place: str) -> int:
    """Flags of a mount, which an ordinary user may not take off."""
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
    """Take on every limit, then the role; never returns."""
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if orders["level"] == "namespaces":
            os.setsid()  # a signal to its own group then reaches none of those above
        missing = _confine(orders, layers)
    except BaseException as error:  # noqa: BLE001 the parent has to hear of it
        report(trouble=_said(error))
        os._exit(1)
    report(ready=layers, missing=missing)
    calls, replies = orders["calls"], orders["replies"]
    if orders["role"] == "checker":
        roles.checker(orders["task"], calls, replies, report)
    elif orders["role"] == "candidate":
        os.close(report.pipe)
        roles.candidate(orders["task"], calls, replies)
    roles.finish()


def _confine(orders: dict[str, Any], layers: list[str]) -> list[str]:
    """Limits, Landlock, filter; what could not be had of them."""
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
        "filter of system calls": lambda: filter_calls(shared_files=not inside),
    }
    for name, step in steps.items():
        try:
            if name in orders["left_out"]:
                raise UnavailableError(errno.ECANCELED, "left out")
            step()
            layers.append(name)
        except UnavailableError as error:
            if name.startswith("filter") and not inside:
                raise
            missing.append(f"{name}: {error.strerror}")
    return missing


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit, or leave a tighter one that is already there."""
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


def _threads_of(user: int) -> int:
    """Threads that this user runs now, all of which the limit on processes counts."""
    total = 0
    for place in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in _lines(f"/proc/{place}/status"))
            total += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
    return total


def _said(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return repr(error)
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()


def _watch(inmate: int, orders: dict[str, Any], report: Report, folder: str | None) -> None:
    """Wait for the inmate; end it if nobody else does, or if it fills a working folder on the system's disk."""
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
                os.kill(inmate, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, CHECK, CHECK)
    ended = 0
    while ended != inmate:  # the first process of a namespace is handed every orphan
        ended, status = os.waitpid(-1, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    report(exit=os.waitstatus_to_exitcode(status), why=why)
    os._exit(0)


def _overflows(folder: str, most: int) -> bool:
    """Whether more bytes, or more files, lie in a flat folder than allowed."""
    total = 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
            if total > most or count > FILES:
                return True
    return False
