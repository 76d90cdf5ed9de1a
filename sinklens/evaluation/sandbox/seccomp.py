"""What an unprivileged Linux process can give up permanently: privileges, system calls, files.

Three layers, each of which a process applies to itself and cannot remove:

- `drop_privileges`: drops every capability, and the ability to gain one by starting a program.
- `filter_calls` (seccomp): calls that create processes, sockets or uncounted memory, or that reach other processes,
  fail. Threads work. Programs for another instruction set are killed at their first call.
- `limit_files` (Landlock, Linux 5.13): only the named paths can be opened. The other two layers work without it.

Known limit: the filter is a deny list. A system call added by a later kernel is allowed until it is listed.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence

LIBC = ctypes.CDLL(None, use_errno=True)

# name: number on x86-64, on arm64 (None where the machine has no such call); numbers from 424 on are the same on both.
CALLS: dict[str, tuple[int | None, int | None]] = {
    # other processes: programs, sessions, signals, memory, limits, priorities
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "fcntl": (72, 25), "ioctl": (16, 29), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "prlimit64": (302, 261), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # sockets, and memory outside every limit
    "socket": (41, 198), "io_uring_setup": (425, 425), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # namespaces, mounts and seldom used parts of the kernel
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # what changes files without opening them, and folders
    "mkdir": (83, None), "mkdirat": (258, 34), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}  # fmt: skip
ON_SHARED_FILES = tuple(CALLS)[tuple(CALLS).index("mkdir") :]  # forbidden only where the folder is the system's own
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of `CALLS`, the kernel's number

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the kernel's seccomp_data
X32 = 0x40000000  # from here on x86-64 counts its 32-bit calls
CLONE_THREAD = 0x10000
SET_OWNER = (8, 10, 15)  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: would send signals by way of a file
TERMINAL = (0x8901, 0x8902, 0x5412, 0x540E)  # ioctl FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCSCTTY

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, value


class UnavailableError(OSError):
    """The system does not offer this layer."""


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library, or a system call by number (``"syscall", number, ...``).

    Raises:
        OSError: it failed; the text begins with `name`.
    """
    whole = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(getattr(LIBC, name)(*whole))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def drop_privileges() -> None:
    """Drop every capability, and the ability to gain one by starting a program."""
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:  # past the last one, or an ordinary user
            break
    header = struct.pack("=II", 0x20080522, 0)  # version 3, this process
    call("capset", header, bytes(24))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_calls(shared_files: bool) -> None:
    """Permanently forbid the system calls in `CALLS` to this process.

    Signals to itself, its own limits and new threads stay allowed.

    Args:
        shared_files: the process sees the system's own files, so calls that change files by name are forbidden too.

    Raises:
        UnavailableError: the machine is neither x86-64 nor arm64, or the kernel has no filters.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise UnavailableError(errno.ENOSYS, f"the filter knows {' and '.join(ARCHITECTURES)}, this is {machine}")
    program = b"".join(struct.pack("=HBBI", *step) for step in _filter(*ARCHITECTURES[machine], shared_files))
    body = ctypes.create_string_buffer(program, len(program))
    handle = struct.pack("@HP", len(program) // 8, ctypes.addressof(body))
    try:
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call("prctl", PR_SET_SECCOMP, 2, handle, 0, 0)
    except OSError as error:
        raise UnavailableError(error.errno, f"the kernel accepts no system-call filter ({error.strerror})") from error


def _filter(column: int, architecture: int, shared_files: bool) -> Iterator[Instruction]:
    """The filter as a BPF program; it runs top to bottom and jumps only forward."""
    yield from [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if column == 0:
        yield from [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    refuse = (RETURN, 0, 0, ERROR | errno.EPERM)
    myself = os.getpid()
    rules: dict[str, list[Instruction]] = {
        "fork": [(RETURN, 0, 0, ERROR | errno.EAGAIN)],
        "vfork": [(RETURN, 0, 0, ERROR | errno.EAGAIN)],
        "clone3": [
            (RETURN, 0, 0, ERROR | errno.ENOSYS)
        ],  # a filter cannot read its flags; libraries fall back to clone
        "clone": [_argument(0), (ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, ERROR | errno.EAGAIN)],
        "kill": [_argument(0), (EQUAL, 1, 0, myself), refuse],
        "tgkill": [_argument(0), (EQUAL, 1, 0, myself), refuse],
        "prlimit64": [_argument(0), (EQUAL, 2, 0, 0), (EQUAL, 1, 0, myself), refuse],
        "fcntl": [_argument(1), *_unless(SET_OWNER), refuse],
        "ioctl": [_argument(1), *_unless(TERMINAL), refuse],
    }
    for name, numbers in CALLS.items():
        number = numbers[column]
        if number is None or (name in ON_SHARED_FILES and not shared_files):
            continue
        rule = [*rules.get(name, [refuse]), (RETURN, 0, 0, ALLOW)]
        yield (EQUAL, 0, len(rule), number)
        yield from rule
    yield (RETURN, 0, 0, ALLOW)


def _argument(index: int) -> Instruction:
    return LOAD, 0, 0, ARGUMENTS + 8 * index  # the low half, which holds all of an int on these machines


def _unless(values: Sequence[int]) -> list[Instruction]:
    """Continue with the next instruction if the argument is one of `values`, else skip it."""
    last = len(values) - 1
    return [(EQUAL, last - place, int(place == last), value) for place, value in enumerate(values)]


READ = 1 << 2 | 1 << 3  # files, folders
WRITE = 1 << 1 | 1 << 14 | 1 << 15  # files; truncation and device commands, of later versions
MAKE = 1 << 5 | 1 << 7 | 1 << 8  # remove a file; make a folder, a file
KINDS = (0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)  # what each version of Landlock can forbid, version 1 first
TCP, SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals to the outside


def limit_files(readable: Sequence[str], writable: str, devices: Sequence[str]) -> None:
    """From now on, only these paths and what lies below them can be opened.

    Args:
        readable: files and folders to read.
        writable: a folder in which files may be made, written and removed.
        devices: files to read and write.

    Raises:
        UnavailableError: the kernel has no Landlock, or it is switched off.
    """
    version = LIBC.syscall(444, None, 0, 1)
    if version < 1:
        raise UnavailableError(errno.ENOSYS, "Landlock is not in this kernel (Linux 5.13 or later), or switched off")
    kinds = KINDS[min(version, len(KINDS)) - 1]
    fields = [kinds, *([TCP] if version >= 4 else []), *([SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = call("syscall", 444, attributes, len(attributes), 0)
    for path in readable:
        _allow(rules, path, READ & kinds)
    for path in devices:
        _allow(rules, path, (1 << 2 | WRITE) & kinds)
    _allow(rules, writable, (READ | WRITE | MAKE) & kinds)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("syscall", 446, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    if not os.path.isdir(path):
        rights &= 1 << 2 | WRITE  # the kernel refuses folder rights on a file
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    call("syscall", 445, rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)
