"""The thread that runs the models: one job at a time.

Runs queue in order. Computations for the page (a pattern, proposals) go ahead of queued runs, because somebody is
looking at the place where they will appear. Background work, such as trying every head, comes in short parts that run
while nothing else waits. Hooks belong to a model, not to a thread, so a job never starts while
another runs: a pattern waits for the run that is under way.

Pitfall: code outside the lab that uses the same `Model` meanwhile would see the run's hooks.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from sinklens.errors import SinklensError
from sinklens.live.refusal import Refused, require

MOST_RUNS = 8  # queued
MOST_COMPUTATIONS = 32  # waiting
Result = TypeVar("Result")


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


class WorkItem(NamedTuple):
    """Work for the model thread.

    Attributes:
        run: id of the run; None for a computation.
        work: called in the thread; a run's work raises nothing.
        future: gets the result.
    """

    run: str | None
    work: Callable[[], Any]
    future: "Future[Any]"


class ModelThread:
    """Runs jobs until it is closed."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._computations: deque[WorkItem] = deque()
        self._runs: deque[WorkItem] = deque()
        self._background: deque[WorkItem] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="sinklens-lab-model", daemon=True)
        self._thread.start()

    def run(self, run: str, work: Callable[[], None]) -> None:
        """Queue a run.

        Raises:
            Refused: the queue is full.
        """
        full = f"{MOST_RUNS} runs are waiting, which is the most; wait for one, or cancel one."
        self._put(self._runs, WorkItem(run, work, Future()), MOST_RUNS, full)

    def compute(self, work: Callable[[], Result]) -> "Future[Result]":
        """Queue a computation.

        Raises:
            Refused: too many are waiting.
        """
        future: Future[Result] = Future()
        full = f"{MOST_COMPUTATIONS} computations are waiting for the model, which is the most; try again later."
        self._put(self._computations, WorkItem(None, work, future), MOST_COMPUTATIONS, full)
        return future

    def background(self, work: Callable[[], None]) -> None:
        """Queue a short part of background work, which runs when nothing else waits; it raises nothing."""
        self._put(self._background, WorkItem(None, work, Future()))

    def _put(self, queue: deque[WorkItem], item: WorkItem, most: int | None = None, full: str = "") -> None:
        with self._ready:
            require(most is None or len(queue) < most, full, 429)
            queue.append(item)
            self._ready.notify()

    def withdraw(self, run: str) -> bool:
        """Take a run out of the queue; returns whether it was still there."""
        with self._ready:
            found = next((job for job in self._runs if job.run == run), None)
            if found is not None:
                self._runs.remove(found)
        return found is not None

    def close(self, timeout: float = 10.0) -> None:
        """Stop after the current job; waiting computations are refused."""
        with self._ready:
            self._closed = True
            waiting, self._computations = list(self._computations), deque()
            self._runs.clear()
            self._background.clear()
            self._ready.notify()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Refused("the lab is closing.", 503))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _next(self) -> WorkItem | None:
        with self._ready:
            queues = (self._computations, self._runs, self._background)
            while not (self._closed or any(queues)):
                self._ready.wait()
            return None if self._closed else next(queue for queue in queues if queue).popleft()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            if not job.future.set_running_or_notify_cancel():  # the tab that wanted it is gone
                continue
            try:
                job.future.set_result(job.work())
            except BaseException as error:  # noqa: BLE001 — whoever waits for the future gets it
                job.future.set_exception(error)
            del job
