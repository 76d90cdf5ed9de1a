"""The costs measured by benchmarks/ have not grown grossly since its results were stored.

Only ratios are compared, not times, on the smallest case and in a separate process, because the tests' type checks add
cost. The best repeat must be within twice the stored median, so a busy machine passes but a pass that does its work
twice does not.
"""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
STORED = json.loads((FOLDER / "results.json").read_text())
GROSS = 2.0


def test_watching_costs_less_than_twice_its_stored_ratio(tmp_path):
    out = tmp_path / "results.json"
    subprocess.run(
        [sys.executable, FOLDER / "run.py", "--quick", "--only", "smallest", "--out", out], check=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    measured = json.loads(out.read_text())
    assert [what.split(" (")[0] for what in measured] == [
        "nothing watched ÷ plain transformers SDPA", "all sinks recorded ÷ not recorded",
    ]  # fmt: skip
    for what, ratio in measured.items():
        assert ratio["low"] < GROSS * STORED[what]["median"], ratio


def test_the_table_lists_every_stored_ratio():
    table = (FOLDER / "README.md").read_text()
    for what, ratio in STORED.items():
        assert f"| {what} | {ratio['median']:.3f} |" in table
