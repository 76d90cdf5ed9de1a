"""Generated sets: reproducible, without repetitions, and separate; the items of each are recorded by hash."""

import hashlib
from functools import partial
from operator import attrgetter

import pytest

from sinklens.tasks import tiny_code, word_problems
from training import pictures, skills


def of_skill(skill):
    return partial(skills.held_out, skill), partial(skills.training, skill), attrgetter("prompt"), skills.HELD_OUT_SEED


def of(module, identity):
    return module.held_out, module.training, attrgetter(identity), module.HELD_OUT_SEED


SETS = {  # name -> held-out items, training items, what must differ, the held-out seed; hashes of the items
    "problems": (of(word_problems, "question"), ("ab3d71d836544d5b", "fa82c723cd75a944")),
    "functions": (of(tiny_code, "identity"), ("066d85ec27f8f67e", "fc585c070c6da25e")),
    "pictures": (of(pictures, "caption"), ("b3d7d65b4dbbc7c7", "5c061fad3cef6fc3")),
    "copy": (of_skill("copy"), ("18a18a56f77aeb65", "bc0292d0efcfe342")),
    "compare": (of_skill("compare"), ("e7a3b6a67069ad07", "9df9f33b349bd190")),
    "plan": (of_skill("plan"), ("0968f3ee6bd58089", "5f359ff52579a85f")),
    "compose": (of_skill("compose"), ("9bf9d0d8c4b8b383", "9c7d569798728ff8")),
}


@pytest.mark.parametrize("name", SETS)
def test_the_items_are_those_that_the_shipped_models_were_trained_and_scored_on(name):
    (held_out, training, _, _), expected = SETS[name]
    both = (held_out(), training(1, 5000))
    assert tuple(hashlib.sha256(repr(items).encode()).hexdigest()[:16] for items in both) == expected


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", SETS)
def test_held_out_items_are_distinct_and_never_trained_on(name):
    (held_out, training, identity, seed), _ = SETS[name]
    excluded = {identity(item) for item in held_out()}
    assert len(excluded) == len(held_out())
    assert not excluded & {identity(item) for item in training(1, 20_000)}
    assert training(9, 50) == training(9, 50) != training(10, 50)
    with pytest.raises(ValueError, match="train on any other seed"):
        training(seed, 1)
