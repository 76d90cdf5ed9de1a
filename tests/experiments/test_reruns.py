"""Runs again with another prompt on the same canvases."""

import pytest
import torch

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import corrupted
from sinklens.interventions import ForceTokens
from sinklens.sampling import DualCache

QUESTION = "Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:"
OTHER = "Question: At school, Tom has 6 cups. He finds 6 more. How many cups does Tom have now?\nAnswer:"
SETTINGS = {"gen_length": 6, "record_sinks": False, "progress": False}


@pytest.fixture(scope="module")
def base(tiny_llada):
    return sinklens.generate(tiny_llada, [QUESTION, OTHER], **SETTINGS)


def test_every_occurrence_in_the_prompts_is_replaced_and_the_answers_stay(base, tiny_llada):
    found = corrupted(base, {" 6": " 8"}, record_sinks=False)
    six, eight = (tiny_llada.to_single_token(text) for text in (" 6", " 8"))
    expected = base.canvas.clone()
    prompt = expected[:, :, : base.prompt_length]
    assert int((prompt[:, 0] == six).sum()) == 3
    prompt[prompt == six] = eight
    assert torch.equal(found.canvas, expected)
    assert (found.settings, found.seed) == (base.settings, base.seed)


def test_a_step_computes_what_a_pass_over_the_same_canvas_computes(base, tiny_llada):
    kept = {}
    name = "blocks.1.hook_resid_post"
    hook = (name, lambda value, hook: kept.update({hook.step: value.clone()}))
    found = corrupted(base, {" 17": " 19"}, hooks=[hook], record_sinks=False)
    _, cache = tiny_llada.run_with_cache(found.canvas[:1, 3], names_filter=name, attention_mask=found.real[:1].long())
    torch.testing.assert_close(kept[3][:1][found.real[:1]], cache[name][found.real[:1]], atol=1e-5, rtol=1e-5)


def test_prompt_tokens_that_the_earlier_run_changed_on_the_way_stay_changed(tiny_llada):
    seven = tiny_llada.to_single_token(" 7")
    earlier = sinklens.generate(tiny_llada, QUESTION, hooks=ForceTokens(tokens={2: seven}, steps=[2]), **SETTINGS)
    found = corrupted(earlier, {" 17": " 19"}, record_sinks=False)
    assert found.text == earlier.text  # one string, as for the earlier run
    assert earlier.canvas[0, 3, 2] == found.canvas[0, 3, 2] == seven
    assert found.canvas[0, 0, 2] == earlier.canvas[0, 0, 2]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("settings", [{}, {"use_cache": True}, {"sampler": "bd3lm", "steps": 8}])
def test_a_run_of_blocks_is_repeated_with_its_settings(settings):
    base = sinklens.generate("tiny-sdar", [QUESTION, OTHER], **SETTINGS | settings)
    other = corrupted(base, {" 6": " 8"}, record_sinks=False)
    assert other.settings == base.settings
    assert int((other.canvas[:, -1] != base.canvas[:, -1]).sum()) == 3


def test_a_changed_run_has_the_cache_policy_of_the_first(tiny_llada):
    first = sinklens.generate(tiny_llada, [QUESTION], cache="dual", block_length=6, **SETTINGS)
    changed = corrupted(first, {" 6": " 8"}, record_sinks=True)
    assert (first.cache, changed.cache) == (DualCache(), DualCache())
    assert changed.sinks["fresh"].sum() < changed.sinks["fresh"].size
    assert corrupted(first, {" 6": " 8"}, cache=None, record_sinks=False).cache is None


@pytest.mark.usefixtures("unchecked")
def test_texts_that_do_not_exist_are_refused(base, tiny_llada):
    for call, match in [
        (lambda: corrupted(base, {" 9": " 8"}), r"' 9' occurs in no prompt as the tokens \[' 9'\]; a leading space"),
        (lambda: corrupted(base, {" 6": " 6 of"}), r"' 6' has 1 tokens .* and ' 6 of' has 2"),
        *(
            (lambda wrong=wrong: corrupted(base, wrong), r"changes must be a dict of the texts to replace, such as")
            for wrong in ({}, (" 6", " 8"))
        ),
        (lambda: sinklens.generate(tiny_llada, [QUESTION] * 2, replay=base, **SETTINGS), "replay holds 2 rows of"),
    ]:  # fmt: skip
        with pytest.raises(SinklensError, match=match):
            call()
