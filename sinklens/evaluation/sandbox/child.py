"""The inner side of the sandbox: a fresh Python in bubblewrap's namespaces (bubblewrap.py starts it).

It takes a user id that belongs to nobody if it was root, limits its own resources, reports that it is ready together
with a handle of its working folder, and then reads its task from standard input and plays its role (programs.py).

Reports are packets of JSON: {"ready": true}, then, from the checker alone, its verdict.
"""

import json
import math
import os
import resource
import socket
import sys
from contextlib import suppress
from typing import Any

from sinklens.evaluation.sandbox import programs

OPEN_FILES = 64


def main() -> None:
    """Read the settings, give up what they say, play the role, and exit."""
    settings = json.loads(sys.argv.pop())
    report = socket.socket(fileno=settings["report"])
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    _limit_resources(**settings["limits"])
    folder = os.open(".", os.O_RDONLY)
    socket.send_fds(report, [b'{"ready": true}'], [folder])
    os.close(folder)
    text = sys.stdin.buffer.read()
    if not text:  # the parent exited
        os._exit(1)
    if settings["role"] == "candidate":
        report.close()
        programs.candidate(json.loads(text), settings["calls"], settings["replies"])
    else:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)

        def send(**line: Any) -> None:
            with suppress(OSError):  # the parent exited
                report.send(json.dumps(line).encode())

        programs.checker(json.loads(text), settings["calls"], settings["replies"], send)
    programs.finish()


def _limit_resources(*, seconds: float, memory_mb: int, processes: int, file_mb: int, **_others: int) -> None:
    cpu, others = math.ceil(seconds), 2  # this process and bubblewrap's
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, file_mb * 2**20, file_mb * 2**20),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_NPROC, others + processes, others + processes),
        (resource.RLIMIT_AS, memory_mb * 2**20, memory_mb * 2**20),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        _, ceiling = resource.getrlimit(kind)
        if ceiling != resource.RLIM_INFINITY:  # a tighter limit is already in force
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))
