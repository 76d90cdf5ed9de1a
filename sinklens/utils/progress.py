"""A progress bar for long runs, and what transformers shows while it loads a model.

By default the bar appears only on a terminal, after a few seconds; ``progress=True`` always shows it and
``progress=False`` never does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

PATIENCE = 3.0  # seconds before a bar appears by default
OnProgress = Callable[[int, int], None]  # gets how much is done, and the total


def progress_bar(steps: int, wanted: bool | None) -> tqdm:
    """A bar for the steps of a run, to be closed by a ``with`` block."""
    disable, delay = None if wanted is None else not wanted, 0.0 if wanted else PATIENCE
    return tqdm(total=steps, desc="denoising", disable=disable, delay=delay, leave=False)


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
