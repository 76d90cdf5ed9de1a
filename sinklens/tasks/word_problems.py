"""Templated word problems whose answers end like GSM8K's: ``#### 42``.

A *problem* is a question and a worked answer of one or two arithmetic steps. The worked answer states every
intermediate result, so a model has to compute instead of guessing. Problems are drawn from a seeded generator: the same
seed gives the same problems on every machine. The held-out set has a reserved seed, and training sets leave out all of
its questions (`sinklens.tasks.generated`).

Known failure: a name or noun that the tokenizer splits into several tokens makes an answer longer than the positions
that the models were trained on. `tests/tasks` checks that every vocabulary word is one token.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from sinklens.errors import TaskError
from sinklens.tasks.base import Sample, Task, check_held_out, check_limit
from sinklens.tasks.generated import first_distinct, training_set

HELD_OUT_SEED = 20_251_015
HELD_OUT_SIZE = 500

NAMES = {
    "he": ("Tom", "Ben", "Sam", "Leo", "Max", "Dan", "Ali", "Jack"),
    "she": ("Mia", "Ana", "Eva", "Zoe", "Lily", "Nora", "Kim", "Rosa"),
}
ITEMS = ("apples", "books", "pens", "coins", "eggs", "cards", "shells", "stamps",
         "marbles", "cookies", "balls", "stones", "flowers", "toys", "cups", "kites")  # fmt: skip
BOXES = (("boxes", "box"), ("bags", "bag"), ("trays", "tray"), ("shelves", "shelf"), ("jars", "jar"))
WHEN = ("", "", "", "On Monday, ", "In the morning, ", "At school, ", "Last week, ", "At the market, ")
GAINS = ("buys", "finds", "gets", "wins")
LOSSES = ("gives away", "loses", "sells", "drops")


@dataclass(frozen=True)
class Problem:
    """One word problem.

    Attributes:
        kind: the template, one of `PROBLEM_KINDS`.
        question: the text of the question, without the prompt format.
        answer: the worked answer; its last line is ``#### <result>``.
        result: the number that the question asks for.
    """

    kind: str
    question: str
    answer: str
    result: int

    @property
    def prompt(self) -> str:
        """The text that a model gets; `answer` follows after one space."""
        return f"Question: {self.question}\nAnswer:"


@dataclass(frozen=True)
class _Cast:
    """The people and things of one problem."""

    who: str
    pronoun: str
    other: str
    item: str
    box: tuple[str, str]
    when: str


def _cast(rng: random.Random) -> _Cast:
    pronoun = rng.choice(("he", "she"))
    who = rng.choice(NAMES[pronoun])
    other = rng.choice([name for names in NAMES.values() for name in names if name != who])
    return _Cast(who, pronoun.capitalize(), other, rng.choice(ITEMS), rng.choice(BOXES), rng.choice(WHEN))


def _more(rng: random.Random, c: _Cast, low: int = 1, high: int = 20) -> tuple[str, str, int]:
    a, b = rng.randint(low, high), rng.randint(low, high)
    gain = rng.choice(GAINS)
    question = (
        f"{c.when}{c.who} has {a} {c.item}. {c.pronoun} {gain} {b} more. How many {c.item} does {c.who} have now?"
    )
    return question, f"{c.who} has {a} + {b} = {a + b} {c.item}.", a + b


def _fewer(rng: random.Random, c: _Cast, low: int = 1, high: int = 20) -> tuple[str, str, int]:
    a = rng.randint(low + 1, high)
    b = rng.randint(low, a - 1)
    question = (
        f"{c.when}{c.who} has {a} {c.item}. {c.pronoun} {rng.choice(LOSSES)} {b} of them. How many {c.item} are left?"
    )
    return question, f"{c.who} has {a} - {b} = {a - b} {c.item} left.", a - b


def _groups(rng: random.Random, c: _Cast, low: int = 2, high: int = 9) -> tuple[str, str, int]:
    a, b = rng.randint(low, high), rng.randint(low, high)
    question = (
        f"{c.when}{c.who} has {a} {c.box[0]}. Each {c.box[1]} holds {b} {c.item}. How many {c.item} are there in total?"
    )
    return question, f"There are {a} * {b} = {a * b} {c.item}.", a * b


def _share(rng: random.Random, c: _Cast, low: int = 2, high: int = 9) -> tuple[str, str, int]:
    a, b = rng.randint(low, high), rng.randint(low, high)
    question = (
        f"{c.when}{c.who} shares {a * b} {c.item} equally among {a} friends. How many {c.item} does each friend get?"
    )
    return question, f"Each friend gets {a * b} / {a} = {b} {c.item}.", b


def _more_then_fewer(rng: random.Random, c: _Cast) -> tuple[str, str, int]:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    d = rng.randint(1, min(20, a + b - 1))
    question = (
        f"{c.when}{c.who} has {a} {c.item}. {c.pronoun} {rng.choice(GAINS)} {b} more and then "
        f"{rng.choice(LOSSES)} {d}. How many {c.item} are left?"
    )
    return question, f"{c.who} has {a} + {b} = {a + b}.\nThen {a + b} - {d} = {a + b - d}.", a + b - d


def _groups_then_more(rng: random.Random, c: _Cast) -> tuple[str, str, int]:
    a, b, d = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 20)
    question = (
        f"{c.when}{c.who} has {a} {c.box[0]} of {b} {c.item} and {rng.choice(GAINS)} {d} more. "
        f"How many {c.item} does {c.who} have now?"
    )
    return question, f"{c.who} has {a} * {b} = {a * b}.\nThen {a * b} + {d} = {a * b + d}.", a * b + d


def _together(rng: random.Random, c: _Cast) -> tuple[str, str, int]:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    question = (
        f"{c.when}{c.who} has {a} {c.item}. {c.other} has {b} more than {c.who}. "
        f"How many {c.item} do they have together?"
    )
    return question, f"{c.other} has {a} + {b} = {a + b}.\nThen {a} + {a + b} = {2 * a + b}.", 2 * a + b


_TEMPLATES = {
    "more": _more,
    "fewer": _fewer,
    "groups": _groups,
    "share": _share,
    "more-then-fewer": _more_then_fewer,
    "groups-then-more": _groups_then_more,
    "together": _together,
}
PROBLEM_KINDS = tuple(_TEMPLATES)
_ONE_STEP: dict[str, Callable[..., tuple[str, str, int]]] = {
    "more": _more,
    "fewer": _fewer,
    "groups": _groups,
    "share": _share,
}
RANGES = {
    "more": ((1, 7), (8, 20), (21, 40), (41, 120)),
    "fewer": ((1, 7), (8, 20), (21, 40), (41, 120)),
    "groups": ((2, 9), (10, 12), (13, 20)),
    "share": ((2, 9), (10, 12), (13, 20)),
}
"""Ranges of the two numbers of a one-step problem, for `in_range`. Training has 1 to 20 for "more" and "fewer", and 2
to 9 for "groups" and "share"; the other ranges are outside it."""


def stream(seed: int) -> Iterator[Problem]:
    """Yield problems endlessly, all kinds equally likely; equal seeds give equal streams."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(PROBLEM_KINDS)
        question, work, result = _TEMPLATES[kind](rng, _cast(rng))
        yield Problem(kind, question, f"{work}\n#### {result}", result)


def held_out(size: int = HELD_OUT_SIZE) -> list[Problem]:
    """The first `size` distinct problems of the held-out seed, in a fixed order.

    Raises:
        TaskError: `size` is negative, or more than are held out.
    """
    check_held_out(size, HELD_OUT_SIZE)
    return first_distinct(stream(HELD_OUT_SEED), attrgetter("question"), size)


_OPENING = r"Question: (?:[\w ]+, )?\w+ "
_QUESTIONS = {
    "more": r"has \d+ \w+\. \w+ \w+ \d+ more\. How many \w+ does \w+ have now\?",
    "fewer": r"has \d+ \w+\. \w+ [\w ]+ \d+ of them\. How many \w+ are left\?",
    "groups": r"has \d+ \w+\. Each \w+ holds \d+ \w+\. How many \w+ are there in total\?",
    "share": r"shares \d+ \w+ equally among \d+ friends\. How many \w+ does each friend get\?",
    "more-then-fewer": r"has \d+ \w+\. \w+ \w+ \d+ more and then [\w ]+ \d+\. How many \w+ are left\?",
    "groups-then-more": r"has \d+ \w+ of \d+ \w+ and \w+ \d+ more\. How many \w+ does \w+ have now\?",
    "together": r"has \d+ \w+\. \w+ has \d+ more than \w+\. How many \w+ do they have together\?",
}


def template_of(prompt: str) -> str | None:
    """The template of a word problem, one of `PROBLEM_KINDS`, read from its prompt; None for any other text."""
    matches = (kind for kind, question in _QUESTIONS.items() if re.fullmatch(f"{_OPENING}{question}\nAnswer:", prompt))
    return next(matches, None)


def in_range(kind: str, low: int, high: int, size: int) -> list[Problem]:
    """The first `size` distinct problems of a one-step kind with both numbers from `low` to `high`.

    In "share" the numbers are the friends and what each gets. Within the trained range, some of these problems may also
    be in a training set.

    Args:
        kind: "more", "fewer", "groups" or "share".

    Raises:
        TaskError: `kind` has two steps or does not exist, or the range is empty.
    """
    if kind not in _ONE_STEP:
        raise TaskError(f"in_range has the kinds {', '.join(_ONE_STEP)}; got {kind!r}.")
    if not 1 <= low < high:
        raise TaskError(f"low and high must satisfy 1 <= low < high; got {low} and {high}.")
    rng = random.Random(f"{HELD_OUT_SEED} {kind} {low} {high}")

    def problems() -> Iterator[Problem]:
        while True:
            question, work, result = _ONE_STEP[kind](rng, _cast(rng), low, high)
            yield Problem(kind, question, f"{work}\n#### {result}", result)

    return first_distinct(problems(), attrgetter("question"), size)


def training(seed: int, size: int) -> list[Problem]:
    """The first `size` problems of another seed whose questions are not held out.

    Raises:
        TaskError: `seed` is the held-out seed.
    """
    return training_set(stream, attrgetter("question"), held_out(), seed=seed, held_out_seed=HELD_OUT_SEED, size=size)


def read_answer(text: str) -> int | None:
    """The number after the first ``####`` in `text`; None if there is no such number.

    >>> read_answer("Tom has 5 + 7 = 12 apples.\\n#### 12")
    12
    >>> read_answer("I do not know") is None
    True
    """
    match = re.search(r"####\s*(-?\d+)", text)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class TinyGsm(Task):
    """The 500 held-out problems as a task; an answer is judged by the number after its first ``####``.

    Caveat: a correct number after incorrect work counts as right, as in GSM8K.
    """

    @property
    def name(self) -> str:
        return "tiny-gsm"

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        return [
            Sample(f"tiny-gsm/{number}", problem.prompt, f" {problem.answer}", kind=problem.kind)
            for number, problem in enumerate(held_out()[:limit])
        ]

    def extract(self, text: str) -> str | None:
        number = read_answer(text)
        return None if number is None else str(number)
