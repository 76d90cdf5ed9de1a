"""The block study: which block lengths are possible, and that each is used for decoding."""

import numpy as np
import pytest

import sinklens
from sinklens.analyses.blocks import MOTION, BlockLengths, lengths
from sinklens.interventions import MaskSinks
from sinklens.sinks.motion import motion_table
from sinklens.tasks.word_problems import held_out

PROMPT = held_out(2)[1].prompt


def test_block_lengths_divide_the_answer_and_its_steps(tiny_llada, tiny_llama):
    assert list(lengths(tiny_llada, {})) == [1, 2, 3, 4, 6, 8, 12, 24]
    some = lengths(tiny_llada, {"gen_length": 12, "steps": 4, "block_length": 3, "temperature": 0.5})
    assert list(some) == [3, 6, 12]  # smaller blocks would leave some without a step
    assert some[6] == {"gen_length": 12, "steps": 4, "block_length": 6, "temperature": 0.5}
    assert lengths(tiny_llama, {"gen_length": 5}) == {1: {"gen_length": 5}}


def test_each_block_length_is_measured_in_a_separate_run(tiny_llada):
    settings = {"gen_length": 6, "steps": 6, "block_length": 6}
    data = BlockLengths(top_k=2).measure(tiny_llada, [PROMPT], settings).isel(prompt=0)
    assert data["block"].to_numpy().tolist() == [1, 2, 3, 6]
    for block in (1, 3):
        block_settings = settings | {"block_length": block}
        base = sinklens.generate(tiny_llada, [PROMPT], **block_settings)
        moving = motion_table(base.sinks)
        for name in MOTION:
            assert float(data[name].sel(block=block)) == pytest.approx(float(moving[name].iloc[0]), nan_ok=True)
        changed = sinklens.generate(tiny_llada, [PROMPT], hooks=[MaskSinks(top_k=2)], **block_settings)
        assert float(data["changed"].sel(block=block, key="strongest")) == float(changed.text != base.text)
        if block == 1:
            assert base.unmask_step[0, base.prompt_length :].tolist() == list(range(6))
    assert (data["changed"].sel(key="none") == 0).all()


def test_the_cost_is_the_share_of_right_answers_lost_by_masking(tiny_llama):
    data = BlockLengths(top_k=5).measure(tiny_llama, [PROMPT], {}).isel(prompt=0, block=0)
    assert float(data["right"].sel(key="none")) == 1
    np.testing.assert_allclose(data["cost"], 1 - data["right"])
    assert set(data["cost"].to_numpy()) == {0, 1}


def test_an_autoregressive_model_has_block_length_one(tiny_llama):
    found = BlockLengths(settings={"gen_length": 4}).run([tiny_llama], [PROMPT])
    assert set(found.tables["motion"]["block"]) == {1}
