"""All tasks: answers end at the task's stop texts, and completions are judged by running them."""

from dataclasses import dataclass
from functools import partial

import pytest
from programs import program

from sinklens.errors import TaskError
from sinklens.tasks import word_problems
from sinklens.tasks.base import CodeSample, CodeTask, cut
from training import skills


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


def test_a_completion_is_judged_only_by_running_it_up_to_its_stop_text():
    task = Doubling()
    (sample,) = task.samples()
    exec(program(task, sample, "    return x * 2\n\ndef other():\n    raise SystemExit\n"), {})
    with pytest.raises(AssertionError, match=r"^(assert.*)?$"):
        exec(program(task, sample, "    return x * 3"), {})
    assert task.verdict(sample, "    return x * 2") is None


@pytest.mark.parametrize("held_out", [word_problems.held_out, partial(skills.held_out, "copy")])
def test_no_more_than_the_held_out_problems_are_returned(held_out):
    most = len(held_out())
    assert (held_out(0), held_out(20)) == ([], held_out()[:20])
    for size in (-1, most + 1):
        with pytest.raises(TaskError, match=rf"give 0 to {most} held-out problems, .* got {size}\."):
            held_out(size)
