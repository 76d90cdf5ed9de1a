"""Random cases of samplers: how many, and what is compared."""

import random
from collections.abc import Callable
from itertools import groupby

import published_rules as rules
import pytest

PARTS = [range(3), *(range(first, first + 50) for first in range(3, 203, 50))]
in_parts = pytest.mark.parametrize(
    "cases", [PARTS[0], *(pytest.param(some, marks=pytest.mark.extended) for some in PARTS[1:])], ids=str
)
"""Of 203 cases, the first three are part of `make test`."""


def distinct(canvases: list[rules.Ids]) -> list[rules.Ids]:
    """Without repetitions: in a batch, a row may wait for the others."""
    return [canvas for canvas, _ in groupby(canvases)]


def determined(compare: Callable[[random.Random], None], name: str) -> None:
    """Compare one case; where the rules leave a choice open, another one is drawn."""
    for attempt in range(50):
        try:
            return compare(random.Random(f"{name} {attempt}"))
        except rules.UndeterminedError:
            continue
    raise AssertionError(f"no case {name} without equal scores")
