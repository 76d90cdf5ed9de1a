"""The events study on planted orders and jumps, with and without a confounding position."""

import numpy as np
import pandas
import pytest
from asked import TWO as PROMPTS
from planting import planted
from scipy.stats import spearmanr

import sinklens
from sinklens.analyses.events import events_of, landing_rows, landings, within_rows
from sinklens.utils.estimates import bootstrap

PROMPT, ANSWER = 3, 16


def orders(rows, disorder, seed):
    """The step that decides each answer position [row, pos]: left to right, out of order by about `disorder`."""
    noise = np.random.default_rng(seed)
    return np.argsort(np.argsort(np.arange(ANSWER) + disorder * noise.normal(size=(rows, ANSWER)), axis=1), axis=1)


def track_of(order, score):
    """A run that decides one answer position per step; `score` [row, step, head, answer position]."""
    steps = np.arange(ANSWER)[:, None]
    decided = np.pad(order, ((0, 0), (PROMPT, 0)), constant_values=-1)[:, None]
    score = np.pad(score, ((0, 0), (0, 0), (0, 0), (PROMPT, 0)), constant_values=0.1)[:, :, None]
    return planted(score, masked=decided >= steps, committed=decided == steps, prompt_length=PROMPT)


def correlations(order, score):
    data = events_of(track_of(order, score))
    return float(data["correlation"].mean()), bootstrap(data["partial"].to_numpy()), within_rows("planted", data, 0)[0]


def test_scores_that_know_the_order_predict_it_beyond_the_position():
    order, noise = orders(30, 5, 0), np.random.default_rng(1)
    score = np.exp(-0.3 * order + 0.2 * noise.normal(size=order.shape))[:, None, None].repeat(ANSWER, 1)
    crude, partial, within = correlations(order, score)
    assert crude < -0.9
    assert partial.high < -0.8
    assert within["high"] < -0.8


def test_scores_that_know_only_the_position_do_not_predict_the_order_once_it_is_held_fixed():
    order, noise = orders(60, 5, 2), np.random.default_rng(3)
    score = np.exp(-0.3 * (np.arange(ANSWER) + 2 * noise.normal(size=order.shape)))[:, None, None].repeat(ANSWER, 1)
    crude, partial, within = correlations(order, score)
    assert crude < -0.4
    assert abs(partial.value) < 0.1
    assert within["low"] < 0 < within["high"]


def test_the_correlation_is_scipy_s_mean_over_the_steps():
    order, noise = orders(1, 4, 4), np.random.default_rng(5)
    score = noise.exponential(size=(1, ANSWER, 2, ANSWER))
    data = events_of(track_of(order, score))
    expected = []
    for step in range(ANSWER):
        open_ = order[0] >= step
        if open_.sum() >= 4:
            expected.append(spearmanr(score[0, step].mean(0)[open_], order[0][open_]).statistic)
    assert float(data["correlation"][0]) == pytest.approx(np.mean(expected), abs=1e-6)


def jumping(order, target, heads=4):
    """Scores whose strongest key at each step is `target(row, step, head)`."""
    score = np.full((len(order), ANSWER, heads, ANSWER), 0.1)
    for row, step, head in np.ndindex(score.shape[:3]):
        score[row, step, head, target(row, step, head)] = 6
    return score


def jumps_onto_decided():
    """An order, and scores whose heads move to half of the just decided tokens, and otherwise anywhere."""
    order, noise = orders(40, 6, 6), np.random.default_rng(7)

    def target(row, step, head):
        just = np.flatnonzero(order[row] == step - 1)
        return just[0] if len(just) and noise.random() < 0.5 else noise.integers(ANSWER)

    return order, jumping(order, target)


def with_written(data, landed):
    """Events data in which a token decided one step ago is also written over an earlier one at place t − 2."""
    at_risk = np.full(data["landed_at"].shape, np.nan)
    at_risk[:, np.arange(2, ANSWER), np.arange(ANSWER - 2)] = data["at_risk_at"].max()
    values = {"written_at_risk_at": at_risk, "written_landed_at": at_risk * landed}
    return data.assign({name: (data["landed_at"].dims, value) for name, value in values.items()})


def rows_of(order, score, written=0.0):
    data = with_written(events_of(track_of(order, score)), written)
    return pandas.DataFrame(landing_rows("planted", data, 0)).set_index(["measure", "others", "matched"])


def test_jumps_onto_tokens_just_decided_are_found_at_matched_places():
    table = rows_of(*jumps_onto_decided())
    assert table.loc[("rate_just", "all", "nothing")].estimate == pytest.approx(0.53, abs=0.03)
    assert table.loc[("rate_others", "all", "nothing")].estimate == pytest.approx(0.032, abs=0.01)
    for others in ("all", "decided earlier"):
        assert table.loc[("ratio", others, "step, position")].low > 5


@pytest.mark.parametrize(("written", "explained"), [(0.53, True), (0.05, False)])
def test_tokens_written_over_separate_decisions_from_changes(written, explained):
    """Heads move to half of the just decided tokens, and to a share of those that are written over earlier ones."""
    table = rows_of(*jumps_onto_decided(), written)
    assert table.loc[("rate_others", "written over", "nothing")].estimate == pytest.approx(written)
    for matched in ("nothing", "step, position"):
        found = table.loc[("ratio", "written over", matched)]
        assert (found.low < 1.1 and found.high > 0.9) if explained else found.low > 5
    assert table.loc[("ratio", "written over", "step, position")].matched_share > 0.05


def test_jumps_along_the_frontier_are_not_taken_for_jumps_onto_decided_tokens():
    """Heads jump to position t − 1, which most rows have just decided, whether or not this row has."""
    order = orders(80, 1.2, 8)
    noise = np.random.default_rng(9)
    score = jumping(order, lambda row, step, head: np.clip(step - 1 + noise.integers(-1, 2), 0, ANSWER - 1))
    table = rows_of(order, score)
    crude, matched = (table.loc[("ratio", "all", name)] for name in ("nothing", "step, position"))
    assert crude.low > 3
    assert matched.low < 1 < matched.high
    assert matched.matched_share > 0.5


def test_an_order_that_templates_explain_is_none_within_them():
    """In each template, other places are decided early and are strong: at the same place, the two seem related."""
    noise, templates = np.random.default_rng(2), 4
    group = np.arange(80) % templates
    first = np.stack([noise.permutation(ANSWER) for _ in range(templates)])[group]
    order = np.argsort(np.argsort(first + 2 * noise.normal(size=first.shape), axis=1), axis=1)
    score = np.exp(-0.3 * (first + 2 * noise.normal(size=first.shape)))[:, None, None].repeat(ANSWER, 1)
    data = events_of(track_of(order, score)).assign_coords(prompt_group=("prompt", group.astype(str)))
    rows = {row["measure"]: row for row in within_rows("planted", data, 0)}
    assert rows["within"]["estimate"] < -0.5
    assert rows["within_group"]["low"] < 0 < rows["within_group"]["high"]
    assert rows["within_group"]["matched_share"] > 0.5
    assert rows["within_group"]["groups"] == templates
    assert np.isnan(rows["within"]["p"])


def test_landings_equal_a_loop_over_heads():
    run = sinklens.generate("tiny-llada", PROMPTS, gen_length=6, steps=6)
    landed, at_risk = landings(run.sinks)
    strongest = run.sinks.top(1).to_numpy()[..., 0]
    for row, step, pos in np.ndindex(landed.shape):
        pairs = [
            (strongest[row, step - 1, layer, head], strongest[row, step, layer, head])
            for layer, head in np.ndindex(strongest.shape[2:])
            if step > 0
        ]
        assert landed[row, step, pos] == sum(before != pos and now == pos for before, now in pairs)
        assert at_risk[row, step, pos] == sum(before != pos for before, _ in pairs)
