"""The progress bar appears when wanted, or late on a terminal, and counts the steps that are done."""

import os
import pty
import subprocess
import sys

import pytest

from sinklens import progress
from sinklens.progress import Progress


def run_bar(steps, wanted):
    with Progress(steps, wanted) as bar:
        for step in range(steps):
            bar.before(step, None)
            bar.after(step, None)
        return bar._bar, bar._task


def test_a_wanted_bar_counts_every_step_and_an_unwanted_one_never_appears():
    bar, task = run_bar(5, True)
    assert bar.tasks[task].completed == 5
    assert bar.tasks[task].total == 5
    assert run_bar(5, False) == (None, None)


@pytest.mark.parametrize(
    ("terminal", "patience", "appears"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_by_itself_it_appears_on_a_terminal_after_a_while(monkeypatch, terminal, patience, appears):
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    bar, _ = run_bar(3, None)
    assert (bar is not None) is appears


def read_all(terminal):
    """What is written to a pseudo-terminal until its last writer is gone, which Linux tells by an error."""
    while True:
        try:
            yield os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            os.close(terminal)
            return


@pytest.mark.parametrize(("wanted", "shown"), [(True, True), (False, False)])
def test_on_a_real_terminal_it_is_drawn_on_standard_error(wanted, shown):
    code = (
        "import sinklens\n"
        f"run = sinklens.generate('tiny-llada', 'Question: Tom has 2 apples.', progress={wanted})\n"
        "print('done')\n"
    )
    mine, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    drawn = "".join(read_all(mine))
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, b"done\n")
    assert ("denoising" in drawn) is shown
