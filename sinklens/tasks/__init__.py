"""Tasks: problems with answers that can be checked."""

from sinklens.tasks.base import CodeSample, CodeTask, Sample, Task
from sinklens.tasks.registry import NAMES, find_task
from sinklens.tasks.word_problems import Problem, held_out, read_answer

__all__ = [
    "NAMES",
    "CodeSample",
    "CodeTask",
    "Problem",
    "Sample",
    "Task",
    "find_task",
    "held_out",
    "read_answer",
]
