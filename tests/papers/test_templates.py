"""The intervals in the tables of docs/papers/ are those that their captions name; a script asks what it is told to."""

import sys
from statistics import stdev

import numpy as np
import pytest
from contracts import ROOT

from sinklens.errors import CheckpointError

SCRIPTS = sorted({file.stem for file in ROOT.glob("benchmarks/papers/*.py")} - {"templates"})


def test_the_interval_is_that_of_the_means_of_templates(script):
    tables = script("templates")
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
def test_answers_have_score_intervals(script, values, lowest, text):
    assert script("templates").answers(np.array(values), lowest) == text


def test_models_sizes_and_settings_can_be_given(script):
    tables = script("templates")
    assert tables.call(["a", "each=1", "steps=8", "order=confidence"], ("b",), 3) == (
        ["a"], tables.balanced(1), {"steps": 8, "order": "confidence"},
    )  # fmt: skip


@pytest.mark.parametrize(("name", "given", "said"), [
    *((name, *case) for name in SCRIPTS for case in (("--help", "[MODEL ...]"), ("none", "'none' is neither a"))),
    ("early_answers", "tiny-llama", "tiny-llama lacks what this script needs: a mask token."),
    ("watermarks", "tiny-two-modes", "a sampler with a random order."),
    ("planted", "tiny-text", "single tokens for ' eggs', ' coins'"),
    ("planted_text", "tiny-llama", "tiny-llama lacks what this script needs: a mask token."),
    ("causal_tracing", "tiny-llada", "an interval over facts needs two that every model knows."),
])  # fmt: skip
def test_every_script_takes_models_says_so_and_says_why_it_refuses_one(script, name, given, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *given.split()])
    with pytest.raises((SystemExit, CheckpointError)) as caught:
        script(name).main()
    assert said in f"{caught.value} {capsys.readouterr().out}"


@pytest.mark.parametrize("values", [[1.0, 0.0], [2.0, np.nan]])
def test_a_ratio_of_nothing_has_no_geometric_mean(script, values):
    assert script("templates").geometric(np.array(values), script("templates").balanced(1)[:2]) == "a value is 0"
