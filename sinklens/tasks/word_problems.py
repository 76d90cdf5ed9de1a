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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from sinklens.errors import TaskError, require
from sinklens.tasks.base import Sample, Task, check_held_out, check_limit
from sinklens.tasks.generated import first_distinct, training_set
from sinklens.utils.arguments import checked

HELD_OUT_SEED = 20_251_015
HELD_OUT_SIZE = 500
DIGITS = 1000  # Python reads longer integers slowly or not at all
SENTENCES = (r"####\s*", r"(?i:the answer is):?\s*")  # before the number of an answer
NUMBER = r"(-?\$?-?\d+(?:,\d{3})*)"

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


class _Template(NamedTuple):
    """The texts of a kind of problem; `result` names the value that is asked for."""

    question: str
    work: str
    result: str
    low: int = 1
    high: int = 20


_TEMPLATES = {
    "more": _Template(
        "{who} has {a} {item}. {pronoun} {gain} {b} more. How many {item} does {who} have now?",
        "{who} has {a} + {b} = {sum} {item}.",
        "sum",
    ),
    "fewer": _Template(
        "{who} has {a} {item}. {pronoun} {loss} {b} of them. How many {item} are left?",
        "{who} has {a} - {b} = {difference} {item} left.",
        "difference",
    ),
    "groups": _Template(
        "{who} has {a} {boxes}. Each {box} holds {b} {item}. How many {item} are there in total?",
        "There are {a} * {b} = {product} {item}.",
        "product",
        2,
        9,
    ),
    "share": _Template(
        "{who} shares {product} {item} equally among {a} friends. How many {item} does each friend get?",
        "Each friend gets {product} / {a} = {b} {item}.",
        "b",
        2,
        9,
    ),
    "more-then-fewer": _Template(
        "{who} has {a} {item}. {pronoun} {gain} {b} more and then {loss} {d}. How many {item} are left?",
        "{who} has {a} + {b} = {sum}.\nThen {sum} - {d} = {rest}.",
        "rest",
    ),
    "groups-then-more": _Template(
        "{who} has {a} {boxes} of {b} {item} and {gain} {d} more. How many {item} does {who} have now?",
        "{who} has {a} * {b} = {product}.\nThen {product} + {d} = {grown}.",
        "grown",
        2,
        9,
    ),
    "together": _Template(
        "{who} has {a} {item}. {other} has {b} more than {who}. How many {item} do they have together?",
        "{other} has {a} + {b} = {sum}.\nThen {a} + {sum} = {both}.",
        "both",
    ),
}
PROBLEM_KINDS = tuple(_TEMPLATES)
RANGES = {
    "more": ((1, 7), (8, 20), (21, 40), (41, 120)),
    "fewer": ((1, 7), (8, 20), (21, 40), (41, 120)),
    "groups": ((2, 9), (10, 12), (13, 20)),
    "share": ((2, 9), (10, 12), (13, 20)),
}
"""Ranges of the two numbers of a one-step problem, for `in_range`. Training has 1 to 20 for "more" and "fewer", and 2
to 9 for "groups" and "share"; the other ranges are outside it."""


def _drawn(rng: random.Random, kind: str, low: int, high: int) -> Problem:
    """A problem whose first numbers are from `low` to `high`; every draw has its place in the stream."""
    template = _TEMPLATES[kind]
    pronoun = rng.choice(("he", "she"))
    who = rng.choice(NAMES[pronoun])
    other = rng.choice([name for names in NAMES.values() for name in names if name != who])
    item, (boxes, box), when = rng.choice(ITEMS), rng.choice(BOXES), rng.choice(WHEN)
    fewer = kind == "fewer"
    a = rng.randint(low + fewer, high)
    b = rng.randint(low, a - 1 if fewer else high)
    d = rng.randint(1, min(20, a + b - 1) if "{loss}" in template.question else 20) if "{d}" in template.question else 0
    values: dict[str, Any] = {
        "who": who, "pronoun": pronoun.capitalize(), "other": other, "item": item, "boxes": boxes, "box": box,
        "a": a, "b": b, "d": d, "sum": a + b, "difference": a - b, "product": a * b, "rest": a + b - d,
        "grown": a * b + d, "both": 2 * a + b,
    }  # fmt: skip
    for word, choices in (("gain", GAINS), ("loss", LOSSES)):
        if f"{{{word}}}" in template.question:
            values[word] = rng.choice(choices)
    result = int(values[template.result])
    question, work = (text.format(**values) for text in (template.question, template.work))
    return Problem(kind, when + question, f"{work}\n#### {result}", result)


def stream(seed: int) -> Iterator[Problem]:
    """Yield problems endlessly, all kinds equally likely; equal seeds give equal streams."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(PROBLEM_KINDS)
        yield _drawn(rng, kind, _TEMPLATES[kind].low, _TEMPLATES[kind].high)


@checked
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
    require(kind in RANGES, f"in_range has the kinds {', '.join(RANGES)}; got {kind!r}.", TaskError)
    require(1 <= low < high, f"low and high must satisfy 1 <= low < high; got {low} and {high}.", TaskError)
    rng = random.Random(f"{HELD_OUT_SEED} {kind} {low} {high}")
    return first_distinct((_drawn(rng, kind, low, high) for _ in count()), attrgetter("question"), size)


def training(seed: int, size: int) -> list[Problem]:
    """The first `size` problems of another seed whose questions are not held out.

    Raises:
        TaskError: `seed` is the held-out seed.
    """
    return training_set(stream, attrgetter("question"), held_out(), seed=seed, held_out_seed=HELD_OUT_SEED, size=size)


@checked
def read_answer(text: str) -> int | None:
    """The number that an answer states: after the first ``####``, else after ``The answer is``; None without one.

    Commas between thousands and a dollar sign are left out.

    >>> read_answer("Tom has 5 + 7 = 12 apples.\\n#### 12")
    12
    >>> read_answer("5 + 7 = 12. The answer is 12.")
    12
    >>> read_answer("I do not know") is None
    True
    """
    match = next(filter(None, (re.search(sentence + NUMBER, text) for sentence in SENTENCES)), None)
    digits = match[1].replace(",", "").replace("$", "") if match else ""
    return int(digits) if 0 < len(digits) <= DIGITS else None


@dataclass(frozen=True)
class TinyGsm(Task):
    """The 500 held-out problems as a task; an answer is judged by the number that `read_answer` finds.

    Caveat: a correct number after incorrect work counts as right, as in GSM8K.
    """

    name = "tiny-gsm"

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        return [
            Sample(f"tiny-gsm/{number}", problem.prompt, f" {problem.answer}", kind=problem.kind)
            for number, problem in enumerate(held_out()[:limit])
        ]

    def extract(self, text: str) -> str | None:
        number = read_answer(text)
        return None if number is None else str(number)
