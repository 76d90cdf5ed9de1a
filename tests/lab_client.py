"""A client of the lab for tests: real requests over a real socket, with the token, and its events."""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import numpy as np
from waiting import awaited

PATIENCE = 60.0  # seconds after which a test fails instead of waiting longer


def unpacked(found: dict[str, Any]) -> np.ndarray:
    """An array as the page reads it."""
    return np.frombuffer(base64.b64decode(found["data"]), "<f2").reshape(found["shape"])


class Seen(NamedTuple):
    """An event, and when it arrived."""

    number: int
    kind: str
    data: dict[str, Any]
    at: float


def parsed(lines: Iterator[str]) -> Iterator[Seen]:
    """The events of a stream."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Seen(int(fields["id"]), fields["event"], json.loads(fields["data"]), time.monotonic())
            fields = {}


class Client:
    """Requests to a lab as its page makes them."""

    def __init__(self, address: str, token: str) -> None:
        self.http = httpx.Client(base_url=address, timeout=PATIENCE, headers={"X-Sinklens-Token": token})
        self.events: list[Seen] = []

    def get(self, path: str, **query: Any) -> Any:
        """JSON of a GET."""
        answer = self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, **body: Any) -> str:
        """Queue a run; returns its id."""
        answer = self.http.post("/api/runs", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()["run"]

    def follow(self, since: int | None = None) -> "Client":
        """Collect events in a thread, from now on or after `since`."""
        start = self.get("/api/session")["event"] if since is None else since

        def collect() -> None:
            with suppress(httpx.HTTPError):  # the lab was closed or killed; what waits for an event then fails
                with self.http.stream("GET", "/api/events", params={"since": start}, timeout=None) as answer:
                    for event in parsed(answer.iter_lines()):
                        self.events.append(event)

        threading.Thread(target=collect, daemon=True).start()
        return self

    def wait(self, found: Callable[[Seen], bool]) -> Seen:
        """The first event that `found` accepts."""
        return awaited(
            lambda: next(filter(found, list(self.events)), None),
            lambda: f"no such event; the last were {[(one.kind, one.data.get('error')) for one in self.events[-5:]]}",
        )

    def ended(self, run: str) -> dict[str, Any]:
        """Everything about a run, once it has ended."""

        def look() -> dict[str, Any] | None:
            found = self.get(f"/api/runs/{run}")
            return found if found["summary"]["status"] not in ("queued", "running") else None

        return awaited(look, lambda: f"the run has not ended: {self.get(f'/api/runs/{run}')['summary']}")

    def run(self, **body: Any) -> dict[str, Any]:
        """Queue a run and wait for its end."""
        found = self.ended(self.submit(**body))
        assert found["summary"]["status"] == "done", found["summary"]
        return found

    def close(self) -> None:
        """End the connections."""
        self.http.close()
