"""The progress bar appears on request, or after a delay on a terminal, and counts finished steps."""

import os
import pty
import subprocess
import sys

import pytest

from sinklens.utils import progress
from sinklens.utils.progress import Progress


def run_bar(steps, wanted):
    with Progress(steps, wanted) as bar:
        for step in range(steps):
            bar.before(step, None)
            bar.after(step, None)
        return bar._bar, bar._task


def test_an_enabled_bar_counts_every_step_and_a_disabled_one_never_appears():
    bar, task = run_bar(5, True)
    assert bar.tasks[task].completed == 5
    assert bar.tasks[task].total == 5
    assert run_bar(5, False) == (None, None)


@pytest.mark.parametrize(
    ("terminal", "patience", "appears"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)]
)
def test_by_default_it_appears_on_a_terminal_after_a_delay(monkeypatch, terminal, patience, appears):
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    bar, _ = run_bar(3, None)
    assert (bar is not None) is appears


def read_all(terminal):
    """Output of a pseudo-terminal until its last writer has closed it, which Linux reports as an error."""
    while True:
        try:
            yield os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            os.close(terminal)
            return


@pytest.mark.extended
def test_on_a_real_terminal_it_is_drawn_on_standard_error_if_wanted():
    code = (
        "import sinklens, sys\n"
        "sinklens.generate('tiny-llada', 'Question: Tom has 2 apples.', gen_length=4, progress=False)\n"
        "print('between', file=sys.stderr)\n"
        "sinklens.generate('tiny-llada', 'Question: Tom has 2 apples.', gen_length=4, progress=True)\n"
        "print('done')\n"
    )
    controller, terminal = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    drawn = "".join(read_all(controller))
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, b"done\n")
    before, _, after = drawn.partition("between")
    assert "denoising" not in before
    assert "denoising" in after
