"""The study of swaps on planted attention: sinks of tokens and sinks of places, with and without a difference."""

import importlib

import numpy as np
import pytest

from sinklens.analyses.swaps import SWAPS, Swaps
from sinklens.experiments import swap
from sinklens.experiments.swaps import kinds_of_vocabulary
from sinklens.sinks.kinds import Kind
from sinklens.tasks import held_out

module = importlib.import_module("sinklens.experiments.swaps")
SHORT = {"gen_length": 8, "steps": 4, "block_length": 8}
PROBLEMS = held_out(8)
TOKEN, PLACE = "digit → word, beyond digit → digit", "word → digit, beyond word → word"


def of_tokens(model):
    """Column sums that are large on digits, wherever they stand."""
    kinds = kinds_of_vocabulary(model)

    def sums(model, canvases, first=None, time=None):
        return np.where(kinds[canvases.numpy()] == Kind.DIGIT, 9.0, 0.1)[:, None, None, None].repeat(2, axis=3)

    return sums


def of_places(model):
    """Column sums that are large at the first canvas's digits: a swap changes the token, not the place."""
    kinds = kinds_of_vocabulary(model)

    def sums(model, canvases, first=None, time=None):
        places = kinds[canvases[:1].numpy()] == Kind.DIGIT
        return np.where(places.repeat(len(canvases), axis=0), 9.0, 0.1)[:, None, None, None].repeat(2, axis=3)

    return sums


@pytest.mark.parametrize(
    ("planted", "change", "verdicts"),
    [(of_tokens, 2.0, ("loses sinks", "gains sinks")), (of_places, 0.0, ("cannot tell", "cannot tell"))],
)
def test_sinks_of_tokens_are_separated_from_sinks_of_places(planted, change, verdicts, tiny_llada, monkeypatch):
    """In both, all sinks are on digits, so comparing places finds the same preference in both."""
    monkeypatch.setattr(module, "column_sums", planted(tiny_llada))
    found = Swaps(settings=SHORT).run(tiny_llada, [problem.prompt for problem in PROBLEMS])
    beyond = found.tables["beyond"].set_index("swap")
    assert beyond.loc[[TOKEN, PLACE], "estimate"].tolist() == pytest.approx([-change, change])
    assert tuple(beyond.loc[[TOKEN, PLACE], "verdict"]) == verdicts
    before = found.tables["swaps"].query("measure == 'sinks_before'").set_index("swap")["estimate"]
    assert (before["digit → digit"], before["word → word"]) == (2, 0)


def test_measures_are_those_of_swaps_by_hand(tiny_llada):
    study = Swaps(settings=SHORT, count=3, seed=1)
    found = study.run(tiny_llada, [PROBLEMS[0].prompt]).measured["tiny-llada"].isel(prompt=0)
    run = study.generate(tiny_llada, [PROBLEMS[0].prompt], study.settings, record_sinks=False).run
    for name, (replace, by) in SWAPS.items():
        made = swap(run, replace, by, count=3, seed=1)
        for measure in ("sinks_before", "sinks_after"):
            assert float(found[measure].sel(swap=name)) == pytest.approx(float(made[measure].mean()))
