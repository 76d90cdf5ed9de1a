"""Background work of the model thread: trying every head of a run, or repeating a pair of runs.

Work is done in parts, one at a time and only while nothing else waits, so a run or a pattern that somebody waits for
goes first. Each part is an event, and all tabs show what was found so far.

Limitation: work is not kept on disk; after a restart it is done again.
"""

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, ClassVar

from sinklens.errors import SinklensError
from sinklens.live.events import EventLog
from sinklens.live.refusal import Refused
from sinklens.live.thread import ModelThread


class RunCancelled(Exception):
    """The run was cancelled."""


class Stop:
    """Ends the runs that it listens to between two steps, once `requested` is set."""

    requested = False

    def before(self, step: int, state: Any) -> None:
        """Stop if that was requested."""
        if self.requested:
            raise RunCancelled

    def after(self, step: int, state: Any) -> None:
        """Nothing to do."""


def reason(error: Exception, what: str) -> str:
    """Why work of the model thread failed; the traceback of a crash is printed.

    Args:
        what: names the work.
    """
    if isinstance(error, SinklensError | Refused):
        return str(error)
    traceback.print_exc()
    return f"{what} crashed with {type(error).__name__}: {error}. The terminal has the traceback."


class Work(ABC):
    """Work in parts.

    Attributes:
        kind: of its events.
        name: what it is called if it crashes.
        status: "running", "done", "cancelled" or "failed".
        error: what failed.
        stop: ends it.
        began: when it began.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init__(self) -> None:
        self.status, self.stop, self.began = "running", Stop(), time.perf_counter()
        self.error: str | None = None

    @abstractmethod
    def part(self) -> bool:
        """Do the next part; returns whether more are left."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The state."""

    def news(self) -> dict[str, Any]:
        """The state for those who know the one before."""
        return self.to_json()

    def proceed(self) -> None:
        """Do the next part. Nothing is raised, so that the lab outlives its work."""
        try:
            self.stop.before(0, None)
            self.status = "running" if self.part() else "done"
        except RunCancelled:
            self.status = "cancelled"
        except Exception as error:  # noqa: BLE001
            self.status, self.error = "failed", reason(error, self.name)


class Background:
    """The newest work for each of some keys, such as the id of a run.

    Args:
        events, thread: those of the lab.
        most: keys whose work is kept; the oldest is stopped.
    """

    def __init__(self, events: EventLog, thread: ModelThread, most: int) -> None:
        self._events, self._thread, self._most, self._lock = events, thread, most, threading.Lock()
        self._kept: OrderedDict[Any, Work] = OrderedDict()

    def begin(self, key: Any, work: Work) -> dict[str, Any]:
        """Begin work, instead of any earlier for `key`; returns its state."""
        self.forget(key)
        with self._lock:
            self._kept[key] = work
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].stop.requested = True
        state = work.to_json()
        self._events.add(work.kind, **work.news())
        self._thread.background(lambda: self._proceed(key, work))
        return state

    def state(self, key: Any) -> dict[str, Any] | None:
        """The state of the work for `key`, or None."""
        work = self._kept.get(key)
        return None if work is None else work.to_json()

    def cancel(self, key: Any) -> None:
        """Stop the work for `key`, if there is any; what was found so far remains."""
        if (work := self._kept.get(key)) is not None:
            work.stop.requested = True

    def cancel_all(self) -> None:
        """Stop all work."""
        with self._lock:
            for work in self._kept.values():
                work.stop.requested = True

    def forget(self, key: Any) -> None:
        """Stop and drop the work for `key`."""
        self.cancel(key)
        with self._lock:
            self._kept.pop(key, None)

    def _proceed(self, key: Any, work: Work) -> None:
        """Do a part in the model thread, and queue the next."""
        work.proceed()
        if self._kept.get(key, work) is work:
            self._events.add(work.kind, **work.news())
        if work.status == "running":
            self._thread.background(lambda: self._proceed(key, work))
