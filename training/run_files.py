"""The files of a training run: records, one line of JSON each, and tensors.

Every file is written to a temporary neighbor and then moved into place, so a kill leaves the last complete one.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sinklens.errors import CheckpointError
from sinklens.utils.atomic import atomic_write

JSONRecord = dict[str, Any]  # plain JSON values


def read_records(file: Path) -> list[JSONRecord]:
    """Every record; empty if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append_record(file: Path, record: JSONRecord) -> None:
    """Write one record after the others."""
    with atomic_write(file) as part:
        part.write_text("".join(json.dumps(one) + "\n" for one in [*read_records(file), record]))


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
