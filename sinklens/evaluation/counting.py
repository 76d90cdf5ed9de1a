"""Progress of long jobs: bars on a terminal, otherwise one printed line per twentieth of the work.

Both go to standard error, so the table printed at the end can be piped. Limitation: without a terminal there is no
estimate of the time left.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

PARTS = 20  # progress lines per label when there is no terminal


class Counts:
    """Progress display, called with a label, the units done and the total; use it in a ``with`` block.

    Attributes:
        unit: what is counted, in the plural.
        seen: label -> (done, total), as of the last call.
    """

    def __init__(self, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.unit = unit
        self.seen: dict[str, tuple[int, int]] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._tasks: dict[str, Any] = {}
        self._terminal = sys.stderr.isatty()
        self._bars = Progress(*columns, console=Console(file=sys.stderr), disable=not self._terminal)

    def __enter__(self) -> "Counts":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal:
            self._bars.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        from rich.markup import escape

        before = self.seen.get(label)
        self.seen[label] = (done, total)
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(escape(label), total=total)
        self._bars.update(self._tasks[label], completed=done)
        if not self._terminal and (
            before is None or done == total or done * PARTS // total > before[0] * PARTS // total
        ):
            print(f"{label}: {done} of {total} {self.unit} done", file=sys.stderr, flush=True)

    def stop(self, out: Path, call: Sequence[str]) -> NoReturn:
        """After an interrupt, print what is kept in `out` and the command that resumes, and exit with code 130."""
        self.__exit__(None, None, None)
        kept = "; ".join(f"{label}: {done} of {total}" for label, (done, total) in self.seen.items())
        print(
            f"sinklens: interrupted; {out} keeps the finished {self.unit} ({kept or 'none yet'}). To resume:\n"
            f"  {shlex.join(['sinklens', *call])}",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
