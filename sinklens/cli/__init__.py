"""The command line, ``sinklens COMMAND``: demo, trace, lab, analyse, evaluate, score, merge, export, table, hooks, …"""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `app.run`): 130 after Ctrl+C, even while Python imports modules."""
    try:
        with _interrupting():
            from sinklens.cli.app import run

            return run(arguments)
    except KeyboardInterrupt:
        print("sinklens: interrupted; unfinished files were discarded.", file=sys.stderr)
        return 130


@contextmanager
def _interrupting() -> Iterator[None]:
    """Let the signals of `kill` and of a closed terminal interrupt as Ctrl+C does, so that temporary files are deleted.

    A signal that is ignored, as by nohup, or handled by the program around remains so. After the first signal the
    others are ignored, because both a terminal and its shell send one.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    ours = [number for number in ENDING if main_thread and signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, frame: Any) -> None:
        if number != signal.SIGTERM and signal.SIGTERM in ours:  # a server shuts down in order on SIGTERM only
            signal.raise_signal(signal.SIGTERM)
            return
        for one in ours:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


__all__ = ["main"]
