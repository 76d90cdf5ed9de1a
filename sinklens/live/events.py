"""The events of a lab, as every tab sees them: one numbered list, of which the lab keeps the newest.

The model thread appends; each connection reads from the number that it has seen last. A connection that was away
resumes there. If it was away for too long, or saw another server, the event ``reset`` says to load the session again.

Numbers begin at the clock's milliseconds, so those of a restarted server are larger than any before.

Limitation: a tab that reads more slowly than the steps arrive skips to ``reset`` once `ROOM` bytes have passed it.
"""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

ROOM = 8_000_000  # bytes of events kept
BEAT = 15.0  # seconds without an event after which a connection gets a comment, so that it is not taken for dead


class Event(NamedTuple):
    """One event.

    Attributes:
        number: larger than that of every earlier event.
        kind: its type, such as "step".
        data: JSON.
    """

    number: int
    kind: str
    data: str

    def encoded(self) -> str:
        """The event in the format of server-sent events."""
        return f"id: {self.number}\nevent: {self.kind}\ndata: {self.data}\n\n"


class EventLog:
    """The newest events, and the connections that wait for more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque()
        self._size = 0
        self._next = int(time.time() * 1000)
        self._forgotten = self._next - 1  # number of the newest event that is not kept
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._closed = False

    @property
    def newest(self) -> int:
        """Number of the newest event, or the one before the first."""
        with self._lock:
            return self._next - 1

    def add(self, kind: str, **data: Any) -> None:
        """Append an event and wake all connections; may be called from any thread."""
        text = json.dumps(data, separators=(",", ":"))
        with self._lock:
            self._kept.append(Event(self._next, kind, text))
            self._next += 1
            self._size += len(text)
            while self._size > ROOM and len(self._kept) > 1:
                old = self._kept.popleft()
                self._size -= len(old.data)
                self._forgotten = old.number
        self._wake()

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for loop, flag in waiting:
            try:
                loop.call_soon_threadsafe(flag.set)
            except RuntimeError:  # the loop was closed: no request waits there any longer
                self._waiting.discard((loop, flag))

    def _after(self, number: int) -> list[Event]:
        """The events after `number`; one ``reset`` if some of them are gone or never were."""
        with self._lock:
            if number < self._forgotten or number >= self._next:
                return [Event(self._next - 1, "reset", "{}")]
            return [event for event in self._kept if event.number > number]

    async def follow(self, number: int) -> AsyncIterator[str]:
        """The events after `number`, encoded, as they come; ends when the log is closed."""
        flag = asyncio.Event()
        entry = (asyncio.get_running_loop(), flag)
        with self._lock:
            self._waiting.add(entry)
        try:
            yield ": connected\n\n"
            while not self._closed:
                flag.clear()
                events = self._after(number)
                for event in events:
                    number = event.number
                    yield event.encoded()
                if events or self._closed:
                    continue
                try:
                    await asyncio.wait_for(flag.wait(), BEAT)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            with self._lock:
                self._waiting.discard(entry)
