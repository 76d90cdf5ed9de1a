"""Connections that bring no request are closed, so that they cannot keep others out.

uvicorn limits the number of connections and answers 503 above it, but waits without end for the first request of each.
Here a connection without the complete head of a request is closed after `PATIENCE` seconds, however slowly it sends.
When there are `MOST` connections, a new one displaces the oldest that has no request under way, so a user gets in even
while somebody opens silent connections.

Limitation: `MOST` requests under way, all with the token, still keep others out.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 128
PATIENCE = 10.0  # seconds until the head of a request must be complete


class Connection(H11Protocol):
    """One connection to the lab."""

    _deadline: asyncio.TimerHandle | None = None
    _began = 0.0

    @property
    def waits(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection."""
        super().connection_made(transport)
        self._began = self.loop.time()
        self._expect()
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.waits]
        if len(self.connections) >= MOST and others:
            oldest = min(others, key=lambda one: one._began)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read a request, or a part of one."""
        self._expect()
        super().data_received(data)
        if not self.waits:
            self._relax()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._relax()
        super().connection_lost(exc)

    def _expect(self) -> None:
        """Close the connection unless a request arrives in time."""
        if self._deadline is None and self.waits:
            self._deadline = self.loop.call_later(PATIENCE, self.transport.abort)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
