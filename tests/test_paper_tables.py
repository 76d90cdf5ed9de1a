"""The intervals in the tables of docs/papers/ are those that their captions name."""

import importlib
from pathlib import Path
from statistics import stdev
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "papers"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The helpers of the scripts."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("templates")


def test_the_interval_is_that_of_the_means_of_templates(tables):
    asked = tables.balanced(2)
    values = np.arange(14.0) ** 2
    values[3] = np.nan  # of the second template, 4 is left
    means = [(values[0] + values[1]) / 2, values[2]] + [(values[at] + values[at + 1]) / 2 for at in range(4, 14, 2)]
    middle, half = sum(means) / 7, 2.446912 * stdev(means) / 7**0.5  # t of 6 degrees of freedom
    assert tables.mean(values, asked, ".3f") == f"{middle:.3f} [{middle - half:.3f}, {middle + half:.3f}]".replace(
        "-", "−"
    )


@pytest.mark.parametrize(("values", "lowest", "text"), [
    ([1.0] * 14, 0, "100 [78, 100]"),  # Wilson
    ([1.0] * 13 + [0.0], 0, "93 [69, 99]"),
    ([0.0] * 21, -1, "0 [−15, 15]"),  # Tango
])  # fmt: skip
def test_answers_have_score_intervals(tables, values, lowest, text):
    assert tables.answers(np.array(values), lowest) == text
