"""Variants of the tokenizer: shared tokens have the same ids, and saving preserves each variant."""

import pytest
from transformers import PreTrainedTokenizerFast

from sinklens.tasks import word_problems
from training.tokenizer import START, train_tokenizer


@pytest.fixture(scope="module")
def plain():
    return train_tokenizer()


def test_pictures_add_tokens_and_keep_all_ids(plain):
    wider = train_tokenizer(with_pictures=True)
    assert plain.get_vocab().items() < wider.get_vocab().items()
    for problem in word_problems.held_out(200):
        assert wider(problem.prompt + " " + problem.answer) == plain(problem.prompt + " " + problem.answer)


def test_without_a_start_token_prompts_have_none_also_after_reloading(plain, tmp_path):
    bare = train_tokenizer(start=False)
    bare.save_pretrained(tmp_path)
    prompt = word_problems.held_out(1)[0].prompt
    for tokenizer in (bare, PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert tokenizer(prompt).input_ids == plain(prompt).input_ids[1:]
        assert tokenizer.get_vocab() == plain.get_vocab()
    assert plain.convert_tokens_to_ids(START) == plain(prompt).input_ids[0]
