"""Routing of sinks, on planted, known routes and on the routes of a real run."""

import numpy as np
import pytest
from planting import planted

import sinklens
from sinklens.analyses.routing import ROWS as TABLE_COLUMNS
from sinklens.analyses.routing import Routes, routing, routing_rows, top_differences, without_experts
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
WORDS = {5: " Tom", 6: " 7"}
ROWS, STEPS, LENGTH = 12, 3, 20


def planted_routes(to_expert, seed=0):
    """A track of words and digits with random sinks, preferably on digits, and routes chosen by `to_expert`."""
    rng = np.random.default_rng(seed)
    digit = rng.random((ROWS, 1, LENGTH)) < 0.5
    sink = rng.random((ROWS, STEPS, LENGTH)) < np.where(digit, 0.6, 0.1)
    score = np.where(sink, 9.0, 0.5)[:, :, None, None]
    track = planted(score, token_id=np.where(digit, 6, 5).repeat(STEPS, axis=1), words=WORDS)
    assert (track.detect().to_numpy()[:, :, 0, 0] == sink).mean() > 0.95
    return track, to_expert(rng, track.detect().to_numpy().any(axis=(2, 3)), digit)[:, :, None, :, None]


def table(track, chosen):
    rows = routing_rows("m", routing(track, chosen, 4), seed=0)
    return {row["measure"]: row for row in rows}


def test_an_expert_for_sinks_is_found():
    def to_expert(rng, sink, digit):
        return np.where(sink, 3, rng.integers(0, 3, sink.shape))

    found = table(*planted_routes(to_expert))
    assert found["distance"]["estimate"] == pytest.approx(1)
    assert found["chance"]["estimate"] < 0.4
    assert found["distance"]["p"] < 0.01
    assert found["top_difference"]["estimate"] == pytest.approx(1)
    assert found["top_difference"]["p"] < 0.01
    assert found["matched_share"]["estimate"] > 0.9


def test_experts_for_token_kinds_are_not_taken_for_experts_for_sinks():
    """Digits are sinks more often and go to expert 0: without matching, sinks would seem to prefer it."""

    def to_expert(rng, sink, digit):
        return np.where(digit, 0, rng.integers(1, 4, sink.shape))

    track, chosen = planted_routes(to_expert)
    sinks = track.detect().to_numpy()[:, :, 0, 0]
    crude = (chosen[:, :, 0, :, 0][sinks] == 0).mean() - (chosen[:, :, 0, :, 0][~sinks] == 0).mean()
    found = table(track, chosen)
    assert crude > 0.4
    assert found["distance"]["estimate"] < 0.15
    assert found["distance"]["p"] > 0.05
    assert found["top_difference"]["low"] < 0 < found["top_difference"]["high"]


def test_strata_are_weighted_as_written_out():
    """One step: two digit sinks beside one digit, one word sink beside two words: weights 2/3 each."""
    sinks = [1, 1, 0, 1, 0, 0]
    ids = [6, 6, 6, 5, 5, 5]
    experts = np.array([[0, 1], [0, 0], [1, 1], [2, 3], [2, 2], [3, 3]])
    track = planted(np.where(sinks, 9.0, 0.5)[None, None, None, None], token_id=[[ids]], words=WORDS, prompt_length=6)
    data = routing(track, experts[None, None, None], 4)
    one = 2 / 3 * np.array([3 / 4, 1 / 4, 0, 0]) + 2 / 3 * np.array([0, 0, 1 / 2, 1 / 2])
    other = 2 / 3 * np.array([0, 1, 0, 0]) + 2 / 3 * np.array([0, 0, 1 / 2, 1 / 2])
    data = data.sel(match="kind")
    np.testing.assert_allclose(data["routed_sinks"][0, 0], one)
    np.testing.assert_allclose(data["routed_others"][0, 0], other)
    assert float(data["routed_weight"][0, 0]) == pytest.approx(4 / 3)
    assert float(data["routed_share"][0, 0]) == 1


def test_experts_for_tokens_are_not_taken_for_experts_for_sinks():
    """Of two words, one is a sink more often and has an expert: within the kind, sinks seem to prefer it."""
    rng = np.random.default_rng(3)
    ids = rng.choice([5, 7], (ROWS, 1, LENGTH)).repeat(STEPS, axis=1)
    sink = rng.random(ids.shape) < np.where(ids == 7, 0.5, 0.1)
    track = planted(np.where(sink, 9.0, 0.5)[:, :, None, None], token_id=ids, words={5: " Tom", 7: " Mia"})
    chosen = np.where(ids == 7, 0, rng.integers(1, 4, ids.shape))[:, :, None, :, None]
    rows = routing_rows("m", routing(track, chosen, 4), seed=0)
    found = {(row["matched"], row["measure"]): row for row in rows}
    assert found["step, state, kind", "top_difference"]["low"] > 0.3
    assert found["step, state, kind", "distance"]["p"] < 0.01
    assert (
        found["step, state, token", "top_difference"]["low"]
        <= 0
        <= found["step, state, token", "top_difference"]["high"]
    )
    assert found["step, state, token", "distance"]["p"] > 0.05
    assert found["step, state, token", "matched_share"]["estimate"] > 0.9


def test_groups_of_prompts_are_counted_as_one(monkeypatch):
    track, chosen = planted_routes(lambda rng, sink, digit: np.where(sink, 3, rng.integers(0, 3, sink.shape)))
    data = routing(track, chosen, 4).assign_coords(prompt_group=("prompt", list("aaabbbcccddd")))
    rows = {(row["matched"], row["measure"]): row for row in routing_rows("m", data, seed=0)}
    alone = table(track, chosen)
    assert rows["step, state, kind", "distance"]["estimate"] == pytest.approx(alone["distance"]["estimate"])
    assert rows["step, state, kind", "distance"]["p"] > alone["distance"]["p"]  # four groups have few sign changes


def test_a_prompt_has_no_part_in_the_choice_of_its_expert():
    """Each of two prompts prefers another expert: judged by the other's, both lose."""
    found = top_differences(np.array([[1.0, -1.0], [-1.0, 1.0]]), np.array([1.0, 1.0]))
    assert found.tolist() == [-1, -1]


def test_a_model_without_experts_has_no_rows():
    assert routing_rows("m", without_experts(3, 2), seed=0) == []


def test_the_rows_have_the_columns_of_a_table_without_rows():
    rows = routing_rows("m", routing(*planted_routes(lambda rng, sink, digit: sink.astype(int)), 4), seed=0)
    assert all(tuple(row) == TABLE_COLUMNS for row in rows)


@pytest.mark.parametrize("kind", ["tiny-llada-moe", "tiny-canvas"])
def test_routes_are_those_of_the_run_at_their_places(kind, toy):
    model, seen = toy(kind), {}
    routes = Routes(model)
    own = ("blocks.1.mlp.hook_expert_indices", lambda value, hook: seen.update({hook.step: value.clone()}))
    settings = {"steps": 3} if kind == "tiny-llada-moe" else {"max_denoising_steps": 3}
    run = sinklens.generate(model, PROMPTS, gen_length=8, hooks=[*routes.hooks, own], progress=False, **settings)
    active = np.ones((2, run.steps_run), dtype=bool)
    active[1, 0] = False
    chosen = routes.chosen(active, run.canvas.shape[2])
    first = 0 if kind == "tiny-llada-moe" else run.prompt_length
    np.testing.assert_array_equal(chosen[0, 1, 1, first:], seen[1][0])
    np.testing.assert_array_equal(chosen[1, 0, 1, first:], seen[1][1])  # the first active step of row 1
    assert (chosen[:, :, :, :first] == -1).all()
