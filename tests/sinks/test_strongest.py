"""The strongest keys of a kind equal those of a loop, and are sinks, or are not, as stated."""

import numpy as np
import pytest
from tracks import made, planted

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import MaskSinks
from sinklens.sinks import EpsilonOverMean, StrongestKeys
from sinklens.sinks.kinds import Kind, PlaceState, kinds, states
from sinklens.tasks import held_out


def found_in(track, **given):
    """Positions of the strongest keys by step, in a planted track."""
    return [step.nonzero()[0].tolist() for step in StrongestKeys(**given).detect(track).to_numpy()[0, :, 0, 0]]


def test_on_a_planted_map_sinks_are_distinguished_from_other_strongest_keys():
    track = planted([[1, 1, 9, 1], [1, 1, 1.5, 1], [2, 0.5, 2, 0.5], [0, 0, 0, 0]])
    for given, expected in (
        ({}, [[2], [2], [0], []]),
        ({"k": 2}, [[0, 2], [0, 2], [0, 2], []]),
        ({"part": "sink"}, [[2], [], [], []]),
        ({"part": "other", "k": 2}, [[0], [0, 2], [0, 2], []]),
        ({"k": 9}, [[0, 1, 2, 3]] * 3 + [[]]),
    ):
        assert found_in(track, **given) == expected, given


@pytest.mark.parametrize("causal", [False, True])
def test_the_parts_equal_those_of_an_explicit_loop(causal):
    track, _, there = made(causal)
    found = {part: StrongestKeys(2, part=part, sink=EpsilonOverMean(0.4)).detect(track).to_numpy()
             for part in ("all", "sink", "other")}  # fmt: skip
    scores = track.scores().to_numpy()
    for place in np.ndindex(scores.shape[:4]):
        keys = [key for key in range(scores.shape[4]) if there[place[0], place[1], key]]
        values = scores[place].astype(float)
        best = set(sorted(keys, key=lambda key, values=values: -values[key])[:2]) if values[keys].sum() > 0 else set()
        mean = {key: (values[keys].sum() - values[key]) / (len(keys) - 1) for key in keys}
        sinks = {key for key in best if values[key] > mean[key] + 0.4}
        expected = {"all": best, "sink": sinks, "other": best - sinks}
        assert {part: set(found[part][place].nonzero()[0].tolist()) for part in found} == expected


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ("digit", lambda kind, state: kind == Kind.DIGIT),
        ("not digit", lambda kind, state: kind != Kind.DIGIT),
        (("digit", "newline"), lambda kind, state: kind in (Kind.DIGIT, Kind.NEWLINE)),
        (("prompt", "not digit", "not start"), lambda kind, state: state == PlaceState.PROMPT and kind not in (3, 5)),
        ("committed", lambda kind, state: state == PlaceState.COMMITTED),
    ],
)
@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_the_strongest_keys_of_a_kind_have_that_kind(shipped, only, wanted):
    track = sinklens.generate(shipped, [problem.prompt for problem in held_out(2)], gen_length=8, progress=False).sinks
    found, scores = StrongestKeys(2, only).detect(track).to_numpy(), track.scores().to_numpy()
    overall = StrongestKeys(2, only, overall=True).detect(track).to_numpy()
    codes, state = kinds(track).to_numpy(), states(track).to_numpy()
    exists, strongest = state != PlaceState.MISSING, track.top(2).to_numpy()
    for row, step, layer, head in np.ndindex(scores.shape[:4]):
        keys = [key for key in range(scores.shape[4])
                if exists[row, step, key] and wanted(codes[row, step, key], state[row, step, key])]  # fmt: skip
        values = scores[row, step, layer, head]
        best = sorted(keys, key=lambda key, values=values: -values[key])[:2]
        assert found[row, step, layer, head].nonzero()[0].tolist() == sorted(best)
        top = set(strongest[row, step, layer, head].tolist())
        assert set(overall[row, step, layer, head].nonzero()[0].tolist()) == top & set(keys)


def test_only_of_an_intervention_also_leaves_out_kinds(tiny_llada):
    prompt, settings = held_out(1)[0].prompt, {"gen_length": 6, "progress": False}
    base = sinklens.generate(tiny_llada, prompt, **settings)
    by_kind = MaskSinks(top_k=2, only="not digit", source=base)
    by_detector = MaskSinks(top_k=None, detector=StrongestKeys(2, "not digit"), source=base)
    runs = [sinklens.generate(tiny_llada, prompt, hooks=hook, **settings) for hook in (by_kind, by_detector)]
    assert runs[0].sinks.scores().equals(runs[1].sinks.scores())
    assert not runs[0].sinks.scores().equals(base.sinks.scores())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"k": 0}, "k must be an integer of at least 1; got 0"),
        ({"part": "both"}, "part must be one of all, sink, other; got 'both'"),
        ({"only": "digits"}, "or 'not' and one of them; 'digits' is neither. .* Nearest: digit"),
        ({"only": 3}, "only must be a text or a list of texts; got 3"),
        ({"only": ("prompt", "not words")}, "'not words' is neither. .* Nearest: word"),
    ],
)
def test_invalid_settings_are_rejected(given, text):
    with pytest.raises(SettingError, match=text):
        StrongestKeys(**given)
