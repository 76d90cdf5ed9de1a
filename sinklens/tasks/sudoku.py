"""Sudoku on a grid of 4 × 4, or of 9 × 9 from a file: fill the empty cells, which are 0.

An answer is right if its digits form a complete grid with every digit once in each row, column and box, and keep the
given ones. White space and the characters ``|``, ``,`` and ``-`` between the digits are ignored. An answer is
*malformed* if anything else is in it, or the number of its digits is another one.

The shipped puzzles are generated and have one solution. A file has the published format: CSV with the columns
``Puzzle`` and ``Solution``, each a row of digits. The prompt is our own.
"""

import csv
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

from sinklens.errors import TaskError
from sinklens.tasks.base import Sample, Task, check_limit
from sinklens.tasks.countdown import TAG
from sinklens.tasks.generated import first_distinct

HELD_OUT_SEED = 20_251_124
HELD_OUT_SIZE = 300
EMPTY = (4, 8)  # cells of a generated puzzle
SIZES = (16, 81)


@dataclass(frozen=True)
class SudokuSample(Sample):
    """A puzzle: its cells row by row, 0 where they are empty."""

    cells: str = ""


@dataclass(frozen=True)
class Sudoku(Task):
    """Sudoku puzzles.

    Attributes:
        path: a file of puzzles; None for the generated ones.
    """

    path: Path | None = None

    @property
    def name(self) -> str:
        return "sudoku"

    def samples(self, limit: int | None = None) -> list[SudokuSample]:
        check_limit(limit)
        puzzles = (
            first_distinct(_stream(), lambda puzzle: puzzle, HELD_OUT_SIZE) if self.path is None else _read(self.path)
        )
        return [_sample(number, *puzzle) for number, puzzle in enumerate(puzzles[:limit])]

    def extract(self, text: str) -> str | None:
        """The digits of an answer: in <answer> tags, or all; None if it holds anything else."""
        tagged = TAG.search(text)
        digits = re.sub(r"[\s|,\-]", "", tagged[1] if tagged else text)
        return digits if digits.isascii() and digits.isdigit() else None

    def verdict(self, sample: Sample, text: str) -> bool:
        assert isinstance(sample, SudokuSample)
        digits = self.extract(text) or ""
        kept = all(given in ("0", digit) for given, digit in zip(sample.cells, digits, strict=False))
        return len(digits) == len(sample.cells) and kept and is_complete(digits)

    def malformed(self, sample: Sample, text: str) -> bool:
        assert isinstance(sample, SudokuSample)
        return len(self.extract(text) or "") != len(sample.cells)


def is_complete(digits: str) -> bool:
    """Whether every row, column and box holds each digit once."""
    side = isqrt(len(digits))
    wanted = {str(digit) for digit in range(1, side + 1)}
    return all({digits[place] for place in unit} == wanted for unit in _units(side))


def _units(side: int) -> list[list[int]]:
    """The cells of each row, column and box."""
    box, cells = isqrt(side), range(side)
    rows = [[row * side + column for column in cells] for row in cells]
    columns = [[row * side + column for row in cells] for column in cells]
    boxes = [
        [(top + place // box) * side + left + place % box for place in cells]
        for top in range(0, side, box)
        for left in range(0, side, box)
    ]
    return rows + columns + boxes


def _sample(number: int, cells: str, solution: str) -> SudokuSample:
    side = isqrt(len(cells))
    rows = "\n".join(cells[start : start + side] for start in range(0, len(cells), side))
    answer = "\n".join(solution[start : start + side] for start in range(0, len(cells), side))
    prompt = f"Sudoku:\n{rows}\nAnswer:\n"
    return SudokuSample(f"sudoku/{number}", prompt, answer, kind=f"{cells.count('0')} empty", cells=cells)


def _read(path: Path) -> list[tuple[str, str]]:
    """The puzzles and solutions of a CSV file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TaskError(
            f"{path} cannot be read ({error}); give a CSV file with the columns Puzzle, Solution."
        ) from error
    if not rows:
        raise TaskError(f"{path} holds no puzzle; give a CSV file with the columns Puzzle, Solution.")
    return [_checked(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _checked(row: dict[str, str], where: str) -> tuple[str, str]:
    puzzle, solution = ((row.get(name) or "").strip() for name in ("Puzzle", "Solution"))
    fits = len(puzzle) == len(solution) and all(one in ("0", two) for one, two in zip(puzzle, solution, strict=False))
    if len(puzzle) not in SIZES or not fits or not is_complete(solution):
        raise TaskError(
            f"{where}: the Puzzle {puzzle!r:.20} and its Solution {solution!r:.20} must be 16 or 81 digits each, the "
            f"puzzle's with 0 for empty cells, and the solution valid."
        )
    return puzzle, solution


def _stream() -> Iterator[tuple[str, str]]:
    """Puzzles of 4 × 4 with one solution each."""
    rng = random.Random(HELD_OUT_SEED)
    while True:
        grids = list(_solutions("0" * 16, rng))[:1]
        cells = list(grids[0])
        empty = rng.randint(*EMPTY)
        for place in rng.sample(range(16), 16):
            digit, cells[place] = cells[place], "0"
            if len(list(_solutions("".join(cells), rng, 2))) > 1:
                cells[place] = digit
            if cells.count("0") == empty:
                yield "".join(cells), grids[0]
                break


def _solutions(cells: str, rng: random.Random, most: int = 1) -> Iterator[str]:
    """Up to `most` solutions, in random order."""
    if "0" not in cells:
        yield cells
        return
    place, side = cells.index("0"), isqrt(len(cells))
    taken = {cells[other] for unit in _units(side) if place in unit for other in unit}
    left = most
    for digit in rng.sample([str(one) for one in range(1, side + 1)], side):
        if digit not in taken:
            for found in _solutions(cells[:place] + digit + cells[place + 1 :], rng, left):
                yield found
                left -= 1
                if not left:
                    return
