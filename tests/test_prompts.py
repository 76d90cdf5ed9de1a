"""What a prompt may be, and that each form of one prompt gives the same tokens."""

import importlib

import numpy as np
import pytest
import torch
import xarray as xr
from building import random_hf, random_ids, shared_model, small_tokenizer
from transformers import BatchEncoding

import sinklens
from sinklens.errors import PromptError
from sinklens.experiments import patching_effects, sweep
from sinklens.interventions import MaskSinks
from sinklens.model import load
from sinklens.prompts import Encoded

SHORT, LONG = "Tom has 3 apples.", "Tom has 3 apples and 4 pears. How many?"


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """The test run's own type checks would answer before sinklens does."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A model with a tokenizer."""
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return load(random_hf(vocab_size=len(tokenizer)), tokenizer=tokenizer)


def assert_same(found, expected):
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


# A tokenizer's output


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_a_tokenizers_output_is_its_ids_with_their_mask(speaking, side, tensors, monkeypatch):
    monkeypatch.setattr(speaking.tokenizer, "padding_side", side)
    made = speaking.tokenizer([SHORT, LONG], return_tensors=tensors, padding=True)
    assert isinstance(made, BatchEncoding)
    for given in (made, dict(made)):
        assert_same(speaking.encode(given), speaking.encode([SHORT, LONG]))
        assert torch.equal(speaking.to_tokens(given), speaking.to_tokens([SHORT, LONG]))


def test_a_tokenizers_output_of_one_text_needs_no_tensors(speaking):
    expected = speaking.encode(SHORT)
    assert_same(speaking.encode(speaking.tokenizer(SHORT)), expected)
    assert_same(speaking.encode({"input_ids": expected.ids[0]}), expected)


def test_rows_of_a_tokenizers_output_may_differ_in_length(speaking):
    assert_same(speaking.encode(speaking.tokenizer([SHORT, LONG])), speaking.encode([SHORT, LONG]))


def test_a_run_takes_a_tokenizers_output(tiny_llada):
    texts = ["Question: 1", "Question: 2 and 3"]
    given = tiny_llada.tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    run, expected = (sinklens.generate(tiny_llada, prompt, gen_length=4) for prompt in (given, texts))
    assert torch.equal(run.canvas, expected.canvas)
    assert torch.equal(run.real, expected.real)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pass_leaves_padding_where_it_is(speaking, side):
    given = speaking.tokenizer([SHORT, LONG], return_tensors="pt", padding=True, padding_side=side)
    logits = speaking(given)
    with speaking.trace(given):
        traced = speaking.output.save()
    ids = given["input_ids"]
    assert torch.equal(traced, logits)
    assert torch.equal(speaking.run_with_cache(given, names_filter="hook_embed")[0], logits)
    assert torch.equal(speaking(ids, attention_mask=given["attention_mask"]), logits)
    alone = speaking(SHORT)[0]
    real = given["attention_mask"][0].bool()
    assert 0 < int(real.sum()) < len(real)
    torch.testing.assert_close(logits[0][real], alone, atol=1e-4, rtol=1e-5)


def test_what_encode_returns_is_a_prompt(speaking):
    encoded = speaking.encode([SHORT, LONG])
    assert isinstance(encoded, Encoded)
    assert_same(speaking.encode(encoded), encoded)
    assert torch.equal(speaking(encoded), speaking([SHORT, LONG]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "holds input_ids; got an empty one"),
        ({"attention_mask": [1, 1]}, "holds input_ids; got attention_mask"),
        ({"input_id": [1, 2]}, r"holds input_ids and attention_mask; got 'input_id'\. Nearest: input_ids"),
        ({"input_ids": [5, 6], "position_ids": [0, 1]}, "holds input_ids and attention_mask; got 'position_ids'"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, r"of the shape of the ids, \[1, 2\]; got \[1, 1\]"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "a row of it has no real token"),
        ({"input_ids": [5, 6], "attention_mask": "no"}, r"got 'no' \(str\)"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, r"not one stretch \(\[1, 0, 1\]\)"),
        ({"input_ids": torch.tensor([5, 6]), "attention_mask": torch.tensor([0.0, -1e9])}, "numbers from -1000000000"),
    ],
)
def test_a_dict_that_cannot_be_used_is_refused(speaking, given, message):
    with pytest.raises(PromptError, match=message):
        speaking.encode(given)


@pytest.mark.parametrize("prompt", [SHORT, {"input_ids": [5, 6], "attention_mask": [1, 1]}])
def test_an_attention_mask_belongs_to_ids(speaking, prompt):
    with pytest.raises(
        PromptError, match="attention_mask= is for token ids; text and a tokenizer's output bring their"
    ):
        speaking(prompt, attention_mask=torch.ones(1, 2))


def test_a_mask_that_is_added_to_scores_is_refused():
    ids = random_ids(1, 4)
    with pytest.raises(PromptError, match=r"numbers from -inf to 0\.0"):
        shared_model()(ids, attention_mask=torch.tensor([[-torch.inf, 0, 0, 0]]))
    with pytest.raises(PromptError, match="got 'loss'"):
        shared_model()(ids, "loss")


# Ids


@pytest.mark.parametrize(
    "given",
    [
        [[5, 6], [7, 8]],
        ((5, 6), (7, 8)),
        torch.tensor([[5, 6], [7, 8]], dtype=torch.int32),
        np.array([[5, 6], [7, 8]]),
        np.array([[5, 6], [7, 8]], dtype=np.uint8),
        [torch.tensor([5, 6]), torch.tensor([7, 8])],
        [np.array([5, 6]), [7, 8]],
        [[np.int64(5), torch.tensor(6)], range(7, 9)],
    ],
)
def test_ids_may_come_in_any_array_or_list(given):
    assert_same(shared_model().encode(given), (torch.tensor([[5, 6], [7, 8]]), torch.ones(2, 2).bool()))


def test_rows_of_one_token_stay_rows():
    assert shared_model().encode([torch.tensor([5]), torch.tensor([6])]).ids.tolist() == [[5], [6]]


class Odd:
    def __repr__(self):
        return "Odd()"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3.5, r"a prompt is a text, a list of texts, token ids .* a dict with input_ids; got 3\.5 \(float\)"),
        (7, r"got 7 \(int\)"),
        (None, r"got None \(NoneType\)"),
        (True, r"got True \(bool\)"),
        (b"text", r"got b'text' \(bytes\)"),
        ({"one", "two"}, r"\(set\)"),
        (Odd(), r"got Odd\(\) \(Odd\)"),
        ((text for text in ["a"]), r"\(generator\)"),
        ([], "the list of prompts is empty"),
        ([[]], "row 0 of the token ids is empty"),
        ([[5], []], "row 1 of the token ids is empty"),
        ([1.5], "got a list of float"),
        ([5, True], "got a list of bool, int"),
        ([True, False], "got a list of bool"),
        ([None], "got a list of NoneType"),
        ([b"text"], "got a list of bytes"),
        ([5, "text"], "got a list of int, str"),
        ([[5], "text"], "got a list of list, str"),
        ([[[5]]], "got a list of list"),
        ([[5, 1.5]], "got a list of list"),
        ([torch.ones(2)], "got a list of Tensor"),
        ([torch.ones(2, 2).long()], "got a list of Tensor"),
        ([{"role": "user", "content": "hi"}], "got a list of dict. For chat turns give .* chat_template=True"),
        (np.array([1.5]), r"non-empty integer tensor .*; got torch\.float64 of shape \[1\]"),
        (np.array([True]), r"got torch\.bool of shape \[1\]"),
        (np.array(["text"]), "got an array of <U4"),
        (torch.tensor(5), r"got torch\.int64 of shape \[\]"),
        (torch.ones(2, dtype=torch.complex64), r"got torch\.complex64"),
        ([5, 2**70], "this model's vocabulary is 0 to"),
        ([[5], [-3]], "token ids run from -3 to -3"),
    ],
)
def test_nonsense_is_refused_with_what_is_allowed(speaking, prompt, message):
    with pytest.raises(PromptError, match=message):
        speaking.encode(prompt)
    with pytest.raises(PromptError, match=message):
        sinklens.generate(speaking, prompt)


@pytest.mark.parametrize("call", ["encode", "to_tokens", "run_with_cache", "run_with_hooks", "__call__", "forward"])
def test_every_call_refuses_nonsense_in_the_same_words(speaking, call):
    with pytest.raises(PromptError, match=r"a prompt is a text.*got 3\.5 \(float\)"):
        getattr(speaking, call)(3.5)


# What would be padding that nobody marked


def test_padded_ids_without_their_mask_are_refused(speaking):
    padded = speaking.to_tokens([SHORT, LONG])
    message = (
        r"rows of these ids begin with 0 to \d+ tokens \d+, which pads; .* Give a dict with input_ids and attention"
    )
    for call in (speaking.encode, speaking, speaking.run_with_cache, lambda ids: speaking({"input_ids": ids.numpy()})):
        with pytest.raises(PromptError, match=message):
            call(padded)
    with pytest.raises(PromptError, match=r"begin with \d+ to \d+ tokens"):
        speaking(padded[:1])
    speaking(padded, attention_mask=torch.ones_like(padded))


def test_ids_padded_on_the_right_without_their_mask_are_refused_by_a_run(speaking):
    padded = speaking.tokenizer([SHORT, LONG], return_tensors="pt", padding=True, padding_side="right")["input_ids"]
    with pytest.raises(PromptError, match="rows of these ids end with 0 to"):
        sinklens.generate(speaking, padded, gen_length=4)


def test_one_padding_token_before_every_row_is_a_token(speaking):
    ids = speaking.to_tokens(SHORT)
    ids = torch.cat([torch.full((1, 1), speaking.tokenizer.pad_token_id), ids], dim=1).repeat(2, 1)
    assert speaking.encode(ids).real.all()


# Text


def test_a_start_token_is_there_as_asked_and_never_twice(speaking):
    start = speaking.tokenizer.bos_token_id
    plain = speaking.tokenizer(SHORT, add_special_tokens=False).input_ids
    assert speaking.tokenizer(SHORT).input_ids == [start, *plain]
    spelled = speaking.tokenizer.bos_token + SHORT
    assert speaking.tokenizer(spelled).input_ids[:2] == [start, start]
    for text in (SHORT, spelled):
        for asked in (None, True):
            assert speaking.to_tokens(text, prepend_bos=asked).tolist() == [[start, *plain]]
    assert speaking.to_tokens(SHORT, prepend_bos=False).tolist() == [plain]


def test_a_tokenizer_without_special_tokens_gets_a_start_token_on_request(speaking, monkeypatch):
    bare = speaking.tokenizer
    plain = bare(SHORT, add_special_tokens=False).input_ids

    class Bare:
        bos_token_id, pad_token_id = bare.bos_token_id, bare.pad_token_id

        def __call__(self, text, add_special_tokens=True):
            return bare(text, add_special_tokens=False)

    monkeypatch.setattr(speaking, "tokenizer", Bare())
    assert speaking.to_tokens(SHORT).tolist() == [plain]
    assert speaking.to_tokens(SHORT, prepend_bos=True).tolist() == [[bare.bos_token_id, *plain]]
    assert speaking.to_tokens(SHORT, prepend_bos=False).tolist() == [plain]
    monkeypatch.setattr(Bare, "bos_token_id", None)
    with pytest.raises(PromptError, match="has no start token; leave prepend_bos=True out"):
        speaking.to_tokens(SHORT, prepend_bos=True)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([5, 6], {"chat_template": True}, "chat_template=True is for text, and token ids are taken as they are"),
        ([5, 6], {"prepend_bos": True}, "prepend_bos=True is for text"),
        (SHORT, {"chat_template": None}, r"chat_template is True, False, or a template .*; got None"),
        (SHORT, {"chat_template": "llama3"}, r"\{\{ messages \}\} in it; got 'llama3'"),
        (SHORT, {"chat_template": "{{ messages[0].content }}", "prepend_bos": True}, "template decides on the start"),
        (SHORT, {"chat_template": "{{ '' }}"}, "makes no token of"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(speaking, prompt, settings, message):
    with pytest.raises(PromptError, match=message):
        speaking.encode(prompt, **settings)


def test_text_of_another_tokenizers_size_is_refused(speaking):
    small = load(random_hf(vocab_size=70), tokenizer=speaking.tokenizer, check=False)
    with pytest.raises(PromptError, match=r"vocabulary is 0 to 69\. Was another tokenizer used"):
        small.encode(LONG)


# Other calls that take a prompt


def test_a_sweep_takes_a_tokenizers_output_as_the_texts(tiny_llada):
    texts = ["Question: 1", "Question: 2 and 3"]
    made = tiny_llada.tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    masks = {"one": MaskSinks(top_k=1)}
    found, expected = (sweep(tiny_llada, given, masks, gen_length=4, rows=4, progress=False) for given in (made, texts))
    assert found.sizes["prompt"] == 2
    assert found.answer.values.tolist() == expected.answer.values.tolist()
    xr.testing.assert_identical(found.drop_attrs(), expected.drop_attrs())


def test_a_patch_between_texts_is_that_between_their_ids(tiny_llada):
    texts = tiny_llada.to_canvas("Question: 3", 4), tiny_llada.to_canvas("Question: 5", 4)
    given = [{"input_ids": canvas.numpy()} for canvas in texts]
    found, expected = (
        patching_effects(tiny_llada, *pair, lambda logits: logits[0, -1, 5], "blocks.0.hook_resid_post")
        for pair in (given, texts)
    )
    xr.testing.assert_identical(found, expected)
    assert (found["hook_resid_post"] != 0).any()


def test_the_zoo_is_a_part_of_the_package():
    assert "zoo" in dir(sinklens)
    assert sinklens.zoo is importlib.import_module("sinklens.zoo")
