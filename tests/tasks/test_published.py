"""Data of published tasks: what a file must contain, and the error without a network."""

import gzip

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import find_task, published
from sinklens.tasks.published import HubSet, choose, read_file, read_hub

LINE = '{"question": "Q?", "answer": "#### 1", "more": 3}\n'


def test_lines_are_read_plain_and_gzipped(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE + "\n" + LINE)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINE.encode()))
    expected = {"question": "Q?", "answer": "#### 1"}
    assert read_file(tmp_path / "a.jsonl", ("question", "answer")) == [expected, expected]
    assert read_file(tmp_path / "a.jsonl.gz", ("question", "answer")) == [expected]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "one\u2028two", "answer": "x"}\n')
    assert read_file(tmp_path / "a.jsonl", ("question",)) == [{"question": "one\u2028two"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"a\.jsonl is empty; give a JSON Lines file with the fields question, answer"),
        ("question,answer\n", r"a\.jsonl, line 1 is not JSON .* one object per line"),
        (LINE + '{"question": "Q?"}\n', r"a\.jsonl, line 2 has no text in answer; the task reads question, answer"),
        ('{"question": "Q?", "answer": 3}\n', r"line 1 has no text in answer"),
        ("[1]\n", r"line 1 has no text in question, answer"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(TaskError, match=message):
        read_file(tmp_path / "a.jsonl", ("question", "answer"))


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE.encode())
    assert read_file(tmp_path / "a.jsonl", ("question",)) == [{"question": "Q?"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "é"}'.encode("latin-1"), r"a\.jsonl is not UTF-8 \(.*; save it as UTF-8, or"),
        ("a.jsonl", gzip.compress(LINE.encode()), r"a\.jsonl is not UTF-8 \(.*or unzip it first"),
        ("a.jsonl.gz", LINE.encode(), r"a\.jsonl\.gz cannot be read \(Not a gzipped file.*Download it again"),
        ("a.jsonl.gz", gzip.compress(LINE.encode())[:-12], r"a\.jsonl\.gz cannot be read \(.*it may be truncated"),
        (
            "a.jsonl.gz",
            gzip.compress(LINE.encode())[:10] + b"\xff" * 30,
            r"a\.jsonl\.gz cannot be read \(.*Download it",
        ),
    ],
    ids=["latin-1", "zipped", "not zipped", "truncated", "damaged"],  # explicit, as zipped bytes contain the time
)
def test_a_file_that_is_not_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        read_file(tmp_path / name, ("question",))


def test_the_error_for_a_missing_file_names_it(tmp_path):
    with pytest.raises(TaskError, match=r"there is no file .*none\.jsonl; give a JSON Lines file with the fields a"):
        read_file(tmp_path / "none.jsonl", ("a",))
    with pytest.raises(TaskError, match=r"contains none of test\.jsonl, test\.jsonl\.gz; give the file itself"):
        find_task("gsm8k", path=tmp_path).samples()
    with pytest.raises(TaskError, match=r"contains none of HumanEval\.jsonl"):
        find_task("humaneval", path=tmp_path).samples()
    assert choose(tmp_path / "x.jsonl", ("test.jsonl",)) == tmp_path / "x.jsonl"


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
