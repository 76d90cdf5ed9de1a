"""What a task is: samples with a prompt each, and a verdict on what a model answered.

A `Task` holds every setting that moves a score (examples in the prompt, how the answer is read) in its own fields, so
two tasks that are equal ask and judge alike. A *verdict* is True or False where the text alone decides. Where a program
has to run it is None; `sinklens.evaluation.sandbox` runs programs, nothing here does.

One way this fails: text after the answer is judged with it. `Task.stop` says where an answer ends, and a verdict looks
at nothing behind it, whether or not the generation was cut there.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sinklens.errors import TaskError


@dataclass(frozen=True)
class Sample:
    """One thing to answer.

    Attributes:
        id: unique within its task and the same in every run, e.g. "tiny-gsm/17".
        prompt: the text a model is given, as one user turn where there is a chat template.
        reference: a right answer in full, as it would follow the prompt.
        opening: what the answer is made to begin with: it follows the prompt, or stands at the start of the
            assistant's turn; not part of `reference` and not of the text that a verdict is given.
        kind: what kind of sample it is, for tables; "" where there are no kinds.
        chance: the probability that the guess described in `Task.guess` is right.
    """

    id: str
    prompt: str
    reference: str
    opening: str = ""
    kind: str = ""
    chance: float = 0.0


@dataclass(frozen=True)
class CodeSample(Sample):
    """A function to complete.

    Attributes:
        stub: signature and docstring, which the completion is put behind.
        test: code that defines ``check(candidate)``.
        entry_point: name of the function.
    """

    stub: str = ""
    test: str = ""
    entry_point: str = ""


class Task(ABC):
    """Samples and how answers to them are judged; subclasses are frozen dataclasses of their settings."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As `sinklens.tasks.find_task` knows it."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer; none of them belongs to it."""
        return ()

    @property
    def guess(self) -> str:
        """The guess that `chance` is the accuracy of; "" where answers are open and `chance` is 0."""
        return ""

    @property
    def chance(self) -> float:
        """Expected accuracy of `guess`, in [0, 1]: the mean of the samples' chances."""
        return 0.0

    @abstractmethod
    def samples(self, limit: int | None = None) -> Sequence[Sample]:
        """The first `limit` samples, or all, in a fixed order.

        Raises:
            TaskError: the data cannot be read.
        """

    @abstractmethod
    def extract(self, text: str) -> str | None:
        """What a verdict reads out of `text`; None if there is nothing to read."""

    @abstractmethod
    def verdict(self, sample: Sample, text: str) -> bool | None:
        """Whether `text` answers `sample`; None if a program has to run to tell."""

    def judge(self, sample: Sample, text: str, ids: Sequence[int], end_ids: Collection[int]) -> bool | None:
        """`verdict`, for tasks that may also look at token ids.

        Args:
            text: the answer; "" of a model without a tokenizer.
            ids: the answer's tokens before the first end token.
            end_ids: the model's end tokens.
        """
        return self.verdict(sample, text)


class CodeTask(Task):
    """A task whose answers are programs in HumanEval's format."""

    def verdict(self, sample: Sample, text: str) -> None:
        """Never known from the text: the completion has to run."""

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
    """Refuse a number of samples that is not at least 1.

    Raises:
        TaskError: it is 0 or negative.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"limit is {limit}; give the number of samples, at least 1, or None for all.")


def check_held_out(size: int, most: int) -> None:
    """Refuse a number of held-out problems that are not there: those beyond `most` may have been trained on.

    Raises:
        TaskError: `size` is not between 0 and `most`.
    """
    if not 0 <= size <= most:
        raise TaskError(f"{most} problems are held out, and those beyond may have been trained on; got {size}.")
