"""Countdown and Sudoku: every solution counts, and nothing else does."""

import json
from fractions import Fraction
from itertools import permutations, product

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import find_task
from sinklens.tasks.countdown import Countdown, read_expression, solve
from sinklens.tasks.sudoku import Sudoku, is_complete


@pytest.mark.parametrize("name", ["countdown", "sudoku"])
def test_generated_problems_are_distinct_and_solved(name):
    task = find_task(name)
    samples = task.samples()
    assert len({sample.prompt for sample in samples}) == len({sample.id for sample in samples}) == len(samples) == 300
    assert all(
        task.verdict(sample, sample.reference) and not task.malformed(sample, sample.reference) for sample in samples
    )
    assert list(task.samples(5)) == list(samples[:5])


@pytest.fixture
def countdown(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"nums": [3, 7, 25], "target": 46}) + "\n")
    task = Countdown(file)
    return task, task.samples()[0]


@pytest.mark.parametrize(
    ("text", "right", "malformed"),
    [
        (" 3 * 7 + 25", True, False),
        ("25+(7×3) = 46\nNumbers: 1", True, False),
        ("I add.\n<answer> (25 + 7 * 3) </answer>", True, False),
        ("3 * 7 + 25 + 0", False, False),
        ("25 + 21", False, False),
        ("46", False, False),
        ("3 * 25 - 7", False, False),
        ("25 / (7 - 7) * 3", False, False),
        ("3 ** 7 + 25", False, True),
        ("__import__('os')", False, True),
        ("25 + -(3 * 7)", False, True),
        ("", False, True),
        ("(" * 150 + "3" + ")" * 150, False, True),
    ],
)
def test_an_expression_counts_if_it_reaches_the_target_with_each_number_once(countdown, text, right, malformed):
    task, sample = countdown
    assert task.verdict(sample, text) is right
    assert task.malformed(sample, text) is malformed


def test_solutions_exist_exactly_where_trying_all_expressions_finds_one():
    """All orders, operators and the two groupings of three numbers."""
    for numbers in ((2, 3, 5), (1, 4, 6)):
        reached = set()
        for (a, b, c), first, second in product(permutations(numbers), "+-*/", "+-*/"):
            for text in (f"({a} {first} {b}) {second} {c}", f"{a} {first} ({b} {second} {c})"):
                found = read_expression(text)
                reached |= {found[0]} - {None}
        for target in range(-5, 40):
            solution = solve(numbers, target)
            assert (solution is not None) == (Fraction(target) in reached), target
            assert solution is None or (read_expression(solution)[0], sorted(read_expression(solution)[1])) == (
                target, sorted(numbers),
            )  # fmt: skip


def test_problems_of_a_file_that_cannot_be_used_are_refused(tmp_path):
    file = tmp_path / "problems.jsonl"
    for line, message in (
        ({"nums": [1, 1], "target": 50}, r"problem 0: 50 cannot be made from \[1, 1\]"),
        ({"nums": ["1"], "target": 1}, r"nums must be a list of integers"),
        ({"nums": [1, 2]}, r"line 1 has no usable target; it needs nums \(list\), target \(int\)"),
    ):
        file.write_text(json.dumps(line) + "\n")
        with pytest.raises(TaskError, match=message):
            Countdown(file).samples()


PUZZLE, SOLUTION = "1002203100133124", "1342243142133124"


@pytest.fixture
def sudoku(tmp_path):
    file = tmp_path / "puzzles.csv"
    file.write_text(f"Puzzle,Solution\n{PUZZLE},{SOLUTION}\n")
    task = Sudoku(file)
    return task, task.samples()[0]


@pytest.mark.parametrize(
    ("text", "right", "malformed"),
    [
        (SOLUTION, True, False),
        ("1 3 4 2\n2 4 3 1\n4 2 1 3\n3 1 2 4", True, False),
        ("<answer>|1342|\n|2431|\n|4213|\n|3124|</answer> Done.", True, False),
        (SOLUTION[:-1], False, True),
        (f"It is {SOLUTION}", False, True),
        ("3142" + SOLUTION[4:], False, False),
        (SOLUTION[:4] * 4, False, False),
        ("2341" + "1432" + "4123" + "3214", False, False),
    ],
)
def test_a_grid_counts_if_it_is_complete_and_keeps_the_given_cells(sudoku, text, right, malformed):
    task, sample = sudoku
    assert task.verdict(sample, text) is right
    assert task.malformed(sample, text) is malformed


def test_generated_puzzles_have_one_solution():
    for sample in find_task("sudoku").samples(6):
        empty = [place for place, cell in enumerate(sample.cells) if cell == "0"]
        count = 0
        for digits in product("1234", repeat=len(empty)):
            cells = list(sample.cells)
            for place, digit in zip(empty, digits, strict=True):
                cells[place] = digit
            count += is_complete("".join(cells))
        assert count == 1


def test_puzzles_of_a_file_that_cannot_be_used_are_refused(tmp_path):
    file = tmp_path / "puzzles.csv"
    file.write_text(f"Puzzle,Solution\n{PUZZLE},{SOLUTION[::-1]}\n")
    with pytest.raises(TaskError, match=r"row 1: the Puzzle '10022.*must be 16 or 81 digits each"):
        Sudoku(file).samples()
    file.write_text("Puzzle,Solution\n")
    with pytest.raises(TaskError, match=r"holds no puzzle"):
        Sudoku(file).samples()
    with pytest.raises(TaskError, match=r"cannot be read"):
        Sudoku(tmp_path / "none.csv").samples()
