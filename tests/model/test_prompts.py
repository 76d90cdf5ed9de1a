"""The accepted forms of a prompt, and that all forms of one prompt give the same tokens."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from building import random_hf, shared_model, small_tokenizer
from transformers import BatchEncoding

import sinklens
from sinklens.errors import PromptError
from sinklens.model import load

SHORT, LONG = "Tom has 3 apples.", "Tom has 3 apples and 4 pears. How many?"


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """Disable the test run's type checks, which would raise before sinklens does."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A model with a tokenizer."""
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return load(random_hf(vocab_size=len(tokenizer)), tokenizer=tokenizer)


def assert_same(found, expected):
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


# A tokenizer's output


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_a_tokenizers_output_is_read_with_its_attention_mask(with_tokenizer, side, tensors, monkeypatch):
    monkeypatch.setattr(with_tokenizer.tokenizer, "padding_side", side)
    encoded = with_tokenizer.tokenizer([SHORT, LONG], return_tensors=tensors, padding=True)
    assert isinstance(encoded, BatchEncoding)
    for given in (encoded, dict(encoded)):
        assert_same(with_tokenizer.encode(given), with_tokenizer.encode([SHORT, LONG]))
        assert torch.equal(with_tokenizer.to_tokens(given), with_tokenizer.to_tokens([SHORT, LONG]))
    unpadded, expected = with_tokenizer.tokenizer([SHORT, LONG]), with_tokenizer.encode(SHORT)
    assert_same(with_tokenizer.encode(unpadded), with_tokenizer.encode([SHORT, LONG]))
    for given in (with_tokenizer.tokenizer(SHORT), {"input_ids": expected.ids[0]}, expected):
        assert_same(with_tokenizer.encode(given), expected)
    assert expected.ids.tolist() == [with_tokenizer.tokenizer(SHORT).input_ids]
    assert expected.real.all()


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
    assert_same(shared_model().encode(given[0]), (torch.tensor([[5, 6]]), torch.ones(1, 2).bool()))  # or one row


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
        ([{"role": "user", "content": "hi"}], "got a list of dict. For chat turns pass .* chat_template=True"),
        (np.array([1.5]), r"non-empty integer tensor .*; got torch\.float64 of shape \[1\]"),
        (np.array([True]), r"got torch\.bool of shape \[1\]"),
        (np.array(["text"]), "got an array of <U4"),
        (torch.tensor(5), r"got torch\.int64 of shape \[\]"),
        (torch.ones(2, dtype=torch.complex64), r"got torch\.complex64"),
        ([5, 2**70], r"this model's vocabulary is 0 to \d+\. Do they come from another tokenizer"),
        ("", "the prompt is empty; pass at least one character"),
        ([SHORT, ""], "the prompt is empty"),
        ("a\ud800", r"character 1 of the prompt is '\\ud800', half of a surrogate pair, which is not text"),
        (torch.ones(1, 2, 3).long(), r"non-empty integer tensor \[pos\] or \[batch, pos\]; got .* \[1, 2, 3\]"),
        (torch.ones(1, 0).long(), r"got torch\.int64 of shape \[1, 0\]"),
        ([SHORT, 3.5], r"a text, a list of texts, token ids .*; got a list of float, str"),
        ([[5], [-3]], "token ids range from -3 to -3"),
        ({}, "needs input_ids; got an empty dict"),
        ({"attention_mask": [1, 1]}, "needs input_ids; got attention_mask"),
        ({"input_id": [1, 2]}, r"has input_ids and attention_mask; got 'input_id'\. Nearest: input_ids"),
        ({"input_ids": [5, 6], "position_ids": [0, 1]}, "has input_ids and attention_mask; got 'position_ids'"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, r"of the ids, \[1, 2\], with a .*; got \[1, 1\], \[\[1\]\]"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, r"a real token in each row; got \[1, 2\], \[\[0, 0\]\]"),
        ({"input_ids": [5, 6], "attention_mask": "no"}, r"got 'no' \(str\)"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, r"not contiguous \(\[1, 0, 1\]\)"),
        ({"input_ids": torch.tensor([5, 6]), "attention_mask": torch.tensor([0.0, -1e9])}, "got .* -1000000000"),
    ],
)
def test_an_invalid_prompt_is_rejected_with_the_allowed_forms(with_tokenizer, prompt, message):
    with pytest.raises(PromptError, match=message):
        with_tokenizer.encode(prompt)
    with pytest.raises(PromptError, match=message):
        sinklens.generate(with_tokenizer, prompt)


UNFIT = [
    (lambda model: model.encode([5, 6], chat_template=True), "chat_template=True is only for text; token ids are used"),
    (lambda model: model.encode([5, 6], prepend_bos=True), "prepend_bos=True is only for text"),
    (lambda model: model.encode(SHORT, None), r"chat_template must be True, False, or a template .*; got None"),
    (lambda model: model.encode(SHORT, "llama3"), r"contains \{\{ messages \}\}; got 'llama3'"),
    (lambda model: model.encode(SHORT, "{{ messages[0] }}", prepend_bos=True), "template determines the start"),
    (lambda model: model.encode(SHORT, "{{ '' }}"), "returns no tokens for"),
    (lambda model: model.encode(SHORT, True), r"has no chat template\. Leave chat_template \(--chat\) out"),
    (lambda model: templated(model, "hello").encode(SHORT, True), r"of /.*/tokenizer_config\.json lacks .*: 'hello'"),
    (lambda model: model.encode(SHORT, "{{ messages[0] | no_filter }}"), r"template failed .*No filter named"),
    (lambda model: model.encode(SHORT, "{{ messages[0]['content'] / 0 }}"), r"failed on a user turn \(TypeError: "),
    (lambda model: model.encode(SHORT, "{{ messages"), r"template failed on a user turn \(TemplateSyntaxError: "),
    (lambda model: shared_model().encode(SHORT), r"has no tokenizer, so it accepts token ids .*tokenizer=\.\.\.\)"),
    (lambda model: model(SHORT, attention_mask=torch.ones(1, 2)), "attention_mask= is only for token ids; text and"),
    (lambda model: model({"input_ids": [5, 6]}, attention_mask=torch.ones(1, 2)), "attention_mask= is only for token"),
    (lambda model: model([[5, 6]], attention_mask=torch.tensor([[-torch.inf, 0]])), r"\[\[-inf, 0\.0\]\]"),
    (lambda model: model([[5, 6]], "loss"), "got 'loss'"),
    (lambda model: sinklens.generate(model, model.tokenizer([SHORT, LONG], return_tensors="pt", padding=True,
                                                            padding_side="right")["input_ids"], gen_length=4),
     "rows of these ids end with 0 to"),
    *((lambda model, call=call: getattr(model, call)(3.5), r"a prompt is a text.*got 3\.5 \(float\)")
      for call in ("encode", "to_tokens", "run_with_cache", "run_with_hooks", "__call__", "forward")),
]  # fmt: skip


def templated(model, template):
    """The reader of the model's prompts, with a template in its tokenizer."""
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = template
    return replace(model.reader, tokenizer=tokenizer)


@pytest.mark.parametrize(("call", "message"), UNFIT)
def test_a_call_whose_arguments_do_not_fit_the_prompt_is_rejected(with_tokenizer, call, message):
    with pytest.raises(PromptError, match=message):
        call(with_tokenizer)


# Possible padding without an attention mask


def test_padded_ids_without_a_mask_are_rejected(with_tokenizer):
    padded = with_tokenizer.encode([SHORT, LONG]).ids
    message = r"rows of these ids begin with 0 to \d+ tokens \d+, the padding token; .* Pass a dict with input_ids and"
    for call in (
        with_tokenizer.encode,
        with_tokenizer,
        with_tokenizer.run_with_cache,
        lambda ids: with_tokenizer({"input_ids": ids.numpy()}),
    ):
        with pytest.raises(PromptError, match=message):
            call(padded)
    with pytest.raises(PromptError, match=r"begin with \d+ to \d+ tokens"):
        with_tokenizer(padded[:1])
    with_tokenizer(padded, attention_mask=torch.ones_like(padded))


def test_a_single_padding_token_before_every_row_is_real(with_tokenizer):
    ids = with_tokenizer.to_tokens(SHORT)
    ids = torch.cat([torch.full((1, 1), with_tokenizer.tokenizer.pad_token_id), ids], dim=1).repeat(2, 1)
    assert with_tokenizer.encode(ids).real.all()


# Text


def test_a_start_token_is_added_on_request_and_never_twice(with_tokenizer):
    start = with_tokenizer.tokenizer.bos_token_id
    plain = with_tokenizer.tokenizer(SHORT, add_special_tokens=False).input_ids
    assert with_tokenizer.tokenizer(SHORT).input_ids == [start, *plain]
    spelled = with_tokenizer.tokenizer.bos_token + SHORT
    assert with_tokenizer.tokenizer(spelled).input_ids[:2] == [start, start]
    for text in (SHORT, spelled):
        for asked in (None, True):
            assert with_tokenizer.to_tokens(text, prepend_bos=asked).tolist() == [[start, *plain]]
    assert with_tokenizer.to_tokens(SHORT, prepend_bos=False).tolist() == [plain]


def test_a_tokenizer_without_special_tokens_gets_a_start_token_on_request(with_tokenizer, monkeypatch):
    bare = with_tokenizer.tokenizer
    plain = bare(SHORT, add_special_tokens=False).input_ids

    class Bare:
        bos_token_id, pad_token_id = bare.bos_token_id, bare.pad_token_id

        def __call__(self, text, add_special_tokens=True):
            return bare(text, add_special_tokens=False)

    monkeypatch.setattr(with_tokenizer, "tokenizer", Bare())
    assert with_tokenizer.to_tokens(SHORT).tolist() == [plain]
    assert with_tokenizer.to_tokens(SHORT, prepend_bos=True).tolist() == [[bare.bos_token_id, *plain]]
    assert with_tokenizer.to_tokens(SHORT, prepend_bos=False).tolist() == [plain]
    monkeypatch.setattr(Bare, "bos_token_id", None)
    with pytest.raises(PromptError, match="has no start token; leave prepend_bos=True out"):
        with_tokenizer.to_tokens(SHORT, prepend_bos=True)
