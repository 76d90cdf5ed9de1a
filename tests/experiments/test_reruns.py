"""Runs again with another prompt on the same canvases; paths across steps against a chain of plain passes."""

import pytest
import torch
from building import plain_pass, shared_model
from path_oracle import brute_force

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import corrupted, path_across_steps
from sinklens.experiments.reruns import again
from sinklens.interventions import Activations, ForceTokens
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


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("settings", [{}, {"use_cache": True}, {"sampler": "bd3lm", "steps": 8}])
def test_a_run_of_blocks_is_repeated_with_its_settings(settings):
    base = sinklens.generate("tiny-sdar", [QUESTION, OTHER], **SETTINGS | settings)
    once_more = again(base, record_sinks=False, progress=False)
    other = corrupted(base, {" 6": " 8"}, record_sinks=False)
    assert torch.equal(once_more.canvas, base.canvas)
    assert once_more.settings == other.settings == base.settings
    assert int((other.canvas[:, -1] != base.canvas[:, -1]).sum()) == 3


def test_a_run_again_has_the_cache_policy_of_the_first(tiny_llada):
    first = sinklens.generate(tiny_llada, [QUESTION], cache="dual", block_length=6, **SETTINGS)
    repeated = again(first, record_sinks=True, progress=False)
    assert (first.cache, repeated.cache) == (DualCache(), DualCache())
    assert repeated.sinks["fresh"].sum() < repeated.sinks["fresh"].size
    assert again(first, cache=None, progress=False).cache is None


MASK, LENGTH, PROMPT = 60, 6, [3, 17, 5, 44, 9]


def decided(canvas, logits):
    """The canvas after its most confident masked position is decided, as LLaDA does with one token a step."""
    best = logits.softmax(-1).max(-1)
    place = int(best.values[0].masked_fill(canvas[0] != MASK, -1).argmax())
    changed = canvas.clone()
    changed[0, place] = best.indices[0, place]
    return changed


def chain(model, base, other, sender, receiver, step, last, through):
    """Canvas and logits at the receiver's step, by plain passes."""
    here = base.canvas[:, step]
    canvas = decided(here, brute_force(model, here, other, sender, "logits"))
    if through == "frozen":
        canvas = torch.where(canvas != base.canvas[:, step + 1], canvas, base.canvas[:, last])
    else:
        for _ in range(step + 1, last):
            canvas = decided(canvas, plain_pass(model, canvas).logits)
    return canvas, brute_force(model, base.canvas[:, last], canvas, "embed", receiver)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("through", ["canvas", "frozen"])
@pytest.mark.parametrize(("sender", "receiver", "last"), [("1_mlp_out", "L2H4.q", 2), ("0_mlp_out", "L1H0.k", 3)])
def test_a_path_across_steps_equals_a_chain_of_plain_passes(sender, receiver, last, through):
    model, step = shared_model("qwen3"), 1
    base = sinklens.generate(model, [PROMPT], gen_length=LENGTH, steps=LENGTH, record_sinks=False)
    other = base.canvas[:, step].clone()
    torch.manual_seed(1)
    other[0, :5] = torch.randint(0, MASK - 1, (5,))
    source = {step: model.tree.run_with_cache(other)[1]}
    found = path_across_steps(base, sender, receiver, source, step=step, receiver_step=last, through=through)
    with torch.no_grad():
        canvas, logits = chain(model, base, other, sender, receiver, step, last, through)
    assert torch.equal(found.canvas, canvas)
    assert found.changed.any()
    read = Activations(names=["denoise.hook_logits"], steps=[last])
    run = sinklens.generate(
        model, [PROMPT], gen_length=LENGTH, steps=LENGTH, hooks=[found.patch, read], replay=base, record_sinks=False
    )
    assert torch.equal(run.canvas, base.canvas)
    patched = read.caches[last]["denoise.hook_logits"]
    torch.testing.assert_close(patched, logits, atol=1e-5 * float(logits.abs().max()), rtol=0)


def test_texts_and_paths_that_do_not_exist_are_refused(base, tiny_llada):
    model, given = shared_model(), {"gen_length": 4, "steps": 4, "record_sinks": False}
    edit = ("denoise.hook_logits", lambda value, hook: value.roll(1, dims=-1))
    first, edited, cached = (
        sinklens.generate(model, [PROMPT], **given, **more) for more in ({}, {"hooks": [edit]}, {"cache": "dual"})
    )
    written = sinklens.generate(shared_model("qwen2", True), [PROMPT], gen_length=4, record_sinks=False)
    source, asked = {2: model.tree.run_with_cache(first.canvas[:, 2])[1]}, ("L0H0", "logits")
    later = {"step": 2, "receiver_step": 3}
    for call, match in [
        (lambda: corrupted(base, {" 9": " 8"}), r"' 9' occurs in no prompt as the tokens \[' 9'\]; a leading space"),
        (lambda: corrupted(base, {" 6": " 6 of"}), r"' 6' has 1 tokens .* and ' 6 of' has 2"),
        (lambda: corrupted(base, {}), r"changes is empty; pass the texts to replace"),
        (lambda: sinklens.generate(tiny_llada, [QUESTION] * 2, replay=base, **SETTINGS), "replay holds 2 rows of"),
        (lambda: path_across_steps(first, *asked, {}, step=2, receiver_step=1), "later than the sender's; got 1 and 2"),
        (lambda: path_across_steps(edited, *asked, source, **later), "its canvases differ without its hooks"),
        (lambda: path_across_steps(cached, *asked, source, **later), r"with cache=DualCache\(\), steps share keys and"),
        (lambda: path_across_steps(written, *asked, {}, **later), "steps of an autoregressive run share keys"),
    ]:  # fmt: skip
        with pytest.raises(SinklensError, match=match):
            call()
