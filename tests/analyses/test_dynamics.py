"""The dynamics study on sinks whose motion is known."""

import numpy as np
import pytest
from asked import TWO as PROMPTS
from planting import planted, with_sinks

import sinklens
from sinklens.analyses.dynamics import (
    MEANINGS,
    Dynamics,
    motion_of,
    newest_queries,
)
from sinklens.analyses.nulls import COMPARED, causal_null, null_of


def test_a_still_head_and_a_moving_head_have_the_planted_motion():
    """Head 0 stays on 2; head 1 goes 3, 4, 5, 6: three jumps of one position, to the right."""
    data = motion_of(planted(with_sinks([[[2, 3]], [[2, 4]], [[2, 5]], [[2, 6]]])))
    found = {name: float(data[name][0]) for name in MEANINGS}
    planned = {
        "steps": 4, "jumps": 1.5, "jump_share": 0.5, "sink_jump_share": 0.5, "jump_distance": 1, "drift": 0.5,
        "static_share": 0.5, "lifetime": 8 / 5, "overlap_step": 0.5, "newest_jump_share": np.nan,
        "one_step": 3 / 5,  # three of five lives last one step; a fourth is cut off by the end
    }  # fmt: skip
    assert {name: found[name] for name in planned} == pytest.approx(planned, nan_ok=True)


def test_the_newest_query_is_the_row_added_by_a_step(tiny_llama):
    """Column sums minus those of the previous step equal the last row of the recorded pattern."""
    run = sinklens.generate(tiny_llama, PROMPTS, record_sinks=sinklens.sinks.Record(patterns=[(3, 2)]), gen_length=5)
    newest = newest_queries(run.sinks)
    row = run.patterns[3, 2][:, :, -1].numpy()
    found = newest.data["score"].sel(step=3, layer=2).to_numpy()[..., : row.shape[-1]]
    np.testing.assert_allclose(np.nan_to_num(found), np.nan_to_num(row), atol=1e-4)
    assert newest.steps == 4


def test_a_moving_newest_query_is_detected_although_the_sums_are_still():
    """Position 0 has the largest sum from the first step on; each new query attends to its neighbour."""
    score = np.full((1, 4, 1, 1, 8), np.nan)
    for step in range(4):
        score[0, step, 0, 0, : 4 + step] = 0.1
        score[0, step, 0, 0, 0] = 3
    for step in range(1, 4):
        score[0, step:, 0, 0, 2 + step] += 0.8
    data = motion_of(planted(score, causal=True, prompt_length=4))
    assert [float(data[f"{name}_share"][0]) for name in ("static", "newest_static", "newest_jump")] == [1, 0, 1]


def test_an_autoregressive_run_equals_its_null_and_never_moves_with_queries_held_fixed(tiny_llama):
    measured = Dynamics(settings={"gen_length": 12}).run([tiny_llama], PROMPTS)
    data = measured.measured["tiny-llama"]
    for name in COMPARED:
        np.testing.assert_allclose(data[f"null_{name}"], data[name], atol=1e-6)
    assert [data[f"fixed_{name}_share"].values.tolist() for name in ("jump", "static")] == [[0, 0], [1, 1]]
    table = measured.tables["null"].set_index(["measure", "source"])["estimate"]
    assert table["static_share", "measured"] == table["static_share", "null model"] > 0.5
    assert (table["static_share", "measured − null model"], table["jump_share", "queries held fixed"]) == (0, 0)


def test_the_null_of_a_diffusion_run_is_that_of_its_finished_canvas(tiny_llada):
    """Compared with patterns of a single pass, for the row with padding; the prompt is all that is read at step 0."""
    run = sinklens.generate(tiny_llada, PROMPTS, gen_length=8, steps=8)
    row = int(run.real.sum(1).argmin())
    ids = run.tokens[row][run.real[row]]
    _, cache = tiny_llada.run_with_cache(ids[None])
    patterns = np.stack([cache["pattern", layer][0].numpy() for layer in range(tiny_llada.cfg.n_layers)])
    expected = causal_null(patterns, ids.numpy(), len(ids) - 8, run.sinks.data.attrs)
    found = null_of(run, row)
    assert found.steps == 8
    np.testing.assert_allclose(found.data["score"], expected.data["score"], atol=1e-4)
