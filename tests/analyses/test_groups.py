"""Groups of prompts: templates, columns of files, and shared text."""

import json
from itertools import islice

import pytest

from sinklens.analyses.groups import sharing, template_groups
from sinklens.errors import SinklensError
from sinklens.tasks import held_out
from sinklens.tasks.prompts import read_groups
from sinklens.tasks.word_problems import stream, template_of


def test_the_template_of_any_word_problem_is_read_from_its_prompt():
    problems = list(islice(stream(seed=3), 700))
    assert [template_of(problem.prompt) for problem in problems] == [problem.kind for problem in problems]
    assert template_of("Question: Tom has 3 apples. Why?\nAnswer:") is None


def test_prompts_have_template_groups_only_if_all_are_word_problems():
    prompts = [problem.prompt for problem in held_out(5)]
    assert template_groups(prompts) == [problem.kind for problem in held_out(5)]
    assert template_groups([*prompts, "Is it?"]) is None
    assert template_groups([[2, 5, 6]]) is None


def test_the_share_of_prompts_that_share_a_stretch_ignores_numbers_copies_and_what_all_have():
    head = "Answer in one word and explain nothing at all please."
    two = [
        f"The shop of {name} sells {count} red pens and blue pens each day." for name, count in (("A", 3), ("A", 14))
    ]
    other = "Nobody knows where the ship went after the storm had passed over the bay."
    shares = (
        ([f"{head} {text}" for text in (*two, other)], 2 / 3),
        ([f"{head} first", f"{head} second one", f"{head} third"], 0),
        (["only one", other], 0),
        ([[*range(9), 1], [*range(9), 2], [7, 7]], 2 / 3),
        ([], 0),
        ([other, other, "a short prompt"], 0),
    )
    for prompts, share in shares:
        assert sharing(prompts) == pytest.approx(share), prompts


def test_groups_are_read_from_a_column(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x", "author": author}) for author in ("Ann", 7, "Ann")))
    assert (read_groups(file, "author"), read_groups(file, "author", 1)) == (["Ann", "7", "Ann"], ["Ann"])
    with pytest.raises(SinklensError, match=r"line 1: the group of the prompt is null; .*'book'.*prompt, author"):
        read_groups(file, "book")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SinklensError, match=r"has no columns.*write JSON Lines"):
        read_groups(tmp_path / "a.txt", "author")
