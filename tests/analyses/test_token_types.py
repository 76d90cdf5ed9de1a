"""The token study on tokens whose share of the sinks is known."""

import numpy as np
import pandas
import pytest
from planting import planted

from sinklens.analyses.matching import matched_enrichment
from sinklens.analyses.token_types import TokenTypes, matched_rows, sinks_by_token

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
    study = TokenTypes()
    tables = study.tables({"planted": sinks_by_token(two_rows())})
    tokens = tables["tokens"].set_index("id")
    assert tokens["count"].to_dict() == {6: 2, 1: 1, 5: 1}
    row = tokens.loc[6, ["estimate", "position_frequency", "enrichment"]].astype(float)
    assert row.tolist() == pytest.approx([0.5, 2 / 16, 4])
    kinds = tables["kinds"].set_index(["measure", "kind"])["estimate"]
    shares = [kinds[name, "mask"] for name in ("sink_share", "position_share", "enrichment")]
    assert shares == pytest.approx([0.25, 5 / 16, 0.8])
    assert np.isnan(kinds["matched", "digit"])  # no digits
    states = tables["states"].set_index(["measure", "state"])["estimate"]
    assert states["sink_share"].sum() == pytest.approx(1)
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


def test_the_matched_table_equals_matched_enrichment_and_reverses_the_crude_verdict():
    track = many_rows()
    rows = pandas.DataFrame(matched_rows("planted", sinks_by_token(track), 0)).set_index(["by", "set", "matched"])
    crude, matched = (rows.loc[("kind", "mask", name)] for name in ("nothing", "step, position"))
    assert crude.high < 1 < matched.low
    for name, axes in (("nothing", []), ("step", ["step"]), ("step, position", ["step", "position"])):
        for by, label in (("kind", "mask"), ("kind", "newline"), ("state", "committed")):
            expected = matched_enrichment(track, by=by, matched=axes).sel({by: label})
            row = rows.loc[(by, label, name)]
            assert row.estimate == pytest.approx(float(expected["ratio"]))
            assert row.matched_share == pytest.approx(float(expected["matched_sinks"] / expected["sinks"]))
    in_state = matched_enrichment(track, matched=["step", "state", "position"]).sel(kind="newline")
    assert rows.loc[("kind", "newline", "step, state, position")].estimate == pytest.approx(float(in_state["ratio"]))
    assert np.isnan(rows.loc[("kind", "mask", "step, state, position")].estimate)  # every masked place is a mask
