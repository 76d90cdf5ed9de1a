"""The progress bar appears on request, or after a delay on a terminal, and counts finished steps."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from sinklens.utils import progress
from sinklens.utils.progress import Progress


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
    with Progress(5, wanted) as bar:
        bar._bar.mininterval = 0
        for step in range(5):
            bar.before(step, None)
            bar.after(step, None)
        assert "5/5" in drawn.getvalue() if appears else drawn.getvalue() == ""


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
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    drawn = "".join(read_all(controller))
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, b"done\n")
    before, _, after = drawn.partition("between")
    assert "denoising" not in before
    assert "denoising" in after
