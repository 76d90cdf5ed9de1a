"""Green tokens get the bias, and a text drawn with it is recognized with the key alone."""

import numpy as np
import pytest
import torch
from watching import PADDED, short, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import GreenList


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
@pytest.mark.parametrize("context", ["none", "previous"])
def test_the_logits_of_green_tokens_are_raised_and_no_others(worded, architecture, causal, context):
    model, mark = worded(architecture, causal), GreenList(key=3, delta=2.5, context=context)
    base = watch(model, PADDED, points=["denoise.hook_logits"])
    seen = watch(model, PADDED, [mark], ["denoise.hook_logits"], replay=base.run)
    size = model.cfg.d_vocab
    for step in range(base.run.steps_run):
        difference = seen.values[step]["denoise.hook_logits"] - base.values[step]["denoise.hook_logits"]
        width, start = difference.shape[1], base.run.prompt_length + step if causal else 0
        for row, place in np.ndindex(len(PADDED), width):
            column = start + place
            before = -1
            if column and base.run.real[row, column - 1] and not base.run.undecided[row, step, column - 1]:
                before = int(base.run.canvas[row, step, column - 1])
            raised = torch.zeros(size, dtype=torch.bool)
            if context == "none" or before >= 0:
                raised = mark.green(size, before)
            torch.testing.assert_close(difference[row, place], raised * 2.5, atol=1e-4, rtol=0)


def test_lists_depend_on_key_and_context_and_have_their_share():
    one, other = GreenList(key=1, share=0.3), GreenList(key=2, share=0.3)
    assert int(one.green(1000).sum()) == 300
    assert not torch.equal(one.green(1000), other.green(1000))
    assert torch.equal(one.green(1000, 5), one.green(1000, 6))
    by_token = GreenList(key=1, share=0.3, context="previous")
    overlap = (by_token.green(1000, 5) & by_token.green(1000, 6)).sum() / 300
    assert 0.2 < float(overlap) < 0.4  # two independent lists share 30 %


def green_z(run, mark):
    """Kirchenbauer et al., eq. 3, over the distinct tokens of each answer."""
    green, found = mark.green(run.model.cfg.d_vocab), []
    for row, answer in zip(run.tokens.tolist(), run.answers, strict=True):
        ids = {*row[run.prompt_length : run.prompt_length + answer.tokens]}
        found.append(
            (sum(bool(green[one]) for one in ids) - mark.share * len(ids)) / (len(ids) * mark.share * 0.75) ** 0.5
        )
    return np.array(found)


def test_marked_text_differs_from_unmarked_and_the_wrong_key_finds_nothing(worded):
    model, mark = worded(), GreenList(key=11, delta=12.0)
    prompts = [f"w{number} w{number + 1}" for number in range(1, 9)]
    how = {"gen_length": 16, "steps": 16, "temperature": 1.0, "record_sinks": False, "progress": False}
    marked = sinklens.generate(model, prompts, hooks=mark, **how)
    plain = sinklens.generate(model, prompts, **how)
    assert green_z(marked, mark).min() >= 2.5
    assert np.mean(green_z(plain, mark) >= 2.5) <= 0.25
    others = [green_z(marked, GreenList(key=key)).mean() for key in range(20, 40)]
    assert abs(float(np.mean(others))) < 1.0


def test_values_out_of_range_are_refused(unchecked):
    with pytest.raises(SettingError, match=r"above 0 and below 1; got 1\.0"):
        GreenList(key=1, share=1.0)
    with pytest.raises(SettingError, match="context must be 'none' or 'previous'; got 'two'"):
        GreenList(key=1, context="two")
    with pytest.raises(SettingError, match="GreenList does not support positions="):
        GreenList(key=1, positions=[0])


def test_the_bias_acts_at_its_steps_alone(worded):
    base = watch(worded(), PADDED, points=["denoise.hook_logits"])
    seen = watch(worded(), PADDED, [GreenList(key=1, steps=[2])], ["denoise.hook_logits"], replay=base.run)
    point = "denoise.hook_logits"
    same = [torch.equal(seen.values[step][point], base.values[step][point]) for step in range(4)]
    assert same == [True, True, False, True]
    assert short(worded(), {})["steps"] == 4
