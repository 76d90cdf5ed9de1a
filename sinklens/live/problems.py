"""The problems of the tasks that ship with the package, as prompts of the lab; and the number that an answer states.

Pitfall: an answer states only the number after ``####``. Any other number may be part of a calculation, a unit or a
name, so answers without the mark are compared as text.
"""

from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Any

from sinklens.live.refusal import require
from sinklens.runs import Answer
from sinklens.tasks import NAMES, Sample, find_task, read_answer

SHIPPED = tuple(name for name in NAMES if name.startswith("tiny-"))
"""Tasks whose problems need no file and no network."""


@cache
def samples(task: str) -> Sequence[Sample]:
    """The problems of a task in `SHIPPED`."""
    return find_task(task).samples()


def listed() -> list[dict[str, Any]]:
    """Names and sizes of the tasks."""
    return [{"name": name, "size": len(samples(name))} for name in SHIPPED]


def problem(task: str, index: int) -> Sample:
    """One problem.

    Raises:
        Refused: there is no such task or index.
    """
    require(task in SHIPPED, f"no task of the lab is called {task!r:.40}; known: {', '.join(SHIPPED)}.", 404)
    size = len(samples(task))
    require(0 <= index < size, f"{task} has problems 0 to {size - 1}; got {index}.", 404)
    return samples(task)[index]


def right(task: str, index: int, answer: Answer, ids: list[int], end_ids: Sequence[int]) -> bool | None:
    """Whether an answer solves the problem; None if a program would have to run to decide.

    Args:
        ids: the answer's tokens.
    """
    kept = tuple(takewhile(lambda token: token not in end_ids, ids))
    return find_task(task).judge(problem(task, index), answer.text or "", kept, end_ids)


def stated_number(text: str | None) -> str | None:
    """The number that an answer states after ``####``; None if it states none.

    >>> stated_number("Tom has 5 + 7 = 12 apples.\n#### 12"), stated_number("It is 1,250 now.")
    ('12', None)
    """
    marked = read_answer(text or "")
    return None if marked is None else str(marked)


def example() -> str:
    """The prompt that the page offers at first."""
    return problem(SHIPPED[0], 0).prompt
