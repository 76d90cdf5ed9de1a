"""The system calls that a sandboxed process is refused, compiled by libseccomp to what ``bwrap --seccomp`` loads.

bubblewrap hides files, processes and the network. The filter covers what it does not count or close: memory outside the
resource limits (shared-memory files, System V memory, key rings), new processes and namespaces, and sockets, whose
kernel code is large. Threads work. libseccomp also kills programs that call through another instruction set.

Known limit: it is a deny list. A system call added by a later kernel is allowed until it is listed.
"""

import ctypes
import errno
import os
import tempfile
from functools import cache

from sinklens.errors import SinklensError

LIBRARY = "libseccomp.so.2"
INSTALL = (
    "apt-get install bubblewrap libseccomp2 (Debian, Ubuntu), dnf install bubblewrap libseccomp (Fedora, RHEL), "
    "pacman -S bubblewrap libseccomp (Arch)"
)
REFUSED = (
    "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "add_key", "request_key", "keyctl",  # memory
    "unshare", "setns", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd",  # namespaces, processes
    "socket", "io_uring_setup", "bpf", "perf_event_open", "userfaultfd",
)  # fmt: skip
PROCESSES = ("fork", "vfork")  # refused as at a limit
ALLOW, ERROR = 0x7FFF0000, 0x00050000  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO
MASKED_EQUAL = 7  # SCMP_CMP_MASKED_EQ
CLONE_THREAD = 0x10000


class ArgumentComparison(ctypes.Structure):
    """libseccomp's ``scmp_arg_cmp``: an argument of a call, and what it is compared with."""

    _fields_ = (
        ("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("mask", ctypes.c_uint64), ("value", ctypes.c_uint64),
    )  # fmt: skip


@cache
def compiled_filter() -> bytes:
    """The filter for this machine, as a BPF program.

    Raises:
        SinklensError: libseccomp is missing or failed.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise SinklensError(f"libseccomp is not installed ({error}). Install it: {INSTALL}") from error
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))
    new_process = ArgumentComparison(0, MASKED_EQUAL, CLONE_THREAD, 0)  # clone without the flag that makes a thread

    def refuse(name: str, code: int, *conditions: ArgumentComparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        array = (ArgumentComparison * len(conditions))(*conditions)
        if number != -1:  # else this libseccomp does not know the call
            action = ctypes.c_uint32(ERROR | code)
            _check(library.seccomp_rule_add_array(rules, action, number, len(conditions), array), name)

    for name in REFUSED:
        refuse(name, errno.EPERM)
    for name in PROCESSES:
        refuse(name, errno.EAGAIN)
    refuse("clone", errno.EAGAIN, new_process)
    refuse("clone3", errno.ENOSYS)  # a filter cannot read its flags; the C library falls back to clone
    with tempfile.TemporaryFile() as file:
        _check(library.seccomp_export_bpf(rules, file.fileno()), "the filter")
        library.seccomp_release(rules)
        return os.pread(file.fileno(), 2**16, 0)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise SinklensError(f"libseccomp cannot compile {what}: {os.strerror(-result)}. Update it: {INSTALL}")
