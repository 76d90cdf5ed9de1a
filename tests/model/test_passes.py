"""Single passes: every form of a prompt gives the same logits, and a pass without masks gives a warning."""

import copy
import warnings

import pytest
import torch
from building import random_hf, random_ids, random_model

import sinklens
from sinklens import errors
from sinklens.errors import PromptError, PromptWarning
from sinklens.model import load

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


@pytest.mark.fast_cases(2)
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


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llada"])
@pytest.mark.filterwarnings("ignore:tiny-llada is a diffusion model")
def test_the_tokens_of_texts_carry_their_padding(shipped, side):
    tokens = shipped.to_tokens([TEXT, OTHER], padding_side=side)
    copies = [tokens, tokens.clone(), tokens.to("cpu"), tokens[:], [*tokens], copy.deepcopy(tokens)]
    for given in copies if side == "left" else copies[:4]:
        for logits in calls(shipped, given):
            for row, text in zip(logits, (TEXT, OTHER), strict=True):
                alone = shipped(text)[0]
                real = row[-len(alone) :] if side == "left" else row[: len(alone)]
                torch.testing.assert_close(real, alone, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(shipped(tokens[[1, 0]]), shipped(tokens)[[1, 0]], atol=1e-4, rtol=1e-5)
    assert torch.equal(shipped.tree(tokens), shipped(tokens))
    encoded = shipped.tokenizer([TEXT, OTHER], return_tensors="pt", padding=True)
    assert torch.equal(shipped(**encoded), shipped([TEXT, OTHER]))
    for call in (shipped, shipped.run_with_cache, shipped.run_with_hooks):
        with pytest.raises(errors.SettingError, match="a single pass has no argument retrun_type"):
            call(TEXT, retrun_type="loss")


def test_the_canvas_of_texts_carries_its_padding(tiny_llada):
    for row, text in zip(tiny_llada(tiny_llada.to_canvas([TEXT, OTHER], gen_length=4)), (TEXT, OTHER), strict=True):
        alone = tiny_llada(tiny_llada.to_canvas(text, gen_length=4))[0]
        torch.testing.assert_close(row[-len(alone) :], alone, atol=1e-4, rtol=1e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llada"])
def test_a_run_on_the_tokens_of_texts_equals_separate_runs(shipped):
    for side in ("left", "right"):
        run = sinklens.generate(shipped, shipped.to_tokens([TEXT, OTHER], padding_side=side), gen_length=4)
        assert run.text == [sinklens.generate(shipped, text, gen_length=4).text for text in (TEXT, OTHER)]


def test_carried_padding_is_lost_by_arithmetic_and_in_files_and_then_unknown(tiny_llama, tmp_path):
    tokens = tiny_llama.to_tokens([TEXT, OTHER])
    torch.save(tokens, tmp_path / "tokens.pt")
    for plain in (tokens + 0, torch.load(tmp_path / "tokens.pt", weights_only=True)):
        assert torch.equal(plain, tokens)
        with pytest.raises(PromptError, match="ids alone do not show whether that is padding"):
            tiny_llama(plain)
    assert torch.equal(tiny_llama(tokens[:1, 1:]), tiny_llama((tokens + 0)[:1, 1:]))  # a row without padding


def test_a_token_written_over_carried_padding_is_an_error(tiny_llama):
    tokens = tiny_llama.to_tokens([TEXT, OTHER])
    tokens[1, 0] = tiny_llama.to_single_token(" 4")
    with pytest.raises(PromptError, match=r"written over the padding of these ids.*pass attention_mask="):
        tiny_llama(tokens)
    assert tiny_llama(tokens, attention_mask=torch.ones_like(tokens + 0)).isfinite().all()


@pytest.mark.filterwarnings("ignore:tiny-llada is a diffusion model")
def test_ids_that_look_padded_on_the_right_warn(tiny_llada):
    right = tiny_llada.tokenizer([TEXT, OTHER], return_tensors="pt", padding=True, padding_side="right")
    with pytest.warns(PromptWarning, match=r"1 of the 2 rows of these ids end with token \d+, which is padding or the"):
        tiny_llada(right.input_ids)
    run = sinklens.generate(tiny_llada, [TEXT, OTHER], gen_length=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PromptWarning)
        tiny_llada(right.input_ids, attention_mask=torch.ones_like(right.input_ids))
        tiny_llada(**right)
        tiny_llada(run.canvas[:, -1], attention_mask=run.real)  # both answers end
        tiny_llada(run.canvas[:1, -1])


def test_a_start_token_is_left_out_on_request(tiny_llama):
    bare = tiny_llama.to_tokens(TEXT, prepend_bos=False)
    assert bare.shape[1] == tiny_llama.to_tokens(TEXT).shape[1] - 1
    assert torch.equal(tiny_llama(TEXT, prepend_bos=False), tiny_llama(bare))
    with tiny_llama.trace(TEXT, prepend_bos=False):
        traced = tiny_llama.output.save()
    assert torch.equal(traced, tiny_llama(bare))


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
