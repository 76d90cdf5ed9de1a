"""What all tasks share: answers end where the task says, and programs are put together in HumanEval's order."""

from dataclasses import dataclass
from functools import partial

import pytest

from sinklens import SinklensError
from sinklens.errors import TaskError
from sinklens.tasks import skills, word_problems
from sinklens.tasks.base import CodeSample, CodeTask, Sample, cut


@dataclass(frozen=True)
class Doubling(CodeTask):
    @property
    def name(self):
        return "doubling"

    @property
    def stop(self):
        return ("\ndef", "\nprint")

    def samples(self, limit=None):
        stub = 'def double(x):\n    """Two times x."""\n'
        test = "def check(candidate):\n    assert candidate(4) == 8\n"
        return [CodeSample("doubling/0", stub, "    return x * 2", stub=stub, test=test, entry_point="double")]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("one\ndef two", "one"),
        ("one\nprint(1)\ndef two", "one"),
        ("one print def", "one print def"),
        ("\ndef", ""),
        ("", ""),
    ],
)
def test_an_answer_ends_before_the_first_of_the_stop_texts(text, kept):
    assert cut(text, ("\ndef", "\nprint")) == kept
    assert cut(text, ()) == text


def test_a_program_is_stub_completion_test_and_call():
    task = Doubling()
    (sample,) = task.samples()
    program = task.program(sample, "    return x * 2\n\ndef other():\n    raise SystemExit\n")
    assert program == (
        'def double(x):\n    """Two times x."""\n    return x * 2\n\n'
        "def check(candidate):\n    assert candidate(4) == 8\n\ncheck(double)\n"
    )
    exec(program, {})
    with pytest.raises(AssertionError, match=r"^(assert.*)?$"):
        exec(task.program(sample, "    return x * 3"), {})
    assert task.verdict(sample, "    return x * 2") is None


def test_a_sample_without_a_test_makes_no_program():
    with pytest.raises(TaskError, match="sample other/0 has no test to run; take the samples of the task 'doubling'"):
        Doubling().program(Sample("other/0", "a", "b"), "c")
    assert issubclass(TaskError, SinklensError)


@pytest.mark.parametrize("held_out", [word_problems.held_out, partial(skills.held_out, "copy")])
def test_only_held_out_problems_are_given_as_such(held_out):
    most = len(held_out())
    assert len(held_out(0)) == 0
    for size in (-1, most + 1):
        with pytest.raises(TaskError, match=rf"{most} problems are held out, and those beyond .* got {size}\."):
            held_out(size)
