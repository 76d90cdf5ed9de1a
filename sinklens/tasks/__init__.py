"""Tasks: problems with answers that can be checked."""

from sinklens.tasks.base import Sample
from sinklens.tasks.registry import NAMES, find_task
from sinklens.tasks.word_problems import Problem, held_out, read_answer

__all__ = [
    "NAMES",
    "Problem",
    "Sample",
    "find_task",
    "held_out",
    "read_answer",
]
