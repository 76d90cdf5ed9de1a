"""A lab with the shipped models, and a client of it."""

import threading
from collections.abc import Iterator

import pytest
from lab_client import Client
from lab_page import PROMPT, Page

import sinklens
from sinklens.live import Lab
from sinklens.live.execution import LiveRun
from sinklens.runs import Generation


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab in this process, as a notebook opens it.

    Its models are no other test's: hooks belong to a model, and the lab's thread may still compute while a test does.
    """
    with sinklens.lab(sinklens.load("tiny-llada"), compare="tiny-llama") as opened:
        yield opened


@pytest.fixture
def client(lab) -> Iterator[Client]:
    """A client that follows the events."""
    opened = Client(lab.address, lab.token).follow()
    yield opened
    opened.close()


def ended_runs(lab: Lab) -> None:
    """Stop what earlier tests left running, and wait until it has ended."""
    client = Client(lab.address, lab.token)
    for run in client.get("/api/session")["runs"]:
        if run["status"] in ("queued", "running"):
            client.http.post(f"/api/runs/{run['id']}/cancel", json={})
            client.ended(run["id"])
    client.close()


class Gate:
    """Holds runs before a step until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()


@pytest.fixture
def gate(lab, monkeypatch) -> Iterator[Gate]:
    """Every run waits before its fourth step."""
    ended_runs(lab)
    made, before = Gate(), LiveRun.before

    def wait(self, step, state):
        if step == 3:
            made.reached.set()
            assert made.opened.wait(60)
        before(self, step, state)

    monkeypatch.setattr(LiveRun, "before", wait)
    yield made
    made.opened.set()


@pytest.fixture
def page(browser, lab) -> Iterator[Page]:
    """The page, entered with the token; a test leaves nothing in the console."""
    opened = Page(browser, lab)
    yield opened
    opened.quiet()
    opened.fresh()


@pytest.fixture(scope="session")
def plain(tiny_llada) -> Generation:
    """The run of `PROMPT` without changes."""
    return sinklens.generate(tiny_llada, PROMPT)
