"""Connections that bring no request are closed, so that they cannot keep others out.

uvicorn waits without end for the first request of a connection. Here a connection without the complete head of a
request is closed after `PATIENCE` seconds, however slowly it sends. Above `MOST` connections, each new one displaces
the oldest that has no request under way, once that one has been silent for `GRACE` seconds: a request that was sent but
not yet read is always answered. Too many requests are refused with 503 (security.py).

A timer runs after the data that arrived before it was read. So connections are closed only in such a timer:
closing a connection with unread data resets it.

Limitation: where a process may open fewer than `MOST` files, further connections wait until others have ended.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 512
PATIENCE = 10.0  # seconds until the head of a request must be complete
GRACE = 1.0  # seconds of silence before a connection is displaced


class Connection(H11Protocol):
    """One connection to the lab."""

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0  # when it was last heard, or last answered
    _displaced = False

    @property
    def waits(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect()
        if len(self.connections) > MOST:
            mine = (one for one in self.connections if isinstance(one, Connection) and one is not self)
            others = [one for one in mine if one.waits and not one._displaced]
            if others:
                min(others, key=lambda one: one._since)._displace()

    def data_received(self, data: bytes) -> None:
        """Read a request, or a part of one."""
        self._expect()
        self._since = self.loop.time()
        super().data_received(data)
        if not self.waits:
            self._relax()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._relax()
        super().connection_lost(exc)

    def _displace(self) -> None:
        self._displaced = True
        self.loop.call_at(self._since + GRACE, self._leave)

    def _leave(self) -> None:
        if self.waits:
            self.transport.close()
        else:
            self._displaced = False

    def _expect(self) -> None:
        """Close the connection unless a request arrives in time."""
        if self._deadline is None and self.waits:
            self._deadline = self.loop.call_later(PATIENCE, self.transport.abort)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
