"""Files of a run: an incomplete record is ignored, and an incomplete file of tensors is rejected."""

import pytest
import torch

from sinklens.errors import CheckpointError, SinklensError
from training.run_files import append_record, read_records, read_tensors, write_tensors

RECORDS = [{"step": 20, "loss": 1.5}, {"step": 40, "loss": 0.25}]


@pytest.fixture
def file(tmp_path):
    """A file of two records."""
    for record in RECORDS:
        append_record(tmp_path / "log.jsonl", record)
    return tmp_path / "log.jsonl"


def test_records_are_read_in_order(file, tmp_path):
    assert read_records(file) == RECORDS
    assert read_records(tmp_path / "none.jsonl") == []


def test_a_line_truncated_anywhere_is_ignored_and_replaced_by_the_next(file):
    content = file.read_bytes()
    begin = content.index(b"\n") + 1
    for kept in range(begin, len(content)):
        file.write_bytes(content[:kept])
        assert read_records(file) == RECORDS[:1]
        append_record(file, RECORDS[1])
        assert file.read_bytes() == content


@pytest.mark.parametrize("broken", ['{"step": 2', "3", "[1]"])
def test_a_broken_line_before_others_is_named(file, broken):
    file.write_text(f"{broken}\n{file.read_text()}")
    with pytest.raises(
        SinklensError, match=r"log.jsonl, line 1 is not a JSON object .*; restore it, or delete that line"
    ):
        read_records(file)


def test_tensors_are_read_back_and_a_truncated_file_is_rejected(tmp_path):
    file = tmp_path / "state.pt"
    write_tensors({"a": torch.arange(300.0), "step": 3}, file)
    found = read_tensors(file)
    assert torch.equal(found["a"], torch.arange(300.0))
    assert found["step"] == 3
    assert list(tmp_path.iterdir()) == [file]
    content = file.read_bytes()
    for kept in range(0, len(content), 97):
        file.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=r"state.pt is truncated or corrupt \(\w+\)\. Restore it"):
            read_tensors(file)
