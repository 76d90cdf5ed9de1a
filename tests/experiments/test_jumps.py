"""Jumps of a padded batch are those of single prompts. (tests/analyses compares the undone share with path patches.)"""

import pytest
import torch
from building import shared_model

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import jump_undone, sink_jumps
from sinklens.sinks import EpsilonOverMean
from sinklens.tasks.word_problems import held_out

PROMPTS = [held_out(1)[0].prompt, held_out(2)[1].prompt + " More words to pad the other."]


@pytest.fixture(scope="module")
def run(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPTS[0])


def test_padding_moves_the_columns_of_a_jump_and_not_its_undone_share(tiny_llada, run):
    both = sinklens.generate(tiny_llada, PROMPTS)
    pads = int((~both.real[0]).sum())
    one, padded = sink_jumps(run)[0], sink_jumps(both, row=0)[0]
    assert pads > 0
    assert padded[1:6] == (one.step, one.layer, one.head, one.old + pads, one.new + pads)
    assert jump_undone(both, padded) == pytest.approx(jump_undone(run, one), abs=1e-3)
    other = sink_jumps(both, row=1)[0]
    assert other.row == 1
    # the first token is the same at both steps
    assert jump_undone(both, other, "embed", "k", positions=[0]) == pytest.approx(0, abs=1e-4)


def test_padding_after_a_row_with_fewer_blocks_does_not_move_its_columns():
    model = sinklens.load("tiny-sdar")
    few, many = PROMPTS[0], "Question: Ada has 3 cups. How many cups has Ada?\nAnswer:"  # 24 and 21 tokens, blocks of 8
    alone, both = sinklens.generate(model, few), sinklens.generate(model, [few, many])
    assert not bool(both.real[0, -1])
    one, other = sink_jumps(alone)[0], sink_jumps(both)[0]
    assert other[1:] == one[1:]
    for letter in "qk":
        assert jump_undone(both, other, letter=letter) == pytest.approx(
            jump_undone(alone, one, letter=letter), abs=1e-3
        )
    assert jump_undone(alone, one, letter="k") > 0.1


@pytest.mark.parametrize(("name", "argument"), [("tiny-llada", {"cache": "dual"}), ("tiny-sdar", {"use_cache": True})])
def test_jumps_of_steps_with_different_queries_are_refused(name, argument):
    run = sinklens.generate(name, PROMPTS[0], **argument)
    with pytest.raises(SettingError, match=rf"with {next(iter(argument))}=.*, a step sums attention over the queries"):
        sink_jumps(run)


def test_a_detector_that_finds_no_sink_finds_no_jump(run):
    assert sink_jumps(run)
    assert sink_jumps(run, EpsilonOverMean(1000.0)) == []


def test_what_has_no_jumps_or_no_such_path_is_refused(run):
    causal = sinklens.generate(shared_model(causal=True), [[3, 4, 5]], gen_length=2)
    with pytest.raises(SettingError, match="sink_jumps needs a run of a diffusion model with recorded sinks"):
        sink_jumps(causal)
    with pytest.raises(SettingError, match="letter must be 'q' or 'k', the inputs of an attention pattern; got 'v'"):
        jump_undone(run, sink_jumps(run)[0], letter="v")
    with pytest.raises(SettingError, match="source must have the 48 ids of the step's canvas; got 3"):
        jump_undone(run, sink_jumps(run)[0], source=torch.tensor([3, 4, 5]))
