"""Single passes: every form of a prompt gives the same logits, and a pass without masks gives a warning."""

import warnings

import pytest
import torch
from building import random_hf, random_ids, random_model

import sinklens
from sinklens import errors
from sinklens.errors import PromptWarning, SinklensError
from sinklens.model import load
from sinklens.sinks import qk

TEXT, OTHER = "Question: Tom has 3 apples.", "Question: 4"
Z = "blocks.1.attn.hook_z"


def zero(value, hook):
    return value * 0


def calls(model, prompt):
    """The logits of every call that takes a prompt, including one with hooks."""
    embed = "hook_embed"
    with model.trace(prompt):
        traced = model.output.save()
    with model.hooks() as hooked:
        inside = hooked(prompt)
    plain = [model(prompt), model.forward(prompt), traced, inside, model.run_with_hooks(prompt, fwd_hooks=[])]
    return [*plain, model.run_with_cache(prompt, names_filter=embed)[0]]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("form", [
    lambda model: TEXT,
    lambda model: [TEXT],
    lambda model: model.to_tokens(TEXT),
    lambda model: model.to_tokens(TEXT)[0],
    lambda model: model.to_tokens(TEXT)[0].tolist(),
    lambda model: model.tokenizer(TEXT, return_tensors="pt"),
    lambda model: model.encode(TEXT),
])  # fmt: skip
def test_every_form_of_a_prompt_gives_the_same_logits_in_every_call(tiny_llama, form):
    expected = tiny_llama.tree(tiny_llama.to_tokens(TEXT))
    for logits in calls(tiny_llama, form(tiny_llama)):
        assert torch.equal(logits, expected)
    ablated = tiny_llama.run_with_hooks(form(tiny_llama), fwd_hooks=[(Z, zero)])
    with tiny_llama.hooks(fwd_hooks=[(Z, zero)]) as hooked:
        assert torch.equal(hooked(form(tiny_llama)), ablated)
    assert not torch.equal(ablated, expected)


def test_a_tokenizers_output_can_be_passed_as_keywords(tiny_llama):
    encoded = tiny_llama.tokenizer([TEXT, OTHER], return_tensors="pt", padding=True)
    assert torch.equal(tiny_llama(**encoded), tiny_llama([TEXT, OTHER]))


def test_texts_in_one_pass_equal_separate_passes(tiny_llama):
    for logits in calls(tiny_llama, [TEXT, OTHER]):
        for row, text in enumerate((TEXT, OTHER)):
            alone = tiny_llama(text)[0]
            torch.testing.assert_close(logits[row, -len(alone) :], alone, atol=1e-4, rtol=1e-5)


def test_invokes_may_be_padded_in_different_ways(tiny_llama):
    right = tiny_llama.tokenizer([TEXT, OTHER], return_tensors="pt", padding=True, padding_side="right")
    with tiny_llama.trace() as tracer:
        with tracer.invoke(right):
            first = tiny_llama.output.save()
        with tracer.invoke(OTHER):
            second = tiny_llama.output.save()
    expected = tiny_llama([TEXT, OTHER])
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(second[0, -3:], expected[1, -3:], atol=1e-4, rtol=1e-5)


def test_a_start_token_is_left_out_on_request(tiny_llama):
    bare = tiny_llama.to_tokens(TEXT, prepend_bos=False)
    assert bare.shape[1] == tiny_llama.to_tokens(TEXT).shape[1] - 1
    assert torch.equal(tiny_llama(TEXT, prepend_bos=False), tiny_llama(bare))
    with tiny_llama.trace(TEXT, prepend_bos=False):
        traced = tiny_llama.output.save()
    assert torch.equal(traced, tiny_llama(bare))


def test_a_misspelled_option_is_an_error(tiny_llama):
    for call in (tiny_llama, tiny_llama.run_with_cache, tiny_llama.run_with_hooks):
        with pytest.raises(TypeError, match="retrun_type"):
            call(TEXT, retrun_type="loss")


# The warning


def traced(model, ids):
    with model.trace(ids):
        model.output.save()


def invoked(model, ids):
    with model.trace() as tracer:
        with tracer.invoke(ids[:1]):
            model.output.save()
        with tracer.invoke(ids[1:]):
            model.output.save()


@pytest.mark.parametrize("call", [
    lambda model, ids: model(ids),
    lambda model, ids: model.run_with_cache(ids),
    lambda model, ids: model.run_with_hooks(ids, fwd_hooks=[]),
    traced,
    invoked,
])  # fmt: skip
def test_a_pass_without_masks_warns_once(call):
    model = random_model()
    message = (
        r"contain no mask token \(60\).*not a next token\. model\.to_canvas\(prompt, gen_length=\.\.\.\) appends masks"
    )
    with pytest.warns(PromptWarning, match=message) as seen:
        call(model, random_ids())
        call(model, random_ids())
    assert len([entry for entry in seen if entry.category is PromptWarning]) == 1


def test_the_warning_names_the_users_line(monkeypatch):
    monkeypatch.setattr(errors, "BETWEEN", (*errors.BETWEEN, "typechecks"))  # the tests' checks of types
    with pytest.warns(PromptWarning) as seen:
        random_model()(random_ids())
    assert seen[0].filename == __file__


@pytest.fixture
def _loud():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PromptWarning)
        yield


@pytest.mark.usefixtures("_loud")
def test_passes_with_masks_and_internal_passes_do_not_warn():
    model, ids = load(random_hf()), random_ids()  # with the self-check
    canvas = model.to_canvas(ids, 4)
    for call in (model, model.run_with_cache, model.run_with_hooks):
        call(canvas)
    traced(model, canvas)
    random_model(causal=True)(ids)
    run = sinklens.generate(model, ids, gen_length=4, steps=2)
    with sinklens.trace(model, ids, gen_length=4, steps=2, replay=run) as t:
        for _ in t.steps:
            t["blocks.1.attn.hook_pattern"].clone()
    assert (run.canvas[0, -1] != model.mask_token_id).all()
    qk.why(model, run, step=-1, layer=0, head=0)


def test_a_plain_call_of_a_model_with_edits_is_rejected():
    model = sinklens.load(random_hf("llama", causal=True))
    ids = random_ids()
    with model.edit(inplace=True):
        model.blocks[1].hook_resid_post.output[:] = 0
    with model.trace(ids):
        edited = model.output.save()
    assert not torch.equal(edited, model.tree(ids))
    with pytest.raises(SinklensError, match=r"has edits from model\.edit\(\), which a plain call would"):
        model(ids)
