"""Word problems: answers are right, seeds are reproducible, held-out questions stay apart, words are single tokens."""

import re

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import held_out, read_answer
from sinklens.tasks.word_problems import PROBLEM_KINDS, RANGES, in_range, training
from training.tokenizer import END, MASK, START, train_tokenizer


@pytest.fixture(scope="module")
def problems():
    return training(seed=9, size=3000)


def test_every_worked_step_is_correct_arithmetic_and_the_last_line_is_the_result(problems):
    assert {problem.kind for problem in problems} == set(PROBLEM_KINDS)
    for problem in problems:
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.answer)
        assert 1 <= len(steps) <= 2
        for a, sign, b, c in steps:
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
            assert value == int(c), problem
        assert problem.answer.endswith(f"\n#### {steps[-1][3]}")
        assert problem.result == int(steps[-1][3]) >= 0
        assert {steps[0][0], steps[0][2]} <= set(re.findall(r"\d+", problem.question))


def test_numbers_and_vocabulary_words_are_single_tokens(problems):
    tokenizer = train_tokenizer(problems=5000)
    for problem in problems[:500]:
        for word in re.findall(r" [A-Za-z]+| \d+", f" {problem.question} {problem.answer}"):
            assert len(tokenizer(word, add_special_tokens=False).input_ids) == 1, word


@pytest.mark.extended
def test_the_shipped_tokenizer_is_the_one_that_training_produces(tiny_llada):
    trained = train_tokenizer()
    assert trained.get_vocab() == tiny_llada.tokenizer.get_vocab()
    ids = trained(held_out(1)[0].prompt).input_ids
    assert ids == tiny_llada.tokenizer(held_out(1)[0].prompt).input_ids
    assert ids[0] == trained.convert_tokens_to_ids(START)
    assert trained.decode(ids[1:]) == held_out(1)[0].prompt
    assert (trained.eos_token, trained.mask_token) == (END, MASK)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", 42), ("a\n####7", 7), ("#### -3", -3), ("42", None), ("####", None), ("#### 1\n#### 2", 1),
        ("The answer is 12.", 12), ("so the answer is: $1,234.", 1234), ("The answer is 3.\n#### 4", 4),
        ("#### 12, then 5", 12), ("The answer is unknown", None), ("#### " + "9" * 5000, None),
    ],
)  # fmt: skip
def test_the_first_number_that_an_answer_states_is_read(text, number):
    assert read_answer(text) == number


@pytest.mark.parametrize("kind", RANGES)
def test_problems_in_a_range_have_both_numbers_in_it_and_a_correct_result(kind):
    for low, high in RANGES[kind]:
        problems = in_range(kind, low, high, 20)
        assert len({problem.question for problem in problems}) == 20
        for problem in problems:
            a, b = (int(n) for n in re.findall(r"\d+", problem.question))
            if kind == "share":
                a, b = b, a // b
            assert low <= min(a, b) <= max(a, b) <= high
            expected = {"more": a + b, "fewer": a - b, "groups": a * b, "share": b}[kind]
            assert problem.result == expected == int(problem.answer.rpartition("#### ")[2])


@pytest.mark.parametrize(("given", "text"), [
    (("together", 1, 20), "in_range has the kinds more, fewer, groups, share; got 'together'"),
    (("more", 9, 2), "low and high must satisfy 1 <= low < high; got 9 and 2"),
])  # fmt: skip
def test_a_kind_with_two_steps_and_an_empty_range_are_refused(given, text):
    with pytest.raises(TaskError, match=text):
        in_range(*given, 5)
