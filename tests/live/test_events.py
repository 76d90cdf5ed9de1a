"""Events reach every connection once and in order, also after an interruption."""

import asyncio
import threading

from lab_client import parsed

from sinklens.live import events
from sinklens.live.events import EventLog


def lines(log: EventLog, after: int, count: int | None = None) -> list[str]:
    """The first `count` events after number `after`; without `count`, all until the log is closed."""

    async def collect() -> list[str]:
        found = []
        async for text in log.follow(after):
            found += [] if text.startswith(":") else [text]
            if len(found) == count:
                break
        return found

    return asyncio.run(asyncio.wait_for(collect(), 10))


def test_a_connection_resumes_after_the_last_event_it_saw_until_the_log_is_closed():
    log = EventLog()
    start = log.newest
    for number in range(5):
        log.add("step", step=number)
    threading.Timer(0.1, log.close).start()
    assert lines(log, start + 3) == [
        f'id: {start + 4}\nevent: step\ndata: {{"step":3}}\n\n',
        f'id: {start + 5}\nevent: step\ndata: {{"step":4}}\n\n',
    ]


def test_a_number_that_cannot_be_resumed_is_a_reset(monkeypatch):
    """It is another server's, one of the future, or older than the events that are kept."""
    log = EventLog()
    log.add("step")
    for away in (-1, 10**6):
        assert "event: reset" in lines(log, log.newest - 1 + away, 1)[0]
    monkeypatch.setattr(events, "ROOM", 1_000)
    start = log.newest
    for number in range(100):
        log.add("step", step=number, text="x" * 90)
    assert "event: reset" in lines(log, start, 1)[0]
    assert '"step":99' in lines(log, log.newest - 1, 1)[0]
    assert sum(len(event.data) for event in log._kept) <= 1_000


def test_a_stream_resumes_by_its_header(client):
    run = client.run(prompt="Question: 1", settings={"gen_length": 2})["summary"]["id"]
    done = client.wait(lambda event: event.kind == "done" and event.data["run"] == run)
    with client.http.stream("GET", "/api/events", headers={"Last-Event-ID": str(done.number - 1)}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        first = next(parsed(answer.iter_lines()))
    assert (first.number, first.kind) == (done.number, "done")
