"""Training rows: their contents, their groups, and batches that depend only on seed and step."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sinklens.tasks import tiny_code, word_problems
from training import pictures, skills
from training.corpus import ANSWER_LENGTH, build_corpus
from training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(with_pictures=True)


def test_a_batch_is_a_function_of_seed_and_step(small, tokenizer):
    corpus = build_corpus(tokenizer, small("tiny-llada"))
    again = build_corpus(tokenizer, small("tiny-llada"))
    length, rows = corpus.batch(1, 7, 8)
    assert torch.equal(rows, again.batch(1, 7, 8)[1])
    assert rows.shape == (8, length + ANSWER_LENGTH)
    others = [corpus.batch(seed, step, 8)[1] for seed, step in ((1, 8), (2, 7))]
    assert not any(torch.equal(rows, other) for other in others)


def test_rows_are_the_texts_padded_with_end_tokens(small, tokenizer):
    recipe = replace(small("tiny-mmada"), code=300, skills=50)
    corpus = build_corpus(tokenizer, recipe)
    seen = Counter()
    for (kind, length), rows in corpus.groups.items():
        for row in rows.tolist():
            prompt, answer = tokenizer.decode(row[1:length]), tokenizer.decode(row[length:])
            assert row[0] == tokenizer.bos_token_id
            assert answer.endswith(tokenizer.eos_token)
            seen[kind, prompt, answer.split(tokenizer.eos_token)[0]] += 1
    problems = word_problems.training(1, recipe.problems)
    captioned = pictures.training(1, recipe.pictures)
    expected = Counter(("problem", p.prompt, " " + p.answer) for p in problems)
    expected += Counter(("draw", *picture.to_draw) for picture in captioned)
    expected += Counter(("describe", *picture.to_describe) for picture in captioned)
    expected += Counter(("code", f.prompt, f.solution) for f in tiny_code.training(1, 300))
    for skill in skills.SKILLS:
        expected += Counter((skill, made.prompt, f" {made.answer}") for made in skills.training(skill, 1, 50))
    assert seen == expected


def test_a_batch_of_problems_only_is_the_same_with_and_without_other_rows(small, tokenizer):
    plain = build_corpus(tokenizer, small("tiny-llada"))
    mixed = build_corpus(tokenizer, replace(small("tiny-llada"), code=300, skills=50))
    same = 0
    for step in range(30):
        length, rows = plain.batch(1, step, 8)
        alone, alike = mixed.batch(1, step, 8, problems_only=True), mixed.batch(1, step, 8)
        assert alone[0] == length
        assert torch.equal(alone[1], rows)
        same += torch.equal(alike[1], rows)
    assert same < 15


def test_without_a_start_token_the_rows_are_otherwise_the_same(small):
    recipe = small("tiny-llada")
    with_start = build_corpus(train_tokenizer(), recipe)
    without = build_corpus(train_tokenizer(start=False), replace(recipe, start_token="absent"))
    for step in range(20):
        length, rows = with_start.batch(1, step, 8)
        shorter, bare = without.batch(1, step, 8)
        assert shorter == length - 1
        assert torch.equal(rows[:, 1:], bare)
