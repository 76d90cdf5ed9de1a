"""The progress bar appears on request, or after a delay on a terminal, and counts finished steps."""

import io
import sys

import pytest

from sinklens.utils import progress
from sinklens.utils.progress import progress_bar


@pytest.mark.parametrize(
    ("wanted", "terminal", "patience", "appears"),
    [
        (True, False, 60.0, True), (False, True, 0.0, False), (None, True, 0.0, True), (None, True, 60.0, False),
        (None, False, 0.0, False),
    ],
)  # fmt: skip
def test_it_appears_on_request_or_on_a_terminal_after_a_delay(monkeypatch, wanted, terminal, patience, appears):
    drawn = io.StringIO()
    drawn.isatty = lambda: terminal
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setattr(sys, "stderr", drawn)
    with progress_bar(5, wanted) as bar:
        bar.mininterval = 0
        for _ in range(5):
            bar.update()
        assert "5/5" in drawn.getvalue() if appears else drawn.getvalue() == ""
