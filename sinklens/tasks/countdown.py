"""Countdown: reach a number with an expression that uses each given number once.

An answer is right if it is an expression of +, −, *, / and parentheses whose value is the target, computed in exact
fractions, and that uses each number exactly once. A part "= 24" at its end is ignored. An answer is *malformed* if it
is no such expression.

The shipped problems are generated and have a solution. A file has the published format of Countdown-Tasks-3to4 (Pan,
2025): JSON Lines with ``nums``, a list of integers, and ``target``, an integer. The prompt is our own.

Pitfall: a solution of a file's problem is found by trying all expressions, which takes seconds from six numbers on.
"""

import ast
import operator
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

from sinklens.errors import TaskError
from sinklens.tasks.base import Sample, Task, check_limit
from sinklens.tasks.generated import first_distinct
from sinklens.tasks.published import read_objects

HELD_OUT_SEED = 20_251_123
HELD_OUT_SIZE = 300
LONGEST = 200  # characters of an expression
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class CountdownSample(Sample):
    """A problem: the numbers, and what they shall give."""

    numbers: tuple[int, ...] = ()
    target: int = 0


@dataclass(frozen=True)
class Countdown(Task):
    """Countdown problems of three or four numbers.

    Attributes:
        path: a file of problems; None for the generated ones.
    """

    path: Path | None = None

    @property
    def name(self) -> str:
        return "countdown"

    def samples(self, limit: int | None = None) -> list[CountdownSample]:
        check_limit(limit)
        if self.path is None:
            problems = first_distinct(_stream(), lambda problem: problem, HELD_OUT_SIZE)
        else:
            rows = read_objects(self.path, {"nums": list, "target": int})
            problems = [(_integers(row["nums"], number), row["target"]) for number, row in enumerate(rows)]
        return [_sample(number, *problem) for number, problem in enumerate(problems[:limit])]

    def extract(self, text: str) -> str | None:
        """The expression of an answer: in <answer> tags, or its first line with text."""
        tagged = TAG.search(text)
        lines = (tagged[1] if tagged else text).strip().splitlines()
        return (lines[0].partition("=")[0].strip() or None) if lines else None

    def verdict(self, sample: Sample, text: str) -> bool:
        assert isinstance(sample, CountdownSample)
        found = read_expression(self.extract(text) or "")
        return found is not None and sorted(found[1]) == sorted(sample.numbers) and found[0] == sample.target

    def malformed(self, sample: Sample, text: str) -> bool:
        return read_expression(self.extract(text) or "") is None


def read_expression(text: str) -> tuple[Fraction | None, tuple[int, ...]] | None:
    """The value of an expression, None if it divides by zero, and its numbers; None if it is no expression."""
    if len(text) > LONGEST:
        return None
    try:
        return _value(ast.parse(text.replace("×", "*").replace("÷", "/").replace("−", "-"), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> tuple[Fraction | None, tuple[int, ...]]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return Fraction(number), (number,)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATORS:
            (first, some), (second, more) = _value(left), _value(right)
            if first is None or second is None or (isinstance(operation, ast.Div) and second == 0):
                return None, some + more
            return OPERATORS[type(operation)](first, second), some + more
    raise ValueError(f"{ast.dump(node):.40} is no part of an expression")


def _integers(found: list[Any], number: int) -> tuple[int, ...]:
    if not found or not all(type(one) is int for one in found):
        raise TaskError(f"problem {number}: nums must be a list of integers; got {found!r:.60}.")
    return tuple(found)


def _sample(number: int, numbers: tuple[int, ...], target: int) -> CountdownSample:
    solution = solve(numbers, target)
    if solution is None:
        raise TaskError(f"problem {number}: {target} cannot be made from {list(numbers)}; remove it.")
    prompt = f"Numbers: {' '.join(map(str, numbers))}\nTarget: {target}\nAnswer:"
    return CountdownSample(f"countdown/{number}", prompt, f" {solution}", numbers=numbers, target=target)


def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """An expression of all numbers whose value is `target`, without outer parentheses; None if there is none."""
    found = _reach([(Fraction(number), str(number)) for number in numbers], Fraction(target))
    return None if found is None else found.removeprefix("(").removesuffix(")") if len(numbers) > 1 else found


def _reach(parts: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    """Combine two parts in every manner, and so on, until one is left."""
    if len(parts) == 1:
        return parts[0][1] if parts[0][0] == target else None
    for first, second in combinations(range(len(parts)), 2):
        rest = [part for place, part in enumerate(parts) if place not in (first, second)]
        for combined in _combined(parts[first], parts[second]):
            found = _reach([*rest, combined], target)
            if found is not None:
                return found
    return None


def _combined(one: tuple[Fraction, str], other: tuple[Fraction, str]) -> Iterator[tuple[Fraction, str]]:
    (a, left), (b, right) = one, other
    yield a + b, f"({left} + {right})"
    yield a * b, f"({left} * {right})"
    yield a - b, f"({left} - {right})"
    yield b - a, f"({right} - {left})"
    if b:
        yield a / b, f"({left} / {right})"
    if a:
        yield b / a, f"({right} / {left})"


def _stream() -> Iterator[tuple[tuple[int, ...], int]]:
    """Problems whose target is a number from 10 to 99 that some expression reaches."""
    rng = random.Random(HELD_OUT_SEED)
    while True:
        numbers = tuple(rng.randint(1, 25) for _ in range(rng.choice((3, 4))))
        value = Fraction(numbers[0])
        for number in numbers[1:]:
            value = rng.choice((operator.add, operator.sub, operator.mul))(value, number)
        if 10 <= value <= 99:
            yield numbers, int(value)
