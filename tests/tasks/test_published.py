"""Data of published tasks: what a file must contain, and the error without a network."""

import gzip

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import find_task, published
from sinklens.tasks.published import HubSet, read_file, read_hub

LINE = '{"question": "Q?", "answer": "#### 1", "more": 3}\n'


ZIPPED = gzip.compress(LINE.encode())


@pytest.mark.parametrize(
    ("name", "content", "question"),
    [
        ("a.jsonl", (LINE + "\n" + LINE).encode(), "Q?"),
        ("a.jsonl.gz", ZIPPED, "Q?"),
        ("a.jsonl", '{"question": "one\u2028two", "answer": "x"}\r\n'.encode(), "one\u2028two"),
        ("a.jsonl", b"\xef\xbb\xbf" + LINE.encode(), "Q?"),
    ],
    ids=["plain", "zipped", "line separator", "byte order mark"],  # explicit, as zipped bytes contain the time
)
def test_lines_are_read(tmp_path, name, content, question):
    (tmp_path / name).write_bytes(content)
    assert {tuple(record.items()) for record in read_file(tmp_path / name, ("question",))} == {
        (("question", question),)
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\n", r"a\.jsonl is empty; write one prompt per line, or one JSON object"),
        ("a.jsonl", b"question,answer\n", r"a\.jsonl, line 1 is not valid JSON"),
        (
            "a.jsonl",
            (LINE + '{"question": "Q?"}\n').encode(),
            r"a\.jsonl, line 2 has no text in answer; the task reads",
        ),
        ("a.jsonl", b'{"question": "Q?", "answer": 3}\n', r"line 1 has no text in answer"),
        ("a.jsonl", b"[1]\n", r"line 1 is not a JSON object but \[1\]"),
        (
            "a.jsonl",
            '{"question": "é"}'.encode("latin-1"),
            r"could not read .*a\.jsonl \(.*codec.*; give a file in UTF-8",
        ),
        ("a.jsonl", ZIPPED, r"could not read .* zipped only if its name ends in \.gz"),
        ("a.jsonl.gz", LINE.encode(), r"could not read .*a\.jsonl\.gz \(Not a gzipped file"),
        ("a.jsonl.gz", ZIPPED[:-12], r"could not read .*a\.jsonl\.gz \(.*that is complete"),
        ("a.jsonl.gz", ZIPPED[:10] + b"\xff" * 30, r"could not read .*a\.jsonl\.gz \("),
        ("a.jsonl", None, r"could not read .*a\.jsonl \(.*No such file"),
    ],
    ids=[
        "empty",
        "CSV",
        "field",
        "number",
        "list",
        "latin-1",
        "zipped",
        "not zipped",
        "truncated",
        "damaged",
        "missing",
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        read_file(tmp_path / name, ("question", "answer"))


@pytest.mark.parametrize(("name", "files"), [
    ("gsm8k", r"test\.jsonl, test\.jsonl\.gz; give the file itself"), ("humaneval", r"HumanEval\.jsonl"),
])  # fmt: skip
def test_a_folder_without_the_file_is_refused(tmp_path, name, files):
    with pytest.raises(TaskError, match=f"contains none of {files}"):
        find_task(name, path=tmp_path).samples()


@pytest.mark.parametrize("name", ["gsm8k", "humaneval"])
def test_the_error_without_a_network_suggests_a_local_file(name, monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        TaskError, match=r"openai/.* could not be downloaded from the hub \(ConnectionError\); give a local"
    ):
        find_task(name).samples()


def test_rows_of_the_hub_are_read_once_and_checked(monkeypatch):
    import datasets

    requests = []
    rows = [{"question": "Q?", "answer": "#### 1"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *where, split: requests.append((*where, split)) or rows)
    monkeypatch.setattr(published, "read_hub", read_hub)
    source = HubSet("someone/sums", "main", "test")
    assert read_hub(source, ("question", "answer")) == rows == read_hub(source, ("question", "answer"))
    assert requests == [("someone/sums", "main", "test")]
    with pytest.raises(TaskError, match=r"someone/sums, row 0 has no text in solution; the task reads solution"):
        read_hub(source, ("solution",))
