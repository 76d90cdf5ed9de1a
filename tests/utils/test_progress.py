"""The progress bar appears on request, or after a delay on a terminal, and counts finished steps."""

import io
import sys
from functools import partial

import pytest
import torch

from sinklens.experiments import sweep
from sinklens.interventions import MaskSinks
from sinklens.runs import generate
from sinklens.utils import progress
from sinklens.utils.progress import reporting


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
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, mininterval=0))
    with reporting(wanted, "steps", lambda: "denoising") as report:
        for done in range(6):
            report(done, 5)
        assert "5/5" in drawn.getvalue() if appears else drawn.getvalue() == ""


def test_a_function_is_called_instead_of_a_bar(tiny_llada):
    told, given = [], {"gen_length": 4, "steps": 2, "progress": lambda *how: told.append(how)}
    generate(tiny_llada, torch.tensor([[5, 6]]), **given)
    sweep(tiny_llada, [[5, 6], [7, 8]], {"a": MaskSinks(), "b": MaskSinks(2)}, batch_size=2, **given)
    assert told == [(0, 2), (1, 2), (2, 2), (1, 2), (2, 2)]
