"""Control keys against loops: never one of the strongest, matched as stated, the same at every step if persistent."""

import hashlib
from functools import partial

import numpy as np
import pytest
import torch
from building import shared_model
from watching import unwatched, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import MaskSinks, Where
from sinklens.interventions.scores import ScoredStep
from sinklens.runs.intervention import RunContext, Snapshot
from sinklens.sinks import EpsilonOverMean, StrongestKeys, TopK
from sinklens.sinks.kinds import Kind, kinds
from sinklens.tasks import held_out

LAYERS, HEADS, KEYS = (0, 2), 4, 12
REAL = torch.tensor([[False] * 3 + [True] * 9, [True] * 12])
ROW_KEYS = (5, 77)


def taken(scores, real, step=1, causal=False, **given):
    """The keys that a rule takes by the scores of some layers, in a run with 6 positions of prompt."""
    run = RunContext(shared_model("llama", causal).tree, real, 6, 6, 60, 0, ROW_KEYS, lambda ids: {}, {})
    canvas = Snapshot(torch.full(real.shape, 7), torch.zeros_like(real))
    return Where(**given).taken(ScoredStep(scores, canvas), step, run)


def choose(step=3, causal=False, scores=None, **given):
    """The keys of a selection: layer -> row -> head -> positions; and the scores."""
    noise = torch.Generator().manual_seed(step)
    scores = scores or {layer: torch.rand(2, HEADS, KEYS, generator=noise) ** 4 for layer in LAYERS}
    found = taken(scores, REAL, step, causal, **{"top_k": 2, "seed": 3} | given)
    positions = {
        layer: [[head.nonzero()[:, 0].tolist() for head in row] for row in found[:, at]]
        for at, layer in enumerate(scores)
    }
    return positions, scores


def places():
    """Every layer, row and head."""
    return [(layer, row, head) for layer in LAYERS for row in range(2) for head in range(HEADS)]


def real_keys(row):
    """Positions of a row that are not padding."""
    return [key for key in range(KEYS) if REAL[row, key]]


def by_strength(scores, row):
    """The real keys of a head, strongest first."""
    return sorted(real_keys(row), key=lambda key: -scores[key].item())


def order_of(layer, row, head, place, seed=3):
    """The real keys of a head in the order in which a control draws them."""
    digest = hashlib.sha256(repr((seed, place, layer)).encode()).digest()
    rng = np.random.default_rng([int.from_bytes(digest[:8], "little"), ROW_KEYS[row]])
    noise = rng.random((HEADS, len(real_keys(row)))).astype(np.float32)[head]
    return [key for _, key in sorted(zip(-noise, real_keys(row), strict=True))]


def random_rest(values, *place, at=3):
    """The first two of a drawn order that are not among the two strongest."""
    strongest = by_strength(values, place[1])[:2]
    return [key for key in order_of(*place, at) if key not in strongest][:2]


def same_mass(layer, row, scores):
    """Keys of a layer that are no sinks, in the drawn order, as long as their sum nears that of the strongest."""
    digest = hashlib.sha256(repr((3, "run", layer)).encode()).digest()
    rng, real = np.random.default_rng([int.from_bytes(digest[:8], "little"), ROW_KEYS[row]]), real_keys(row)
    noise, free, wanted, taken = rng.random((HEADS, len(real))).astype(np.float32), [], 0.0, []
    for head, values in enumerate(scores[layer][row]):
        strongest = by_strength(values, row)[0]
        wanted += values[strongest].item()
        for at, key in enumerate(real):
            others = [values[other].item() for other in real if other != key]
            if key != strongest and values[key].item() - np.mean(others) <= 3:
                free.append((-noise[head, at], head, key))
    for _, head, key in sorted(free):
        total, more = sum(scores[layer][row, one, other].item() for one, other in taken), scores[layer][row, head, key]
        if abs(total + more.item() - wanted) > abs(total - wanted):
            break
        taken.append((head, key))
    return taken


def nearest(values, layer, row, head):
    """For the three strongest in turn the nearest key that is free; the earlier of two."""
    strongest, taken = by_strength(values, row)[:3], []
    for key in strongest:
        free = [other for other in real_keys(row) if other not in strongest and other not in taken]
        taken.append(min(free, key=lambda other: (abs(other - key), other)))
    return taken


CONTROLS = {
    "random": ({"pick": "random"}, random_rest),
    "persistent": ({"pick": "random", "persistent": True}, partial(random_rest, at="run")),
    "nearest": ({"pick": "nearest", "top_k": 3}, nearest),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_control_keys_are_those_of_a_loop(name):
    given, expected = CONTROLS[name]
    found, scores = choose(**given)
    for layer, row, head in places():
        assert found[layer][row][head] == sorted(expected(scores[layer][row, head], layer, row, head))
    assert {len(found[layer][row][head]) for layer, row, head in places()} == {given.get("top_k", 2)}


def test_keys_of_the_same_mass_are_no_sinks_and_match_the_strongest_of_their_layer():
    noise = torch.Generator().manual_seed(1)
    scores = {layer: 8 * torch.rand(2, HEADS, KEYS, generator=noise) ** 4 for layer in LAYERS}
    found, _ = choose(scores=scores, pick="same_mass", persistent=True, top_k=1)
    for layer, row in {place[:2] for place in places()}:
        expected = same_mass(layer, row, scores)
        assert [(head, key) for head in range(HEADS) for key in found[layer][row][head]] == sorted(expected)
        assert len(expected) > HEADS


def test_persistent_keys_of_an_autoregressive_run_come_from_its_prompt():
    """Keys that are decoded later do not exist at every step."""
    found, _ = choose(pick="random", persistent=True, causal=True, top_k=1)
    redrawn, _ = choose(pick="random", causal=True, top_k=1)
    assert max(key for row in found[0] for head in row for key in head) < 6
    assert max(key for row in redrawn[0] for head in row for key in head) >= 6


def test_keys_of_the_same_kind_match_the_kinds_of_the_strongest(tiny_llada):
    prompts = [problem.prompt for problem in held_out(2)]
    settings = {"gen_length": 8, "steps": 4}
    base = sinklens.generate(tiny_llada, prompts, progress=False, **settings)
    codes, top = kinds(base.sinks).to_numpy(), base.sinks.top(2).to_numpy()
    watched = watch(tiny_llada, prompts, [MaskSinks(top_k=2, source=base, pick="same_kind", seed=1)], **settings)
    digits = 0
    for step in range(1, 4):
        ignored = (watched.stacked("hook_pattern", step)[:, :, :, -1] == 0) & watched.run.real[None, :, None]
        for layer, row, head in np.ndindex(ignored.shape[:3]):
            keys = ignored[layer, row, head].nonzero()[:, 0].numpy()
            strongest = top[row, step - 1, layer, head]
            assert not {*keys.tolist()} & {*strongest.tolist()}
            now = codes[row, step - 1]
            for kind in Kind:
                wanted, there = (now[strongest] == kind).sum(), (now == kind).sum()
                assert (now[keys] == kind).sum() == min(wanted, there - wanted)
            digits += int((codes[row, step - 1, keys] == Kind.DIGIT).sum())
    assert digits > 20


@pytest.mark.parametrize("pick", ["random", "nearest"])
def test_controls_of_a_detector_are_in_its_heads_and_never_stronger_than_its_keys(pick):
    """The strongest key that is not a sink may be preceded by sinks, which no control may take."""
    below = StrongestKeys(k=12, part="other", sink=EpsilonOverMean(0.4, unit="sum"))
    found, scores = choose(top_k=None, detector=below, pick=pick)
    for layer, row, head in places():
        assert not found[layer][row][head], "every weaker key is taken already"
    few = StrongestKeys(k=2, part="other", sink=EpsilonOverMean(0.3))
    given, _ = choose(top_k=None, detector=few)
    found, scores = choose(top_k=None, detector=few, pick=pick)
    counts = set()
    for layer, row, head in places():
        values, keys = scores[layer][row, head], given[layer][row][head]
        counts.add(len(keys))
        assert bool(keys) >= bool(found[layer][row][head])
        if keys:
            assert all(values[key] < min(values[keys]) for key in found[layer][row][head])
        assert len(found[layer][row][head]) == len(keys)
    assert counts >= {0, 1}


def chosen(scores, real=None, **given):
    """The keys that a rule takes in one layer, as positions by row and head."""
    real = torch.ones(len(scores), scores.shape[-1], dtype=torch.bool) if real is None else real
    return [[head.nonzero()[:, 0].tolist() for head in row] for row in taken({0: scores}, real, **given)[:, 0]]


ONE = torch.tensor([[[2.0, 5.0, 0.0, 5.0, 0.0, 1.0]]])
TWO = torch.tensor([[[9.0, 9.0, 1.0, 2.0]], [[1.0, 2.0, 3.0, 4.0]]])
SHORT_ROW = torch.tensor([[False, False, True, True], [True, True, True, True]])


@pytest.mark.parametrize(
    ("scores", "real", "given", "expected"),
    [
        (ONE, None, {"top_k": 1}, [[[1]]]),
        (ONE, None, {"top_k": 3}, [[[0, 1, 3]]]),
        (ONE, None, {"top_k": 1, "pick": "weakest"}, [[[2]]]),
        (ONE, None, {"top_k": 3, "pick": "weakest"}, [[[2, 4, 5]]]),
        (torch.ones(1, 1, 300), None, {"top_k": 3}, [[[0, 1, 2]]]),
        (TWO, SHORT_ROW, {"top_k": 1}, [[[3]], [[3]]]),
        (TWO, SHORT_ROW, {"top_k": 2}, [[[2, 3]], [[2, 3]]]),
        (TWO, SHORT_ROW, {"top_k": 2, "pick": "weakest"}, [[[2, 3]], [[0, 1]]]),
    ],
)
def test_the_strongest_or_weakest_keys_are_taken_the_first_of_ties_and_never_padding(scores, real, given, expected):
    assert chosen(scores, real, **given) == expected


@pytest.mark.parametrize("pick", ["strongest", "weakest", "random_any"])
def test_no_key_is_taken_from_an_all_zero_head(pick):
    scores = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    found = taken({0: scores}, torch.ones(1, 3, dtype=torch.bool), top_k=2, pick=pick)
    assert found.sum(dim=-1).tolist() == [[[0, 2]]]


IDS = torch.tensor([[3, 4, 5]])
REFUSED = [
    *(
        (lambda given=given: MaskSinks(**given), text)
        for given, text in (
            (
                {"top_k": 1, "detector": TopK(2)},
                "pass either top_k, a number of keys per head, or detector; got top_k=1",
            ),
            ({"top_k": -1}, "top_k must be an integer of at least 0 or None; got -1"),
            ({"top_k": 2.5}, "top_k must be an integer of at least 0 or None; got 2.5"),
            ({"pick": "best"}, "pick must be one of strongest, weakest, random, .*nearest; got 'best'"),
            ({"only": "maskd"}, r"'maskd' is neither. Known: prompt, masked, .* Nearest: masked"),
            ({"only": ["prompt", "newlines"]}, r"'newlines' is neither. .* Nearest: newline"),
        )
    ),
    (
        lambda: watch(shared_model(), IDS, [MaskSinks(only="newline")]),
        r"only=\['newline'\] needs the text of tokens: token",
    ),
    (
        lambda: watch(shared_model(), IDS, [MaskSinks(pick="same_kind")]),
        r"pick='same_kind' needs the text of tokens: token",
    ),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_invalid_settings_are_rejected(call, text):
    with pytest.raises(SettingError, match=text):
        call()
    assert unwatched(shared_model())
