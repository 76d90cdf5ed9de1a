"""All tasks: answers end at the task's stop texts, and no more problems are returned than are held out."""

from functools import partial

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import word_problems
from training import skills


@pytest.mark.parametrize("held_out", [word_problems.held_out, partial(skills.held_out, "copy")])
def test_no_more_than_the_held_out_problems_are_returned(held_out):
    most = len(held_out())
    assert (held_out(0), held_out(20)) == ([], held_out()[:20])
    for size in (-1, most + 1):
        with pytest.raises(TaskError, match=rf"give 0 to {most} held-out problems, .* got {size}\."):
            held_out(size)
