"""Tasks: samples with prompts, and verdicts on a model's answers.

A `Task` keeps every setting that can change a score (examples in the prompt, how the answer is read) in its fields, so
equal tasks have equal prompts and verdicts. A *verdict* is True or False if the text alone decides. It is None if a
program has to run; `sinklens.evaluation.sandbox` runs programs; this package does not.

An answer can also be *malformed*: not an answer of the required form. A model that has lost the form has not
necessarily lost the skill; tables list malformed answers separately.

Pitfall: text after the answer must not be judged with it. `Task.stop` defines where an answer ends, and a verdict
ignores everything after that, whether or not the generation was cut there.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sinklens.errors import TaskError, require
from sinklens.utils.integers import as_integer


@dataclass(frozen=True)
class Sample:
    """One prompt of a task and its reference answer.

    Attributes:
        id: unique within its task and the same in every run, e.g. "tiny-gsm/17".
        prompt: the text given to the model; one user turn if a chat template is used.
        reference: a complete correct answer, as it would follow the prompt.
        opening: prefix that the answer is forced to begin with, after the prompt or at the start of the assistant's
            turn; part of neither `reference` nor the text passed to a verdict.
        kind: category of the sample, for tables; "" if there are no categories.
    """

    id: str
    prompt: str
    reference: str
    opening: str = ""
    kind: str = ""


@dataclass(frozen=True)
class CodeSample(Sample):
    """A function to complete.

    Attributes:
        stub: signature and docstring; the completion is appended to it.
        test: code that defines ``check(candidate)``.
        entry_point: name of the function.
    """

    stub: str = ""
    test: str = ""
    entry_point: str = ""


class Task(ABC):
    """Base class of tasks: samples, and verdicts on answers; subclasses are frozen dataclasses of their settings."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The task's name in `sinklens.tasks.find_task`."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer and are not part of it."""
        return ()

    @abstractmethod
    def samples(self, limit: int | None = None) -> Sequence[Sample]:
        """Return the first `limit` samples, or all, in a fixed order.

        Raises:
            TaskError: the data cannot be read.
        """

    @abstractmethod
    def extract(self, text: str) -> str | None:
        """The part of `text` that a verdict compares; None if there is no such part."""

    def verdict(self, sample: Sample, text: str) -> bool | None:
        """Whether `text` answers `sample` correctly; None if a program has to run to decide.

        By default, whether `extract` finds the same in `text` as in the reference.
        """
        return self.extract(text) == self.extract(sample.reference)

    def malformed(self, sample: Sample, text: str) -> bool | None:
        """Whether `text` lacks the required form of an answer, right or wrong; None if the task requires no form.

        By default, whether `extract` finds nothing.
        """
        return self.extract(text) is None

    def judge(self, sample: Sample, text: str, ids: Sequence[int], end_ids: Collection[int]) -> bool | None:
        """Like `verdict`, for tasks that may also look at token ids.

        Args:
            text: the answer; "" for a model without a tokenizer.
            ids: the answer's tokens before the first end token.
            end_ids: the model's end tokens.
        """
        return self.verdict(sample, text)


class CodeTask(Task):
    """A task whose answers are programs in HumanEval's format."""

    def verdict(self, sample: Sample, text: str) -> None:
        """Always None: the text does not decide; the completion has to run."""

    def malformed(self, sample: Sample, text: str) -> None:
        """Always None: whether a completion is a program is decided where it runs."""

    def extract(self, text: str) -> str:
        """The completion up to the first of `stop`."""
        return cut(text, self.stop)


def cut(text: str, stop: Iterable[str]) -> str:
    """`text` up to the first occurrence of any of `stop`.

    >>> cut("    return 1\\nprint(f(2))", ("\\ndef", "\\nprint"))
    '    return 1'
    """
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


def check_limit(limit: int | None) -> None:
    """Refuse a limit below 1.

    Raises:
        TaskError: `limit` is not an integer, or below 1.
    """
    number = as_integer(limit)
    require(
        limit is None or (number is not None and number >= 1),
        f"limit is {limit!r}; give the number of samples, at least 1, or None for all.",
        TaskError,
    )


def check_held_out(size: int, most: int) -> None:
    """Refuse more held-out problems than `most`: further ones may have been trained on.

    Raises:
        TaskError: `size` is not between 0 and `most`.
    """
    if (number := as_integer(size)) is None or not 0 <= number <= most:
        raise TaskError(f"give 0 to {most} held-out problems, as further ones may have been trained on; got {size!r}.")
