"""Files of a run: records are read in order, and an incomplete file of tensors is rejected."""

import pytest
import torch

from sinklens.errors import CheckpointError
from training.run_files import append_record, read_records, read_tensors, write_tensors


def test_records_are_read_in_order(tmp_path):
    records = [{"step": 20, "loss": 1.5}, {"step": 40, "loss": 0.25}]
    for record in records:
        append_record(tmp_path / "log.jsonl", record)
    assert read_records(tmp_path / "log.jsonl") == records
    assert read_records(tmp_path / "none.jsonl") == []


def test_tensors_are_read_back_and_a_truncated_file_is_rejected(tmp_path):
    file = tmp_path / "state.pt"
    write_tensors({"a": torch.arange(300.0), "step": 3}, file)
    found = read_tensors(file)
    assert torch.equal(found["a"], torch.arange(300.0))
    assert found["step"] == 3
    assert list(tmp_path.iterdir()) == [file]
    content = file.read_bytes()
    for kept in range(0, len(content), 497):
        file.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=r"state.pt is truncated or corrupt \(\w+\)\. Restore it"):
            read_tensors(file)
