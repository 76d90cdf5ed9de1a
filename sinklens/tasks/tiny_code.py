"""A set of small functions in HumanEval's format: given the signature and docstring, write the body.

A *function* is drawn from a template of `sinklens.tasks.functions`: a name, parameters, constants and a wording. Its
fields are HumanEval's: the prompt ends where the body begins, the canonical solution follows, and the test defines
``check(candidate)``. Functions are indented by one space. So the body follows its prompt after one space, like every
answer of the tiny models, and uses three tokens fewer of the few that an answer may have.

A function is held out by its name, parameters and body together: this combination never occurs in training, whatever
the wording of the docstring. Limitation: both sets use the same templates, so a good score shows that a model fills
known patterns with combinations of names and constants that it did not see, not that it can program.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from sinklens.tasks.base import CodeSample, CodeTask, check_limit
from sinklens.tasks.functions import TEMPLATES, Template, Value
from sinklens.tasks.generated import distinct, training_set
from sinklens.tasks.word_problems import ITEMS

HELD_OUT_SEED = 20_251_017
HELD_OUT_EACH = 3

PARAMETERS = {
    "number": tuple("abcdekmnstwxyz"),
    "two numbers": tuple("abcdekmnstwxyz"),
    "list": ITEMS,
    "any list": ITEMS,
    "word": ("word", "text", "name", "line", "note", "title", "key", "label", "month", "s", "t", "w"),
}
FUNCTION_KINDS = tuple(TEMPLATES)


@dataclass(frozen=True)
class Function:
    """One function of the set.

    Attributes:
        kind: the template, one of `FUNCTION_KINDS`.
        entry_point: its name.
        parameters: their names.
        doc: the docstring.
        body: the expression that is returned.
        constants: the constants in the body, in ascending order.
    """

    kind: str
    entry_point: str
    parameters: tuple[str, ...]
    doc: str
    body: str
    constants: tuple[int, ...]

    @property
    def identity(self) -> tuple[str, tuple[str, ...], str]:
        """Name, parameters and body, which decide whether a function is held out."""
        return self.entry_point, self.parameters, self.body

    @property
    def prompt(self) -> str:
        """Signature and docstring; `solution` follows directly."""
        return f'def {self.entry_point}({", ".join(self.parameters)}):\n """{self.doc}"""\n'

    @property
    def solution(self) -> str:
        """The canonical body."""
        return f" return {self.body}"

    @property
    def test(self) -> str:
        """Code that defines ``check(candidate)``."""
        value = TEMPLATES[self.kind].value
        lines = [
            f"    assert candidate({', '.join(map(repr, inputs))}) == {value(*inputs, *self.constants)!r}"
            for inputs in _inputs(TEMPLATES[self.kind], self.constants)
        ]
        return "def check(candidate):\n" + "\n".join(lines) + "\n"


def _inputs(template: Template, constants: tuple[int, ...]) -> list[tuple[Value, ...]]:
    """Arguments that distinguish the function from similar ones, e.g. those whose constants differ by one."""
    near = sorted({number + shift for number in constants for shift in (-1, 0, 1)})
    if template.takes == "number":
        return [(number,) for number in sorted({*near, 0, 1, 2, 3, 7, 12, 60, 61, -4, -9, *range(20, 50, 7)})]
    if template.takes == "two numbers":
        return [(3, 5), (5, 3), (4, 4), (0, 7), (-2, 6), (9, -1), (20, 13), (8, 8)]
    if template.takes == "word":
        return [("ab",), ("Tom",), ("x",), ("Many cups",)]
    lists = [[3, 1, 2, 9, 4], [5, 5, 0, 8, 8, 1], [7, 2, 6, 2, 11, 3, 10], [*near, 3, *constants, 15, 0, 6]]
    short = [[], [0], [4], [-2, 2], *([number] for number in near)]
    return [(numbers,) for numbers in (lists if template.takes == "list" else short + lists)]


def stream(seed: int) -> Iterator[Function]:
    """Yield functions endlessly, all templates equally likely; equal seeds give equal streams."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(FUNCTION_KINDS)
        template = TEMPLATES[kind]
        parameters = tuple(rng.sample(PARAMETERS[template.takes], 2 if template.takes == "two numbers" else 1))
        constants: tuple[int, ...] = ()
        if template.constants is not None:
            low, high = template.constants
            constants = tuple(sorted(rng.sample(range(low, high + 1), 2 if "{j}" in template.body else 1)))
        words = dict(zip("xy", parameters, strict=False)) | dict(zip("kj", reversed(constants), strict=False))
        doc = rng.choice(template.docs).format(**words)
        yield Function(kind, rng.choice(template.names), parameters, doc, template.body.format(**words), constants)


def held_out() -> list[Function]:
    """The first `HELD_OUT_EACH` distinct functions of each template of the held-out seed, in a fixed order."""
    seen: Counter[str] = Counter()

    def is_early(function: Function) -> bool:
        seen[function.kind] += 1
        return seen[function.kind] <= HELD_OUT_EACH

    functions = distinct(stream(HELD_OUT_SEED), attrgetter("identity"))
    return list(islice(filter(is_early, functions), HELD_OUT_EACH * len(FUNCTION_KINDS)))


def training(seed: int, size: int) -> list[Function]:
    """The first `size` functions of another seed that are not held out under any docstring.

    Raises:
        TaskError: `seed` is the held-out seed.
    """
    return training_set(stream, attrgetter("identity"), held_out(), seed=seed, held_out_seed=HELD_OUT_SEED, size=size)


@dataclass(frozen=True)
class TinyCode(CodeTask):
    """Three functions of each template to complete; a completion counts if its test passes."""

    name = "tiny-code"
    stop = ("\ndef", "\nclass", "\n#", "\nif", "\nprint")

    def samples(self, limit: int | None = None) -> list[CodeSample]:
        check_limit(limit)
        return [
            CodeSample(
                f"tiny-code/{number}",
                function.prompt,
                function.solution,
                kind=function.kind,
                stub=function.prompt,
                test=function.test,
                entry_point=function.entry_point,
            )
            for number, function in enumerate(held_out()[:limit])
        ]
