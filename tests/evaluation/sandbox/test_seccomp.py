"""The filter's numbers match the kernel's, and its program forbids what it should on both machines."""

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from sinklens.evaluation.sandbox import seccomp
from sinklens.evaluation.sandbox.seccomp import (
    ALLOW,
    ARCHITECTURES,
    CALLS,
    CLONE_THREAD,
    ERROR,
    KILL,
    ON_SHARED_FILES,
    UnavailableError,
    _filter,
    filter_calls,
)

HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
MACHINES = list(ARCHITECTURES)
ME = os.getpid()


def run(machine, name, *arguments, shared_files=True, architecture=None):
    """The filter's answer to a call, interpreted according to the manual of the packet filter; errnos by name."""
    column, own = ARCHITECTURES[machine]
    number = name if isinstance(name, int) else CALLS[name][column]
    data = struct.pack("<iIQ6Q", number, architecture or own, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(_filter(column, own, shared_files))
    place, register = 0, 0
    while True:
        operation, if_true, if_false, value = program[place]
        place += 1
        if operation == 0x06:
            return errno.errorcode[value & 0xFFFF] if value & 0x7FFF0000 == ERROR else value
        if operation == 0x20:
            (register,) = struct.unpack_from("<I", data, value)
            continue
        holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[operation]
        place += if_true if holds else if_false


@pytest.mark.parametrize(("column", "header"), list(enumerate(HEADERS)), ids=MACHINES)
def test_the_numbers_match_the_kernels_headers(column, header):
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    listed = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    known = {name: int(number) for name, number in listed}
    ours = {name: numbers[column] for name, numbers in CALLS.items()}
    assert {name: number for name, number in ours.items() if number is not None and number < 450} == {
        name: known[name] for name, number in ours.items() if number is not None and number < 450
    }
    assert not [name for name, number in ours.items() if number is None and name in known]


@pytest.mark.parametrize("machine", MACHINES)
def test_new_processes_sockets_and_access_to_other_processes_are_forbidden(machine):
    thread = CLONE_THREAD | 0x3D0F00
    assert run(machine, "clone", 17) == "EAGAIN"  # a new process
    assert run(machine, "clone", thread) == ALLOW
    assert run(machine, "clone3") == "ENOSYS"
    for name in ("socket", "ptrace", "process_vm_writev", "setsid", "unshare", "memfd_create", "execve", "shmget"):
        assert run(machine, name) == "EPERM"
    for name in ("kill", "tgkill"):
        assert run(machine, name, ME) == ALLOW
        for other in (ME + 1, 1, 0, 2**32 - 1, 2**64 - ME):  # the last two are -1 and this process's group
            assert run(machine, name, other) == "EPERM"
    assert run(machine, "prlimit64", 0) == run(machine, "prlimit64", ME) == ALLOW
    assert run(machine, "prlimit64", ME + 1) == "EPERM"
    for command in (8, 10, 15):
        assert run(machine, "fcntl", 3, command) == "EPERM"
    for command in (0, 1, 2, 4, 9, 11):
        assert run(machine, "fcntl", 3, command) == ALLOW
    assert run(machine, "ioctl", 0, 0x5412) == "EPERM"
    assert run(machine, "ioctl", 0, 0x5401) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_reading_and_writing_are_allowed_and_another_instruction_set_is_killed(machine):
    column, own = ARCHITECTURES[machine]
    read, write = ((0, 1), (63, 64))[column]
    assert run(machine, read) == run(machine, write) == ALLOW
    assert run(machine, read, architecture=own ^ 1) == KILL
    if machine == "x86_64":
        assert run(machine, 0x40000000 | read) == "ENOSYS"


@pytest.mark.parametrize("machine", MACHINES)
def test_files_are_changed_by_name_only_in_a_private_tree(machine):
    assert "fchmodat" in ON_SHARED_FILES
    assert "fanotify_init" not in ON_SHARED_FILES
    for name in ON_SHARED_FILES:
        if CALLS[name][ARCHITECTURES[machine][0]] is not None:
            assert run(machine, name) == "EPERM"
            assert run(machine, name, shared_files=False) == ALLOW


def test_the_error_for_an_unknown_machine_names_it(monkeypatch):
    monkeypatch.setattr(seccomp, "ARCHITECTURES", {"sparc": (0, 2)})
    with pytest.raises(UnavailableError, match="the filter knows sparc, this is"):
        filter_calls(shared_files=True)
