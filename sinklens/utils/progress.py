"""A progress bar for long runs.

By default it appears only on a terminal, after a few seconds; ``progress=True`` always shows it and ``progress=False``
never does.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

PATIENCE = 3.0  # seconds before a bar appears by default
OnProgress = Callable[[int, int], None]  # gets how much is done, and the total


class Progress:
    """A listener (see sampling/loop.py) that shows how many steps are done; `what` names the work."""

    def __init__(self, steps: int, wanted: bool | None, what: str = "denoising") -> None:
        self._steps, self._wanted, self._what = steps, wanted, what
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def before(self, step: int, state: object) -> None:
        """Show the bar once it is due."""
        due = self._wanted or (
            self._wanted is None and sys.stderr.isatty() and time.monotonic() - self._started > PATIENCE
        )
        if due and self._bar is None:
            self._show(step)

    def after(self, step: int, state: object) -> None:
        """Count the step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step + 1)

    def _show(self, done: int) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn(self._what),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._what, total=self._steps, completed=done)
        self._bar.start()
