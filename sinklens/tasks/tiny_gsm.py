"""The held-out word problems as a task, which measures the accuracy of the shipped models.

Caveat: a correct number after incorrect work counts as right, as in GSM8K.
"""

from dataclasses import dataclass

from sinklens.tasks.base import Sample, Task, check_limit
from sinklens.tasks.word_problems import held_out, read_answer


@dataclass(frozen=True)
class TinyGsm(Task):
    """500 problems of `sinklens.tasks.word_problems`; an answer is judged by the number after its first ``####``."""

    @property
    def name(self) -> str:
        return "tiny-gsm"

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        return [
            Sample(f"tiny-gsm/{number}", problem.prompt, f" {problem.answer}", kind=problem.kind)
            for number, problem in enumerate(held_out()[:limit])
        ]

    def extract(self, text: str) -> str | None:
        number = read_answer(text)
        return None if number is None else str(number)
