"""Tasks: problems with answers that can be checked."""

from sinklens.tasks.word_problems import Problem, held_out, read_answer

__all__ = ["Problem", "held_out", "read_answer"]
