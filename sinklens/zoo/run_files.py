"""The files of a training run: records, one line of JSON each, and tensors.

A kill may leave part of a record's line, which ends without a line feed. Such a line is no record: `read_records`
leaves it out, and `append_record` cuts it off. Tensors go to a neighbour of their place and are moved there when they
are whole.

One way this fails: two processes that append to one file cut off each other's lines. A run has one process.
"""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sinklens.errors import CheckpointError, SinklensError


def read_records(file: Path) -> list[dict[str, Any]]:
    """Every whole record; none if there is no file.

    Raises:
        SinklensError: a whole line is no record.
    """
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [_record(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise SinklensError(f"{where} is no JSON object ({error}); restore it, or delete that line.") from error


def append_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write one record behind the whole ones."""
    if file.exists():
        content = file.read_bytes()
        os.truncate(file, content.rfind(b"\n") + 1)
    with file.open("a") as out:
        out.write(json.dumps(record) + "\n")


def write_tensors(content: Mapping[str, Any], file: Path) -> None:
    """Write `content` by `torch.save`, whole or not at all."""
    part = file.with_suffix(".part")
    torch.save(content, part)
    os.replace(part, file)


def read_tensors(file: Path, device: str = "cpu") -> dict[str, Any]:
    """What `write_tensors` wrote.

    Raises:
        CheckpointError: the file is not whole.
    """
    try:
        return dict(torch.load(file, weights_only=True, map_location=device))
    except (OSError, EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} is no whole file of tensors ({type(error).__name__}); it may be truncated. Restore it from a "
            f"copy, or delete it: without state.pt a run begins anew, without weights-<step>.pt the step is left out."
        ) from error
