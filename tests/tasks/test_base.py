"""All tasks: answers end at the task's stop texts, and no more problems are returned than are held out."""

from functools import partial

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import word_problems
from sinklens.tasks.base import cut
from training import skills


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


@pytest.mark.parametrize("held_out", [word_problems.held_out, partial(skills.held_out, "copy")])
def test_no_more_than_the_held_out_problems_are_returned(held_out):
    most = len(held_out())
    assert (held_out(0), held_out(20)) == ([], held_out()[:20])
    for size in (-1, most + 1):
        with pytest.raises(TaskError, match=rf"give 0 to {most} held-out problems, .* got {size}\."):
            held_out(size)
