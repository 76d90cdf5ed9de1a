"""The prompts that a model accepts, and its errors for all others."""

import jaxtyping
import pytest
import torch
from building import random_hf, random_ids, shared_model, small_tokenizer

from sinklens.errors import PromptError
from sinklens.model import load


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A model with a tokenizer."""
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return load(random_hf(vocab_size=len(tokenizer)), tokenizer=tokenizer)


SHORT, LONG = "Tom has 3 apples.", "Tom has 3 apples and 4 pears. How many?"


def test_a_text_is_encoded_by_the_tokenizer(with_tokenizer):
    ids, real = with_tokenizer.encode(SHORT)
    assert ids.tolist() == [with_tokenizer.tokenizer(SHORT).input_ids]
    assert real.all()
    assert with_tokenizer.tokenizer.decode(ids[0], skip_special_tokens=True) == SHORT


def test_several_texts_are_padded_on_the_left(with_tokenizer):
    ids, real = with_tokenizer.encode([SHORT, LONG])
    alone = with_tokenizer.encode(SHORT)[0]
    missing = ids.shape[1] - alone.shape[1]
    assert missing > 0
    assert real.tolist() == [[False] * missing + [True] * alone.shape[1], [True] * ids.shape[1]]
    assert torch.equal(ids[:1, missing:], alone)
    assert (ids[0, :missing] == with_tokenizer.tokenizer.pad_token_id).all()


def test_texts_traced_together_equal_separate_traces(with_tokenizer):
    with with_tokenizer.trace([SHORT, LONG]):
        together = with_tokenizer.output.save()
    for row, text in enumerate((SHORT, LONG)):
        ids, _ = with_tokenizer.encode(text)
        with with_tokenizer.trace(text):
            alone = with_tokenizer.output.save()
        assert_close(alone, with_tokenizer(ids))
        assert_close(together[row, -ids.shape[1] :], alone[0])


@pytest.mark.parametrize("as_given", [lambda ids: ids[0], lambda ids: ids[0].tolist(), lambda ids: ids])
def test_a_single_prompt_may_omit_the_batch_axis(as_given):
    model, ids = shared_model(), random_ids(1, 5)
    assert torch.equal(model.encode(as_given(ids))[0], ids)
    with model.trace(as_given(ids)):
        logits = model.output.save()
    assert torch.equal(logits, model(ids))


def test_a_chat_template_wraps_the_text_as_one_turn(with_tokenizer):
    template = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}{% endfor %} answer:"
    ids, _ = with_tokenizer.encode(SHORT, chat_template=template)
    assert with_tokenizer.tokenizer.decode(ids[0]) == f"user: {SHORT} answer:"


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "the prompt is empty; pass at least one character"),
        ([SHORT, ""], {}, "the prompt is empty"),
        ([], {}, "the list of prompts is empty; pass at least one"),
        (SHORT, {"chat_template": True}, r"has no chat template\. Leave chat_template \(--chat\) out"),
        (SHORT, {"chat_template": "{{ messages[0] | no_filter }}"}, r"template failed .*No filter named 'no_filter'"),
        (SHORT, {"chat_template": "{{ messages[0]['content'] / 0 }}"}, r"template failed on a user turn \(TypeError: "),
        (SHORT, {"chat_template": "{{ messages"}, r"template failed on a user turn \(TemplateSyntaxError: "),
        ("a\ud800", {}, r"character 1 of the prompt is '\\ud800', half of a surrogate pair, which is not text"),
        (torch.ones(1, 3), {}, r"got torch\.float32 of shape \[1, 3\]"),
        (torch.ones(1, 3, dtype=torch.bool), {}, r"got torch\.bool of shape \[1, 3\]"),
        (
            torch.ones(1, 2, 3, dtype=torch.long),
            {},
            r"non-empty integer tensor \[pos\] or \[batch, pos\]; got .* \[1, 2, 3\]",
        ),
        (torch.ones(1, 0, dtype=torch.long), {}, r"got torch\.int64 of shape \[1, 0\]"),
        ([3, 100_000], {}, "token ids range from 3 to 100000; this model's vocabulary is 0 to 6"),
        (torch.tensor([-1, 2]), {}, "token ids range from -1 to 2; this model's vocabulary is 0 to 6"),
    ],
)
def test_an_invalid_prompt_is_rejected_with_the_allowed_forms(with_tokenizer, prompt, settings, message):
    with pytest.raises(PromptError, match=message):
        with_tokenizer.encode(prompt, **settings)


def test_a_list_of_other_values_is_rejected(with_tokenizer, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the test run's type checks would raise first
    with pytest.raises(PromptError, match=r"a text, a list of texts, token ids .*; got a list of float, str"):
        with_tokenizer.encode([SHORT, 3.5])


def test_text_for_a_model_without_a_tokenizer_is_rejected_with_the_remedy():
    with pytest.raises(
        PromptError, match=r"has no tokenizer, so it accepts token ids .*\.load\(\.\.\., tokenizer=\.\.\.\)"
    ):
        shared_model().encode(SHORT)


def test_tokens_have_transformerlenss_names(tiny_llada):
    text = "Question: Tom has 12 apples."
    assert tiny_llada.to_tokens(text).tolist() == [tiny_llada.tokenizer(text).input_ids]
    words = tiny_llada.to_str_tokens(text)
    assert words[0] == "<|startoftext|>"
    assert "".join(words[1:]) == text
    ids = tiny_llada.to_tokens(text)[0]
    assert tiny_llada.to_str_tokens(ids) == words
    assert tiny_llada.to_str_tokens(ids.tolist()) == words
    assert tiny_llada.to_str_tokens([*ids.tolist(), -1]) == [*words, ""]  # as in the canvas of an autoregressive run
    with pytest.raises(PromptError, match="range from -2"):
        tiny_llada.to_str_tokens([-2, 3])
    with pytest.raises(PromptError, match="one text or one row of ids"):
        tiny_llada.to_str_tokens(torch.zeros(2, 3, dtype=torch.long))
