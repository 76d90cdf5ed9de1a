"""The dynamics study on sinks whose motion is known."""

import numpy as np
import pytest
import xarray as xr
from planting import planted, with_sinks

import sinklens
from sinklens.analyses.dynamics import (
    MEANINGS,
    Dynamics,
    Life,
    lifetime_table,
    motion_of,
    newest_queries,
    shortest_life,
)
from sinklens.analyses.nulls import COMPARED, SOURCES, null_of
from sinklens.sinks import motion, survival
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]


def test_a_still_head_and_a_moving_head_have_the_planted_motion():
    """Head 0 stays on 2; head 1 goes 3, 4, 5, 6: three jumps of one position, to the right."""
    track = planted(with_sinks([[[2, 3]], [[2, 4]], [[2, 5]], [[2, 6]]]))
    data = motion_of(track)
    found = {name: float(data[name][0]) for name in MEANINGS}
    assert found["steps"] == 4
    assert found["jumps"] == 1.5
    assert found["jump_share"] == found["sink_jump_share"] == 0.5
    assert found["jump_distance"] == 1
    assert found["drift"] == 0.5
    assert found["static_share"] == 0.5
    assert found["one_step"] == pytest.approx(
        3 / 5
    )  # three of five lives last one step; a fourth is cut off by the end
    assert found["lifetime"] == pytest.approx(8 / 5)
    assert found["overlap_step"] == 0.5
    assert np.isnan(found["newest_jump_share"])


def test_lifetimes_of_all_prompts_are_pooled_and_count_censored_lives():
    """Head 0 stays on 2 to the end; head 1 stays two steps on 3, then two on 4, the last of which is cut off."""
    track = planted(with_sinks([[[2, 3]], [[2, 3]], [[2, 4]], [[2, 4]]]))
    ages = survival.life_table(track)[["ended", "at_risk"]].rename(batch="prompt").drop_vars("prompt")
    data = motion_of(track).merge(ages).merge(ages.rename(ended="null_ended", at_risk="null_at_risk") * 2)
    found = lifetime_table({"m": xr.concat([data, data], dim="prompt")}, seed=0)
    table, null = (found[found["source"] == name].set_index("measure")["estimate"] for name in SOURCES[:2])
    assert null.to_dict() == table.drop("observed").to_dict()  # the same lives, twice
    assert table["observed"] == pytest.approx((4 + 2 + 2) / 3)
    assert table["restricted_mean"] == pytest.approx(1 + 1 + 0.5 + 0.5)  # at age 2 one of two lives at risk ends
    assert table["median"] == 2


def test_ties_for_the_shortest_life_go_to_the_sink_that_stands_out_most():
    """Two lives of one step, at (step 1, pos 4) and (step 2, pos 7); the second rises higher above its surroundings."""
    score = with_sinks([[[2]], [[2]], [[2]], [[2]]], strength=8.0)
    score[0, 1, 0, 0, 4], score[0, 2, 0, 0, 7] = 5.0, 6.0
    assert shortest_life(planted(score)) == Life(0, 0, 7, 2, 1)
    score[0, [1, 3], 0, 0, 7] = 2.9  # not sinks, but nearly: 7 no longer stands out
    assert shortest_life(planted(score)) == Life(0, 0, 4, 1, 1)
    assert shortest_life(planted(with_sinks([[[2]], [[2]]]))) is None


def test_the_newest_query_is_the_row_added_by_a_step(tiny_llama):
    """Column sums minus those of the previous step equal the last row of the recorded pattern."""
    record = sinklens.sinks.Record(patterns=[(3, 2)])
    run = sinklens.generate(tiny_llama, PROMPTS, record_sinks=record, gen_length=5)
    newest = newest_queries(run.sinks)
    row = run.patterns[3, 2][:, :, -1].numpy()
    found = newest.data["score"].sel(step=3, layer=2).to_numpy()[..., : row.shape[-1]]
    np.testing.assert_allclose(np.nan_to_num(found), np.nan_to_num(row), atol=1e-4)
    assert newest.steps == 4


def test_a_moving_newest_query_is_detected_although_the_sums_are_still():
    """Position 0 has the largest sum from the first step on; each new query attends to its neighbour."""
    score = np.full((1, 4, 1, 1, 8), np.nan)
    for step in range(4):
        exists = 4 + step
        score[0, step, 0, 0, :exists] = 0.1
        score[0, step, 0, 0, 0] = 3
    for step in range(1, 4):
        score[0, step:, 0, 0, 2 + step] += 0.8
    data = motion_of(planted(score, causal=True, prompt_length=4))
    assert float(data["static_share"][0]) == 1
    assert float(data["newest_static_share"][0]) == 0
    assert float(data["newest_jump_share"][0]) == 1


def test_positions_are_labelled_by_the_final_tokens(tiny_llada):
    """Also the position decided in the last step, which the track stores as a mask."""
    study = Dynamics()
    example = study.example(tiny_llada, PROMPTS[0], {})
    run = sinklens.generate(tiny_llada, PROMPTS[0])
    assert example["final"][0].values.tolist() == run.tokens[0].tolist()


def test_an_autoregressive_run_equals_its_null_and_never_moves_with_queries_held_fixed(tiny_llama):
    measured = Dynamics(settings={"gen_length": 12}).run([tiny_llama], PROMPTS)
    data = measured.measured["tiny-llama"]
    for name in (*COMPARED, "ended", "at_risk"):
        np.testing.assert_allclose(data[f"null_{name}"], data[name], atol=1e-6)
    assert data["fixed_jump_share"].values.tolist() == [0, 0]
    assert data["fixed_static_share"].values.tolist() == [1, 1]
    table = measured.tables["null"].set_index(["measure", "source"])["estimate"]
    assert table["static_share", "measured"] == table["static_share", "null model"] > 0.5
    assert table["static_share", "measured − null model"] == 0
    assert table["jump_share", "queries held fixed"] == 0


def test_the_null_of_a_diffusion_run_goes_on_after_an_end_token_as_the_run_does(tiny_llada):
    run = sinklens.generate(tiny_llada, PROMPTS)
    ends = tiny_llada.special_tokens["end"]
    for row in range(len(PROMPTS)):
        assert any(token in ends for token in run.tokens[row, run.prompt_length : -4].tolist())
        assert (motion.jumps(null_of(run, row))["pairs"] == run.steps_run - 1).all()


def test_the_null_of_a_diffusion_run_is_that_of_its_finished_canvas(tiny_llada):
    """Compared with patterns of a single pass, for the row with padding, step by step."""
    run = sinklens.generate(tiny_llada, PROMPTS, gen_length=8, steps=8)
    row = int(run.real.sum(1).argmin())
    track = null_of(run, row)
    ids = run.tokens[row][run.real[row]]
    _, cache = tiny_llada.run_with_cache(ids[None])
    assert track.steps == 8
    for layer in range(tiny_llada.cfg.n_layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
        for step in (0, 5, 7):
            expected = np.zeros(pattern.shape[::2])
            for query in range(len(ids) - 8 + step):
                kept = pattern[:, query, : query + 1]
                expected[:, : query + 1] += kept / kept.sum(-1, keepdims=True)
            found = track.data["score"].to_numpy()[0, step, layer]
            there = len(ids) - 8 + step
            np.testing.assert_allclose(found[:, :there], expected[:, :there], atol=1e-4)
    assert (motion.jumps(track)["pairs"] <= 7).all()
