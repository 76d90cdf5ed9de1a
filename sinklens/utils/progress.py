"""A progress bar for long runs.

By default it appears only on a terminal, after a few seconds; ``progress=True`` always shows it and ``progress=False``
never does.
"""

from collections.abc import Callable
from types import TracebackType

PATIENCE = 3.0  # seconds before a bar appears by default
OnProgress = Callable[[int, int], None]  # gets how much is done, and the total


class Progress:
    """A listener (see sampling/loop.py) that shows how many steps are done; `what` names the work."""

    def __init__(self, steps: int, wanted: bool | None, what: str = "denoising") -> None:
        from tqdm import tqdm

        disable, delay = None if wanted is None else not wanted, 0.0 if wanted else PATIENCE
        self._bar = tqdm(total=steps, desc=what, disable=disable, delay=delay, leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def before(self, step: int, state: object) -> None:
        """Show how much is done."""
        self._bar.update(step - self._bar.n)

    def after(self, step: int, state: object) -> None:
        """Count the step."""
        self._bar.update(step + 1 - self._bar.n)
