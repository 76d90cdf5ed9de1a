"""Prompts from files: what a line may contain, and the error for a bad line."""

import json
from contextlib import nullcontext

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import find_task
from sinklens.tasks.prompts import IdSample, Prompts, read_answers, read_prompts


def test_prompts_are_read_from_text_and_from_json_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\u2028and\x85a half\r\n\n  two $x$\x0c\n".encode())
    assert read_prompts(tmp_path / "a.txt") == ["one\u2028and\x85a half", "  two $x$\x0c"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "one\\ntwo"}\n{"question": "three", "answer": 3}\n')
    assert read_prompts(tmp_path / "a.jsonl") == ["one\ntwo", "three"]
    assert read_prompts(tmp_path / "a.jsonl", 1) == ["one\ntwo"]


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return Prompts(path)


def test_samples_are_the_lines_of_the_file(tmp_path):
    task = write(
        tmp_path / "a.jsonl",
        {"prompt": [2, 287], "expected": [260, 1], "id": "first"},
        {"question": "2 + 2 =", "expected": " 4 "},
    )
    assert task.samples() == [
        IdSample("first", "", "", ids=(2, 287), expected=(260, 1)),
        IdSample("prompts/1", "2 + 2 =", " 4 "),
    ]
    assert task.samples(1) == task.samples()[:1]
    assert find_task("prompts", path=tmp_path / "a.jsonl") == task


@pytest.mark.parametrize(
    ("expected", "text", "ids", "right"),
    [
        ([260, 261, 1], "", (260, 261), True),
        ([260, 261, 1], "", (260,), False),
        ([260, 261, 1], "", (260, 261, 262), False),
        ([260, 261, 1], "", (261, 260), False),
        ([260, 261, 1], "", (), False),
        ("b c", "\n b c ", (5,), True),
        ("b c", "b  c", (5,), False),
    ],
)
def test_ids_are_compared_up_to_the_end_token_and_text_without_surrounding_white_space(
    tmp_path, expected, text, ids, right
):
    (sample,) = write(tmp_path / "a.jsonl", {"prompt": [2], "expected": expected}).samples()
    assert Prompts().judge(sample, text, ids, {1}) is right
    assert Prompts().judge(sample, text, (260, 261, 1), set()) is (right or expected != "b c")  # without end tokens


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", None, r"could not read .*a\.txt"),
        ("a.json", '{"id": 1, "prompt": "one"}', r"a.json contains JSON Lines but does not end in .jsonl.*rename it"),
        ("a.jsonl", "{", r"a.jsonl, line 3 is not valid JSON \(.*\)"),
        ("a.jsonl", {"expected": [1]}, r"line 3: expected a JSON object with a 'prompt' or .*; its keys: expected"),
        ("a.jsonl", {"prompt": None}, r"line 3: the prompt is null; give a text, or a list of token ids such as"),
        ("a.jsonl", {"prompt": 7}, r"line 3: the prompt is 7"),
        ("a.jsonl", {"prompt": [[2, 3]]}, r"line 3: the prompt is \[\[2, 3\]\]"),
        ("a.jsonl", {"prompt": [True]}, r"line 3: the prompt is \[true\]"),
        ("a.jsonl", {"prompt": [2.5]}, r"line 3: the prompt is \[2.5\]"),
        ("a.jsonl", {"prompt": []}, r"line 3: the prompt is \[\]"),
        ("a.jsonl", {"prompt": " "}, r"line 3: the prompt is \" \""),
    ],
)
def test_a_bad_file_of_prompts_is_refused_and_its_line_named(name, content, text, tmp_path):
    if content is not None:
        write(tmp_path / name, *([{"prompt": [2], "expected": [1]}, ""] if name == "a.jsonl" else []), content)
    with pytest.raises(TaskError, match=text):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("lines", "name", "text"),
    [
        *(
            ([line], "a.jsonl", text)
            for line, text in (
                (
                    {"prompt": [2]},
                    r"line 1: no 'expected'; write lines such as \{\"prompt\": \[2, 287, 28\], \"expected\"",
                ),
                ({"prompt": [2], "expected": ""}, r"line 1: the expected answer is \"\""),
                ({"prompt": [2], "expected": {"ids": [1]}}, r"line 1: the expected answer is \{\"ids\": \[1\]\}"),
                ({"prompt": [2], "expected": [1], "id": 7}, r"line 1: the id is 7; give a non-empty text, or omit it"),
            )
        ),
        ([], None, r"the task 'prompts' needs a file; give one \(--prompts FILE\)"),
        ([], "a.txt", r"a.txt does not end in .jsonl; give a JSON Lines file with lines such as"),
        ([], "no.jsonl", r"could not read .*no.jsonl"),
    ],
)
def test_the_task_needs_a_json_lines_file_with_what_is_expected(lines, name, text, tmp_path):
    write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(TaskError, match=text):
        Prompts(name and tmp_path / name).samples()


ONE = {"prompt": "one", "expected": "1"}


@pytest.mark.parametrize(
    ("lines", "limit", "answers"),
    [
        ([ONE, {"question": "two", "answer": 2}, {"prompt": [2, 3], "expected": [4]}], None, {"one": "1", "two": "2"}),
        ([ONE, {"question": "two", "answer": 2}], 1, {"one": "1"}),
        ([{"prompt": "one"}], None, {}),
        ([ONE, {"prompt": "two"}], None, r"line 2: no 'expected' or 'answer', which other"),
        ([ONE | {"expected": True}], None, r"line 1: the answer is true; give a text or a number"),
        ([ONE, {"prompt": "one", "answer": "2"}], None, r"line 2: another line expects another"),
    ],
)
def test_answers_are_read_beside_prompts_and_must_be_complete(tmp_path, lines, limit, answers):
    file = write(tmp_path / "a.jsonl", *lines).path
    with pytest.raises(TaskError, match=answers) if isinstance(answers, str) else nullcontext():
        assert read_answers(file, limit) == answers
    assert read_answers(file.with_suffix(".txt")) == {}
