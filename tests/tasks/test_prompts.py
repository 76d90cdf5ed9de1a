"""Prompts from files: what a line may contain, and the error for a bad line."""

import json

import pytest

from sinklens.errors import SinklensError, TaskError
from sinklens.tasks import find_task
from sinklens.tasks.prompts import IdSample, Prompts, read_answers, read_prompts


def test_prompts_are_read_from_text_and_from_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n  two $x$\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", "  two $x$"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "one\\ntwo"}\n{"question": "three", "answer": 3}\n')
    assert read_prompts(tmp_path / "a.jsonl") == ["one\ntwo", "three"]
    assert read_prompts(tmp_path / "a.jsonl", 1) == ["one\ntwo"]


def test_a_byte_order_mark_is_skipped_and_a_line_may_contain_any_character(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\u2028and\x85a half\r\ntwo\x0c\n".encode())
    assert read_prompts(tmp_path / "a.txt") == ["one\u2028and\x85a half", "two\x0c"]
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"prompt": "one\u2028two"}\r\n'.encode())
    assert read_prompts(tmp_path / "a.jsonl") == ["one\u2028two"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("no.txt", None, r"could not read prompts from .*no.txt"),
        ("bytes.txt", b"\xff\xfe\x00", r"could not read prompts"),
        ("empty.txt", b"\n\n", r"holds no prompt; write one per line"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"text": "b"}', r"bad.jsonl, line 2: expected a JSON object with a 'prompt'"),
        ("list.jsonl", b"[1]", r"list.jsonl, line 1: expected a JSON object"),
        (
            "blank.jsonl",
            b'\n{"prompt": "a"}\n\n{"prompt": null}',
            r"line 4: the prompt is null; give a text, or a list",
        ),
        ("number.jsonl", b'{"prompt": 7}', r"line 1: the prompt is 7; give a text, or a list of token ids such as"),
        ("nested.jsonl", b'{"prompt": [[2, 3]]}', r"line 1: the prompt is \[\[2, 3\]\]; give a text"),
        ("true.jsonl", b'{"prompt": [true]}', r"line 1: the prompt is \[true\]; give a text"),
        ("none.jsonl", b'{"prompt": []}', r"line 1: the prompt is \[\]; give a text"),
    ],
)
def test_a_file_without_prompts_is_refused(name, content, text, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SinklensError, match=text):
        read_prompts(tmp_path / name)


def test_json_lines_with_another_extension_are_not_read_as_text(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "one"}\n')
    with pytest.raises(SinklensError, match=r"a.json contains JSON Lines but does not end in .jsonl.*rename it"):
        read_prompts(tmp_path / "a.json")


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


def test_ids_are_compared_up_to_the_end_token_and_text_without_surrounding_white_space(tmp_path):
    ids, text = write(
        tmp_path / "a.jsonl", {"prompt": [2], "expected": [260, 261, 1]}, {"prompt": "a", "expected": "b c"}
    ).samples()
    task = Prompts()
    for given, right in (
        ((260, 261), True),
        ((260,), False),
        ((260, 261, 262), False),
        ((261, 260), False),
        ((), False),
    ):
        assert task.judge(ids, "", given, {1}) is right, given
    assert task.judge(ids, "", (260, 261, 1), set()) is True  # a model without end tokens
    assert task.judge(text, "\n b c ", (5,), {1}) is True
    assert task.judge(text, "b  c", (5,), {1}) is False


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", r"a.jsonl, line 3: not JSON \(.*\); write one object per line"),
        ("[1]", r"line 3: expected a JSON object with a 'prompt' or a 'question'; got \[1\]"),
        ({"expected": [1]}, r"line 3: expected a JSON object with a 'prompt' or a 'question'; its keys: expected"),
        ({"prompt": [2]}, r"line 3: no 'expected'; write lines such as \{\"prompt\": \[2, 287, 28\], \"expected\""),
        ({"prompt": [2.5], "expected": [1]}, r"line 3: the prompt is \[2.5\]; give a text, or a list of token ids"),
        ({"prompt": [], "expected": [1]}, r"line 3: the prompt is \[\]"),
        ({"prompt": " ", "expected": [1]}, r"line 3: the prompt is \" \""),
        ({"prompt": [2], "expected": "5 "[:0]}, r"line 3: the expected answer is \"\""),
        ({"prompt": [2], "expected": {"ids": [1]}}, r"line 3: the expected answer is \{\"ids\": \[1\]\}"),
        ({"prompt": [2], "expected": [1], "id": 7}, r"line 3: the id is 7; give a non-empty text, or omit it"),
    ],
)
def test_the_error_for_a_bad_line_names_it(line, text, tmp_path):
    task = write(tmp_path / "a.jsonl", {"prompt": [2], "expected": [1]}, "", line)
    with pytest.raises(SinklensError, match=text):
        task.samples()


def test_the_task_needs_an_existing_json_lines_file(tmp_path):
    with pytest.raises(TaskError, match=r"the task 'prompts' needs a file; give one \(--prompts FILE\)"):
        find_task("prompts").samples()
    with pytest.raises(TaskError, match=r"a.txt does not end in .jsonl; give a JSON Lines file with lines such as"):
        write(tmp_path / "a.txt", {"prompt": [2], "expected": [1]}).samples()
    with pytest.raises(SinklensError, match=r"could not read prompts from .*no.jsonl"):
        Prompts(tmp_path / "no.jsonl").samples()


def test_answers_are_read_beside_prompts_and_must_be_complete(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"prompt": "one", "expected": "1"}\n{"question": "two", "answer": 2}\n{"prompt": [2, 3], "expected": [4]}\n'
    )
    assert read_answers(file) == {"one": "1", "two": "2"}
    assert read_answers(file, 1) == {"one": "1"}
    file.write_text('{"prompt": "one"}\n')
    assert read_answers(file) == {}
    (tmp_path / "a.txt").write_text("one")
    assert read_answers(tmp_path / "a.txt") == {}
    for lines, message in (
        ('{"prompt": "one", "expected": "1"}\n{"prompt": "two"}', r"line 2: no 'expected' or 'answer', which other"),
        ('{"prompt": "one", "expected": true}', r"line 1: the answer is true; give a text or a number"),
        (
            '{"prompt": "one", "expected": "1"}\n{"prompt": "one", "answer": "2"}',
            r"line 2: another line expects another",
        ),
    ):
        file.write_text(lines)
        with pytest.raises(SinklensError, match=message):
            read_answers(file)
