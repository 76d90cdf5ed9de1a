"""Waiting for what another thread, process or page does."""

import time
from collections.abc import Callable
from typing import Any


def awaited(look: Callable[[], Any], failed: Callable[[], str], seconds: float = 60) -> Any:
    """The first true value of `look`; after `seconds`, a failure that says what `failed` returns."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(failed())
