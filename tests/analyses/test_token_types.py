"""The token study on tokens whose share of the sinks is known."""

from collections import defaultdict

import numpy as np
import pandas
import pytest
from planting import planted

from sinklens.analyses.token_types import TokenTypes, matched_rows, sinks_by_token
from sinklens.sinks.kinds import Kind, kinds, states

WORDS = {1: "<mask>", 2: "<s>", 0: "<e>", 5: " a", 6: "\n", 7: " $x$_y"}


def two_rows():
    """Row 0: a sink on ⏎ at both steps, one on a mask at step 0. Row 1: padding, and one sink on a word."""
    ids = np.array([[[2, 5, 6, 1, 1], [2, 5, 6, 7, 1]], [[0, 0, 2, 5, 1], [0, 0, 2, 5, 1]]])
    score = np.full((2, 2, 1, 2, 5), 0.25)
    score[0, :, 0, 0, 2] = 6
    score[0, 0, 0, 1, 3] = 6
    score[1, 0, 0, 0, 3] = 6
    real = [[True] * 5, [False, False, True, True, True]]
    return planted(score, real=real, masked=ids == 1, token_id=ids, prompt_length=3, words=WORDS)


def test_sinks_and_positions_are_counted_by_kind_state_and_token():
    data = sinks_by_token(two_rows())
    sinks = {kind: data["kind_sinks"].sel(kind=kind).values.tolist() for kind in ("newline", "mask", "word")}
    assert sinks == {"newline": [2, 0], "mask": [1, 0], "word": [0, 1]}
    assert data["kind_positions"].sel(kind="mask").values.tolist() == [6, 4]  # two heads each
    states = {
        state: data["state_sinks"].sel(state=state).values.tolist() for state in ("prompt", "masked", "committed")
    }
    assert states == {"prompt": [2, 0], "masked": [1, 0], "committed": [0, 1]}
    assert data["token_sinks"].sel(token="6 newline ⏎").values.tolist() == [2, 0]
    np.testing.assert_allclose(data["token_positions"].sel(token="5 word ␣a"), [4, 4])
    np.testing.assert_allclose(data["token_positions"].sum("token"), [20, 12])
    # step 0: 2 sinks, 2 of 5 positions masked; step 1: 1 sink, 1 of 5
    assert float(data["kind_expected"].sel(kind="mask")[0]) == pytest.approx(2 * 0.4 + 1 * 0.2)


def test_shares_are_pooled_over_prompts_and_enrichment_is_against_positions():
    tables = TokenTypes().tables({"planted": sinks_by_token(two_rows())})
    tokens = tables["tokens"].set_index("id")
    assert tokens["count"].to_dict() == {6: 2, 1: 1, 5: 1}
    row = tokens.loc[6, ["estimate", "position_frequency", "enrichment"]].astype(float)
    assert row.tolist() == pytest.approx([0.5, 2 / 16, 4])
    kinds = tables["kinds"].set_index(["measure", "kind"])["estimate"]
    shares = [kinds[name, "mask"] for name in ("sink_share", "position_share", "enrichment")]
    assert shares == pytest.approx([0.25, 5 / 16, 0.8])
    assert np.isnan(kinds["matched", "digit"])  # no digits
    assert tables["states"].set_index(["measure", "state"])["estimate"]["sink_share"].sum() == pytest.approx(1)
    assert tables["kinds"].query("measure == 'absorption'")["estimate"].sum() == pytest.approx(100)


def many_rows(rows=150, seed=0):
    """Random tokens; masks are sinks twice as often as words at the same place, and the prompt has most sinks."""
    noise = np.random.default_rng(seed)
    ids = noise.choice([1, 5, 6], (rows, 4, 12))
    ids[:, :, :4] = 5
    chance = np.where(np.arange(12) < 4, 0.6, np.where(ids == 1, 0.2, 0.1))
    score = np.where(noise.random((rows, 4, 12)) < chance, 6, 0.1)[:, :, None, None]
    real = np.ones((rows, 12), dtype=bool)
    real[0, :2] = False
    return planted(score, real=real, masked=ids == 1, token_id=ids, prompt_length=4, words=WORDS)


AXES = {"nothing": "", "step": "t", "step, position": "tp", "step, state, position": "tsp"}


@pytest.mark.parametrize("matched", AXES)
def test_the_matched_ratio_is_mantel_and_haenszel_s_sum_over_strata(matched):
    """On fewer rows than decide anything, so that some strata lack a kind."""
    track = many_rows(12)
    rows = pandas.DataFrame(matched_rows("planted", sinks_by_token(track), 0)).set_index(["set", "matched"])
    codes, state = kinds(track).to_numpy(), states(track).to_numpy()
    sinks = track.detect().sum(("layer", "head")).to_numpy()
    for kind in (Kind.WORD, Kind.NEWLINE, Kind.MASK):
        tables = defaultdict(lambda: np.zeros((2, 2)))
        for row, step, pos in zip(*np.nonzero(codes >= 0), strict=True):
            label = {"t": step, "s": state[row, step, pos], "p": pos}
            table = tables[tuple(label[axis] for axis in AXES[matched])]
            table[int(codes[row, step, pos] != kind)] += sinks[row, step, pos], 1
        above = sum(t[0, 0] * t[1, 1] / t[:, 1].sum() for t in tables.values())
        below = sum(t[1, 0] * t[0, 1] / t[:, 1].sum() for t in tables.values())
        shared = sum(t[0, 0] for t in tables.values() if t[0, 1] and t[1, 1])
        found = rows.loc[(kind.name.lower(), matched)]
        assert found.estimate == pytest.approx(above / below if below else np.nan, nan_ok=True)
        assert found.matched_share == pytest.approx(shared / sum(t[0, 0] for t in tables.values()))


def test_a_kind_that_seems_avoided_over_all_places_is_preferred_at_the_same_ones():
    rows = pandas.DataFrame(matched_rows("planted", sinks_by_token(many_rows()), 0)).set_index(["set", "matched"])
    crude, matched = (rows.loc[("mask", name)] for name in ("nothing", "step, position"))
    assert crude.high < 1 < matched.low
