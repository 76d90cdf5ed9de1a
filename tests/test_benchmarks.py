"""The costs that benchmarks/ measures have not grown grossly since its results were written.

Ratios are compared, never times, on the smallest case; the best of the repeats has to be within twice the stored
median, so that a busy machine passes and a pass that does its work twice does not.
"""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
STORED = json.loads((FOLDER / "results.json").read_text())
GROSS = 2.0


@pytest.fixture(scope="module")
def benchmarks():
    """benchmarks/run.py as a module."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_watching_costs_no_multiple_of_what_it_did(benchmarks):
    measured = list(benchmarks.parts(quick=True)["smallest"]())
    assert [ratio.what.split(" (")[0] for ratio in measured] == [
        "nothing watched ÷ plain transformers SDPA", "all sinks recorded ÷ not recorded",
    ]  # fmt: skip
    for ratio in measured:
        assert ratio.low < GROSS * STORED[ratio.what]["median"], ratio


def test_every_stored_ratio_is_told_in_the_table():
    table = (FOLDER / "README.md").read_text()
    for what, ratio in STORED.items():
        assert f"| {what} | {ratio['median']:.3f} |" in table
