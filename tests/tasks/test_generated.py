"""Generated sets: reproducible, without repetitions, and separate; the items of each are recorded by hash."""

import hashlib
from itertools import count, islice

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import skills, tiny_code, word_problems
from sinklens.tasks.generated import distinct, first_distinct, training_set
from training import pictures


def stream(seed):
    """seed, seed, seed + 1, seed + 1, ..."""
    return (seed + number // 2 for number in count())


def last_digit(number):
    return number % 10


def test_distinct_items_keep_their_order_and_their_first_occurrence():
    assert list(distinct([3, 13, 4, 3, 24, 5], last_digit)) == [3, 4, 5]
    assert first_distinct(stream(8), last_digit, 4) == [8, 9, 10, 11]
    assert first_distinct(stream(8), last_digit, 0) == []


def test_a_training_set_leaves_out_held_out_identities_and_keeps_repetitions():
    found = training_set(stream, last_digit, [11, 12], seed=30, held_out_seed=7, size=6)
    assert found == [30, 30, 33, 33, 34, 34]
    assert found == [number for number in islice(stream(30), 10) if number % 10 not in (1, 2)]


def test_the_held_out_seed_cannot_be_trained_on():
    with pytest.raises(TaskError, match="seed 7 is the held-out seed; train on any other seed"):
        training_set(stream, last_digit, [], seed=7, held_out_seed=7, size=1)


RECORDED = {
    "problems": (
        lambda: (word_problems.held_out(), word_problems.training(1, 5000)),
        ("ab3d71d836544d5b", "fa82c723cd75a944"),
    ),
    "functions": (
        lambda: (tiny_code.held_out(), tiny_code.training(1, 5000)),
        ("066d85ec27f8f67e", "fc585c070c6da25e"),
    ),
    "pictures": (lambda: (pictures.held_out(), pictures.training(1, 5000)), ("b3d7d65b4dbbc7c7", "5c061fad3cef6fc3")),
} | {
    skill: (lambda skill=skill: (skills.held_out(skill), skills.training(skill, 1, 5000)), hashes)
    for skill, hashes in {
        "copy": ("18a18a56f77aeb65", "bc0292d0efcfe342"),
        "compare": ("e7a3b6a67069ad07", "9df9f33b349bd190"),
        "plan": ("0968f3ee6bd58089", "5f359ff52579a85f"),
        "compose": ("9bf9d0d8c4b8b383", "9c7d569798728ff8"),
    }.items()
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_items_are_those_that_the_shipped_models_were_trained_and_scored_on(name):
    make, expected = RECORDED[name]
    assert tuple(hashlib.sha256(repr(items).encode()).hexdigest()[:16] for items in make()) == expected
