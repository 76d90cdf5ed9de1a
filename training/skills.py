"""Four separate skills, each with a chance level: copying, comparing, planning, composing.

An *exercise* is a short prompt whose answer is one line of words. Exercises are drawn from a seeded generator; held-out
ones never occur in training.

- *copy*: repeat a list of three to eight different words.
- *compare*: who of two people has more or less, who of three has the most or least given only two comparisons, and
  whether one number is more than another.
- *plan*: pass something from one person to another in exactly two steps. The first person can give it to two others,
  and two others can give it to the last; only one person is on both lists, so neither end alone determines the answer.
- *compose*: apply two named operations to a list, in the given order.

*Chance* is the accuracy of a guess that does everything except the skill: the listed words in a random order; one of
the two people, or of yes and no; one of the two people to whom the first can give it; the most frequent rearrangement.
Pitfall: do not compare a score with 0 if guessing already reaches one half.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from math import factorial
from operator import attrgetter
from statistics import fmean

from sinklens.errors import TaskError, nearest
from sinklens.tasks.base import Sample, Task, check_held_out, check_limit
from sinklens.tasks.generated import first_distinct, training_set
from sinklens.tasks.word_problems import ITEMS, NAMES

HELD_OUT_SEED = 20_251_018
HELD_OUT_SIZE = 300

PEOPLE = NAMES["he"] + NAMES["she"]
OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "reverse": lambda words: words[::-1],
    "rotate": lambda words: [*words[1:], words[0]],
    "swap": lambda words: [words[1], words[0], *words[2:]],
    "drop": lambda words: words[1:],
    "cut": lambda words: words[:-1],
}


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        kind: the form of the exercise within its skill.
        prompt: the text that a model gets; `answer` follows after one space.
        answer: words separated by single spaces.
        chance: the probability that the skill's guess is right.
    """

    kind: str
    prompt: str
    answer: str
    chance: float


def _copy(rng: random.Random) -> Exercise:
    size = rng.randint(3, 8)
    words = " ".join(rng.sample(ITEMS + PEOPLE, size))
    return Exercise(f"{size} words", f"Copy: {words}\nAnswer:", words, 1 / factorial(size))


def _two(rng: random.Random) -> Exercise:
    (a, b), item = rng.sample(PEOPLE, 2), rng.choice(ITEMS)
    x, y = rng.sample(range(1, 100), 2)
    more = rng.random() < 0.5
    question = f"{a} has {x} {item}. {b} has {y} {item}. Who has {'more' if more else 'less'}?"
    return Exercise("two", f"Question: {question}\nAnswer:", a if (x > y) == more else b, 1 / 2)


def _three(rng: random.Random) -> Exercise:
    ranked = rng.sample(PEOPLE, 3)
    comparisons = [f"{ranked[i]} has more than {ranked[i + 1]}." for i in range(2)]
    rng.shuffle(comparisons)
    most = rng.random() < 0.5
    question = f"{' '.join(comparisons)} Who has the {'most' if most else 'least'}?"
    return Exercise("three", f"Question: {question}\nAnswer:", ranked[0 if most else 2], 1 / 2)


def _true(rng: random.Random) -> Exercise:
    x, y = rng.sample(range(1, 100), 2)
    more = rng.random() < 0.5
    question = f"Is {x} {'more' if more else 'less'} than {y}?"
    return Exercise("true", f"Question: {question}\nAnswer:", "yes" if (x > y) == more else "no", 1 / 2)


def _compare(rng: random.Random) -> Exercise:
    return rng.choice((_two, _three, _true))(rng)


def _plan(rng: random.Random) -> Exercise:
    start, middle, goal, aside, beyond, other = rng.sample(PEOPLE, 6)
    links = [(start, middle), (middle, goal), (start, aside), (aside, beyond), (other, goal)]
    rng.shuffle(links)
    listed = ", ".join(f"{a} to {b}" for a, b in links)
    prompt = f"Ways: {listed}. How does {start} get to {goal}?\nAnswer:"
    return Exercise("two steps", prompt, f"{start} to {middle} to {goal}", 1 / 2)


def _compose(rng: random.Random) -> Exercise:
    words = rng.sample(ITEMS, rng.randint(3, 5))
    first, second = rng.sample(tuple(OPERATIONS), 2)
    answer = OPERATIONS[second](OPERATIONS[first](words))
    prompt = f"Words: {' '.join(words)}\nDo: {first} then {second}\nAnswer:"
    return Exercise(f"{len(words)} words", prompt, " ".join(answer), _chance_of_composing(len(words)))


def _chance_of_composing(size: int) -> float:
    """Share of the pairs of different operations on `size` words that give the most frequent result."""
    words = [str(number) for number in range(size)]
    results = [tuple(OPERATIONS[b](OPERATIONS[a](words))) for a, b in permutations(OPERATIONS, 2)]
    return max(map(results.count, results)) / len(results)


_MAKERS = {"copy": _copy, "compare": _compare, "plan": _plan, "compose": _compose}
SKILLS = tuple(_MAKERS)


def stream(skill: str, seed: int) -> Iterator[Exercise]:
    """Yield exercises of one skill endlessly; equal seeds give equal streams.

    Raises:
        TaskError: no skill has this name.
    """
    if skill not in _MAKERS:
        raise TaskError(f"no skill is called {skill!r}; known: {', '.join(SKILLS)}.{nearest(skill, SKILLS)}")
    rng = random.Random(f"{skill} {seed}")
    return iter(lambda: _MAKERS[skill](rng), None)


def held_out(skill: str, size: int = HELD_OUT_SIZE) -> list[Exercise]:
    """The first `size` distinct exercises of the held-out seed, in a fixed order.

    Raises:
        TaskError: `size` is negative, or more than are held out.
    """
    check_held_out(size, HELD_OUT_SIZE)
    return first_distinct(stream(skill, HELD_OUT_SEED), attrgetter("prompt"), size)


def training(skill: str, seed: int, size: int) -> list[Exercise]:
    """The first `size` exercises of another seed whose prompts are not held out.

    Raises:
        TaskError: `seed` is the held-out seed.
    """
    return training_set(
        partial(stream, skill),
        attrgetter("prompt"),
        held_out(skill),
        seed=seed,
        held_out_seed=HELD_OUT_SEED,
        size=size,
    )


@dataclass(frozen=True)
class Skill(Task):
    """One skill as a task; an answer is right if it consists of exactly the reference's words in their order.

    Attributes:
        skill: one of `SKILLS`.
    """

    skill: str

    @property
    def name(self) -> str:
        return f"skill-{self.skill}"

    @property
    def chance(self) -> float:
        return fmean(exercise.chance for exercise in held_out(self.skill))

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        return [
            Sample(
                f"{self.name}/{number}",
                exercise.prompt,
                f" {exercise.answer}",
                kind=exercise.kind,
            )
            for number, exercise in enumerate(held_out(self.skill)[:limit])
        ]

    def extract(self, text: str) -> str | None:
        return " ".join(text.split()) or None
