"""Motion within blocks, on sums with planted strongest keys and on real patterns summed by hand."""

import numpy as np
import pytest
import torch
import xarray as xr
from planting import planted

import sinklens
from sinklens.analyses.block_motion import BLOCK_MOTION, BlockSums, block_motion, block_numbers, current_blocks
from sinklens.families import settings_for
from sinklens.sinks import Record
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]


def planted_blocks(inner, before, now, causal=False):
    """A track of one layer and head, six positions in three blocks of two; the first is the prompt.

    Args:
        inner, before: position of the strongest key of the queries of the current block, and of those before, by step.
        now: the current block of each step, whose second position is undecided.
    """
    score = np.ones((1, len(now), 1, 1, 6))
    masked = np.zeros((1, len(now), 6), dtype=bool)
    sums = np.zeros((1, len(now), 1, 1, 3, 6), dtype=np.float32)
    for step, (one, other, block) in enumerate(zip(inner, before, now, strict=True)):
        masked[0, step, 2 * block + 1 :] = True
        sums[0, step, 0, 0, block, one] = 5
        sums[0, step, 0, 0, :block, other] += 2
        sums[0, step, 0, 0, block + 1 :, 0] = 9  # later queries do not count
    track = planted(score, masked=masked, prompt_length=2, causal=causal)
    axes = ("batch", "step", "layer", "head", "block", "pos")
    return type(track)(track.data.assign(block_sum=(axes, sums)))


NUMBERS = np.array([[0, 0, 1, 1, 2, 2]])


def test_a_jump_counts_only_between_steps_of_one_block():
    """Block 1: inside, inside elsewhere, prompt; block 2: prompt, prompt. The key before the block never moves."""
    track = planted_blocks([2, 3, 0, 1, 1], [0, 0, 0, 1, 1], [1, 1, 1, 2, 2])
    found = {name: float(value[0]) for name, value in block_motion(track, NUMBERS).items()}
    assert found["block_jump_share"] == pytest.approx(2 / 3)  # the change of block is not a pair
    assert found["block_static_share"] == 0.5  # block 2
    assert found["before_jump_share"] == 0
    assert found["before_static_share"] == 1
    assert found["inside_share"] == pytest.approx(2 / 5)
    assert found["jump_share_inside"] == 1
    assert found["jump_share_outside"] == 0
    assert list(found) == list(BLOCK_MOTION)


def test_a_canvas_without_queries_before_it_has_no_motion_before_it():
    track = planted_blocks([2, 3], [0, 0], [1, 1])
    score = xr.zeros_like(track.data["score"])
    score[0, 0, 0, 0, 4], score[0, 1, 0, 0, 1] = 3, 3
    found = block_motion(
        type(track)(track.data.drop_vars("block_sum").assign(score=score)), np.array([[0, 0, 1, 1, 1, 1]])
    )
    assert found["block_jump_share"] == 1
    assert found["inside_share"] == 0.5
    assert np.isnan(found["before_jump_share"][0])


def test_the_current_block_stays_where_nothing_is_undecided():
    track = planted_blocks([2, 2, 2], [0, 0, 0], [1, 1, 2])
    track.data["masked"][0, 1] = False
    assert current_blocks(track, NUMBERS)[0].tolist() == [1, 1, 2]


@pytest.mark.parametrize("kind", ["tiny-sdar", "tiny_llada"])
def test_block_sums_are_sums_of_pattern_rows(kind, toy, request):
    model = request.getfixturevalue(kind) if kind == "tiny_llada" else toy(kind)
    given = {"gen_length": 8} | ({"use_cache": False} if kind == "tiny-sdar" else {"block_length": 4})
    numbers = block_numbers(model, model.encode(PROMPTS)[1], settings_for(model, given))
    run = sinklens.generate(
        model, PROMPTS, record_sinks=Record([BlockSums(numbers)], patterns=[(3, 1)]), progress=False, **given
    )
    pattern, sums = run.patterns[3, 1], run.sinks["block_sum"][:, 3, 1].to_numpy()
    numbers = numbers[:, : pattern.shape[2]]
    for row in range(2):
        for block in range(int(numbers.max()) + 1):
            queries = numbers[row] == block
            np.testing.assert_allclose(sums[row, :, block], pattern[row][:, queries].sum(1), atol=1e-5)
    assert int(numbers.max()) > 1


def test_earlier_queries_of_a_block_causal_model_never_move_and_the_block_ends_where_the_next_begins(toy):
    model = toy("tiny-sdar")
    given = {"gen_length": 16, "use_cache": False}
    numbers = block_numbers(model, model.encode(PROMPTS)[1], settings_for(model, given))
    run = sinklens.generate(model, PROMPTS, record_sinks=Record([BlockSums(numbers)]), progress=False, **given)
    found = block_motion(run.sinks, numbers.numpy()[:, : run.sinks.data.sizes["pos"]])
    assert found["before_jump_share"].tolist() == [0, 0]
    assert found["before_static_share"].tolist() == [1, 1]
    assert torch.equal(numbers.diff(dim=1).clamp(0), (numbers.diff(dim=1) > 0).long())
