"""A progress bar for long runs, and what transformers shows while it loads a model.

By default the bar appears only on a terminal, after a few seconds; ``progress=True`` always shows it and
``progress=False`` never does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def transformers_output(bars: bool = True) -> Iterator[None]:
    """Without transformers' warnings, and its progress bars only if `bars`; then the user's settings are restored.

    What matters is checked here. Its warnings of an unusual config, such as a factor of a published rotation or a
    temperature without sampling, ask for nothing that a user can do.
    """
    from transformers.utils import logging

    verbosity, hook = logging.get_verbosity(), logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(hook if bars else lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True}))
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(hook)
