"""``progress=`` of long calls, and what transformers shows while it loads a model.

By default a bar appears only on a terminal, after a few seconds; ``progress=True`` always shows it and
``progress=False`` never does. A function replaces the bar: it gets what is counted, where
there are several things, the number done and the total.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm

from sinklens.utils.escaping import spelled

PATIENCE = 3.0  # seconds before a bar appears by default
Progress = bool | Callable[..., None] | None


@contextmanager
def reporting(progress: Progress, unit: str, label: Callable[..., str]) -> Iterator[Callable[..., None]]:
    """The function of ``progress=``, or one that draws a bar for each thing.

    Args:
        unit: what is counted, in the plural.
        label: the text of a bar, from the thing.
    """
    if callable(progress):
        yield progress
        return
    disable, delay = None if progress is None else not progress, 0.0 if progress else PATIENCE
    with bars(unit, disable=disable, delay=delay, leave=False) as draw:
        yield lambda *told: draw(label(*told[:-2]), *told[-2:])


@contextmanager
def bars(unit: str, **options: Any) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with a label, the units done and the total, which draws a bar of tqdm for each label."""
    shown: dict[str, Any] = {}
    with ExitStack() as opened:

        def draw(label: str, done: int, total: int) -> None:
            if label not in shown:
                bar = tqdm(desc=spelled(label), total=total, initial=done, unit=f" {unit}", **options)
                shown[label] = opened.enter_context(bar)
            shown[label].update(done - shown[label].n)

        yield draw


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
