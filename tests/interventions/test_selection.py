"""Selection of keys: counts, ties, controls that depend only on seed and prompt, and kinds of tokens."""

import numpy as np
import pytest
import torch
from building import shared_model
from watching import unwatched, watch

from sinklens.errors import SettingError
from sinklens.interventions import MaskSinks, Where
from sinklens.interventions.scores import ScoredStep
from sinklens.runs.intervention import RunContext
from sinklens.sinks import TopK
from sinklens.sinks.kinds import Kind, kinds
from sinklens.tasks import held_out


def chosen(scores, real=None, **given):
    """The keys that a rule takes in one layer, as positions by row and head."""
    real = torch.ones(len(scores), scores.shape[-1], dtype=torch.bool) if real is None else real
    keys = Where(**given).taken(ScoredStep({0: scores}), real, 1)[:, 0]
    return [[head.nonzero()[:, 0].tolist() for head in row] for row in keys]


ONE = torch.tensor([[[2.0, 5.0, 0.0, 5.0, 0.0, 1.0]]])
TWO = torch.tensor([[[9.0, 9.0, 1.0, 2.0]], [[1.0, 2.0, 3.0, 4.0]]])
PADDED = torch.tensor([[False, False, True, True], [True, True, True, True]])


@pytest.mark.parametrize(
    ("scores", "real", "given", "expected"),
    [
        (ONE, None, {"top_k": 1}, [[[1]]]),
        (ONE, None, {"top_k": 3}, [[[0, 1, 3]]]),
        (ONE, None, {"top_k": 1, "pick": "weakest"}, [[[2]]]),
        (ONE, None, {"top_k": 3, "pick": "weakest"}, [[[2, 4, 5]]]),
        (torch.ones(1, 1, 300), None, {"top_k": 3}, [[[0, 1, 2]]]),
        (TWO, PADDED, {"top_k": 1}, [[[3]], [[3]]]),
        (TWO, PADDED, {"top_k": 3}, [[[2, 3]], [[1, 2, 3]]]),
        (TWO, PADDED, {"top_k": 3, "pick": "weakest"}, [[[2, 3]], [[0, 1, 2]]]),
    ],
)
def test_the_strongest_or_weakest_keys_are_taken_the_first_of_ties_and_never_padding(scores, real, given, expected):
    assert chosen(scores, real, **given) == expected


@pytest.mark.parametrize("pick", ["strongest", "weakest", "random_any"])
def test_no_key_is_taken_from_an_all_zero_head(pick):
    scores = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    real = torch.ones(1, 3, dtype=torch.bool)
    run = RunContext(shared_model().tree, real, 3, 3, 60, 0, (5,), lambda ids: {}, {})
    found = Where(top_k=2, pick=pick).taken(ScoredStep({0: scores}), real, 1, run)
    assert found.sum(dim=-1).tolist() == [[[0, 2]]]


def test_scopes_average_over_heads_and_layers():
    layers = {0: torch.tensor([[[0.0, 3.0, 4.0], [5.0, 3.0, 0.0]]]), 2: torch.tensor([[[0.0, 0.0, 9.0]] * 2])}
    real = torch.ones(1, 3, dtype=torch.bool)
    found = {
        scope: Where(top_k=1, scope=scope).taken(ScoredStep(layers), real, 1)[0].int().argmax(-1).tolist()
        for scope in ("head", "layer", "model")
    }
    assert found == {"head": [[2, 0], [2, 2]], "layer": [[1, 1], [2, 2]], "model": [[2, 2], [2, 2]]}


def test_token_kinds_match_those_of_the_track(tiny_llada):
    """Only newlines and digits are masked, according to the token text of the previous step."""
    prompts = [problem.prompt for problem in held_out(2)]
    masking = MaskSinks(top_k=4, only=["newline", "digit"])
    watched = watch(tiny_llada, prompts, [masking], record_sinks=True, gen_length=8, steps=4)
    found = kinds(watched.run.sinks).to_numpy()
    wanted = np.isin(found, [Kind.NEWLINE, Kind.DIGIT])
    for step in range(1, 4):
        ignored = (watched.stacked("hook_pattern", step)[:, :, :, -1] == 0) & watched.run.real[None, :, None]
        assert not (ignored & ~torch.from_numpy(wanted[:, step - 1])[None, :, None]).any()
        counts = np.minimum(4, wanted[:, step - 1].sum(axis=-1))
        assert torch.equal(ignored.sum(-1), torch.from_numpy(counts)[None, :, None].expand(4, 2, 6))
        assert (counts > 1).all()


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
            ({"scope": "row"}, "scope must be one of head, layer, model; got 'row'"),
            ({"only": "maskd"}, r"'maskd' is neither. Known: prompt, masked, .* Nearest: masked"),
            ({"only": ["prompt", "newlines"]}, r"'newlines' is neither. .* Nearest: newline"),
        )
    ),
    (
        lambda: chosen(torch.ones(1, 1, 3), top_k=1, pick="random_any"),
        "detectors, only=, random keys and other controls need a run",
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
