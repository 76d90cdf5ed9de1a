"""The files of a training run: records, one line of JSON each, and tensors.

A kill can leave an incomplete last line, without a line feed. `read_records` ignores it and `append_record` removes it.
Files of tensors are written to a temporary neighbor and then moved into place.

Limitation: two processes that append to one file remove each other's lines. A run has one process.
"""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sinklens.errors import CheckpointError, SinklensError
from sinklens.utils.atomic import atomic_write

JSONRecord = dict[str, Any]  # plain JSON values


def read_records(file: Path) -> list[JSONRecord]:
    """Every complete record; empty if there is no file.

    Raises:
        SinklensError: a complete line is not a record.
    """
    records = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1] if file.exists() else [], 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise SinklensError(
                f"{file}, line {number} is not a JSON object ({error}); restore it, or delete that line."
            ) from error
    return records


def append_record(file: Path, record: JSONRecord) -> None:
    """Write one record after the complete ones."""
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")


def write_tensors(content: Mapping[str, Any], file: Path) -> None:
    """Write `content` with `torch.save`, completely or not at all."""
    with atomic_write(file) as part, part.open("wb") as out:
        torch.save(content, out)  # given a path, torch would report a full disk as a RuntimeError


def read_tensors(file: Path, device: str = "cpu") -> dict[str, Any]:
    """Read what `write_tensors` wrote.

    Raises:
        CheckpointError: the file is truncated or corrupt.
    """
    try:
        return dict(torch.load(file, weights_only=True, map_location=device))
    except (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} is truncated or corrupt ({type(error).__name__}). Restore it from a copy, or delete it: without "
            f"state.pt a run starts from the beginning, and without weights-<step>.pt that step is skipped."
        ) from error
