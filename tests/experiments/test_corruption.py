"""`corrupted` changes the prompt and nothing else: the answers on the canvases stay those of the earlier run."""

import pytest
import torch

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.experiments import corrupted
from sinklens.experiments.reruns import again
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
    force = ForceTokens(tokens={2: seven}, steps=[2])
    earlier = sinklens.generate(tiny_llada, QUESTION, hooks=force, **SETTINGS)
    again = corrupted(earlier, {" 17": " 19"}, record_sinks=False)
    assert again.text == earlier.text  # one string, as for the earlier run
    assert earlier.canvas[0, 3, 2] == again.canvas[0, 3, 2] == seven
    assert again.canvas[0, 0, 2] == earlier.canvas[0, 0, 2]


@pytest.mark.parametrize("settings", [{}, {"use_cache": True}, {"sampler": "bd3lm", "steps": 8}])
def test_a_run_of_blocks_is_repeated_with_its_settings(settings):
    base = sinklens.generate("tiny-sdar", [QUESTION, OTHER], **SETTINGS | settings)
    once_more = again(base, record_sinks=False, progress=False)
    other = corrupted(base, {" 6": " 8"}, record_sinks=False)
    assert torch.equal(once_more.canvas, base.canvas)
    assert once_more.settings == other.settings == base.settings
    assert int((other.canvas[:, -1] != base.canvas[:, -1]).sum()) == 3


@pytest.mark.parametrize(("changes", "message"), [
    ({" 9": " 8"}, r"' 9' occurs in no prompt as the tokens \[' 9'\]; a leading space"),
    ({" 6": " 6 of"}, r"' 6' has 1 tokens .* and ' 6 of' has 2"),
    ({}, r"changes is empty; pass the texts to replace"),
])  # fmt: skip
def test_a_text_that_cannot_be_replaced_is_refused(base, changes, message):
    with pytest.raises(PromptError, match=message):
        corrupted(base, changes)


def test_a_prompt_of_another_length_cannot_replay_a_run(base, tiny_llada):
    with pytest.raises(SettingError, match="replay holds 2 rows of"):
        sinklens.generate(tiny_llada, [QUESTION, QUESTION], replay=base, **SETTINGS)


def test_a_run_again_has_the_cache_policy_of_the_first(tiny_llada):
    first = sinklens.generate(tiny_llada, [QUESTION], cache="dual", block_length=6, **SETTINGS)
    repeated = again(first, record_sinks=True, progress=False)
    assert (first.cache, repeated.cache) == (DualCache(), DualCache())
    assert repeated.sinks["fresh"].sum() < repeated.sinks["fresh"].size
    assert again(first, cache=None, progress=False).cache is None
