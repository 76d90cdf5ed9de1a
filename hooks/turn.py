"""One thread at a time uses a model.

Hooks, trace blocks and the description of the pass belong to the model, so two threads that ran it at once would call
each other's hooks and read each other's values. A run, a single pass, a trace block and a block of
``with model.hooks(...)`` each take the model's turn; another thread waits until it is over. The thread that has the
turn may take it again: a hook function may run a pass.

Pitfall: a thread that waits for another thread inside a trace block, while that one runs the same model, waits forever.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """A lock that its thread may take again; a copy is another lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Turn"], tuple[()]]:
        return Turn, ()


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs while its thread has the turn of ``self``."""

    @wraps(method)
    def waits(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with owner.turn:
            return method(*args, **kwargs)

    return waits
