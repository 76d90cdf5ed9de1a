"""Data of the published tasks, from JSON Lines files, plain or gzipped, or from the hub.

A *record* is the JSON object of one line, checked to have text in the fields that the task reads. Nothing is written
here; `datasets` keeps a cache of what it downloads from the hub.

Pitfall: a file of another split has the same fields and is not detected. Check the number of records
(`len(task.samples())`): 1,319 in GSM8K's test set, 164 in HumanEval.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sinklens.errors import TaskError

DataRow = Mapping[str, str]


class HubSet(NamedTuple):
    """A data set on the hub: repository, configuration and split."""

    repository: str
    configuration: str
    split: str


def read_file(path: Path, fields: Sequence[str]) -> list[DataRow]:
    """Read the records of a JSON Lines file.

    Args:
        path: a ``.jsonl`` or ``.jsonl.gz`` file.
        fields: fields that every record must have.

    Raises:
        TaskError: the file is missing or cannot be read, or a line is not an object with text in these fields.
    """
    if not path.is_file():
        raise TaskError(f"there is no file {path}; give a JSON Lines file with the fields {', '.join(fields)}.")
    lines = [line for line in _text(path).split("\n") if line.strip()]
    if not lines:
        raise TaskError(f"{path} is empty; give a JSON Lines file with the fields {', '.join(fields)}.")
    return [_record(line, fields, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _text(path: Path) -> str:
    """The text of a file, unzipped and without a byte order mark."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"{path} cannot be read ({error}); it may be truncated. Download it again.") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 ({error}); save it as UTF-8, or unzip it first.") from error


def _record(line: str, fields: Sequence[str], where: str) -> DataRow:
    return _checked(_parsed(line, where), fields, where)


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where} is not JSON ({error}); give a JSON Lines file, one object per line.") from error


def _checked(found: Any, fields: Sequence[str], where: str) -> DataRow:
    missing = [name for name in fields if not isinstance(found, Mapping) or not isinstance(found.get(name), str)]
    if missing:
        raise TaskError(f"{where} has no text in {', '.join(missing)}; the task reads {', '.join(fields)}.")
    return {name: found[name] for name in fields}


def choose(path: Path, names: Iterable[str]) -> Path:
    """`path` if it is a file, else the first of `names` that exists in the folder.

    Raises:
        TaskError: the folder contains none of them.
    """
    if not path.is_dir():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise TaskError(
        f"{path} contains none of {', '.join(names)}; give the file itself, or the folder that contains it."
    )


@cache
def read_hub(source: HubSet, fields: tuple[str, ...]) -> list[DataRow]:
    """Read the records of a data set on the hub, once per process.

    Raises:
        TaskError: it cannot be downloaded.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(source.repository, source.configuration, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise TaskError(
            f"{source.repository} ({source.configuration}, {source.split}) could not be downloaded from the hub "
            f"({type(error).__name__}); give a local JSON Lines file with the fields {', '.join(fields)} as `path`."
        ) from error
    return [_checked(row, fields, f"{source.repository}, row {number}") for number, row in enumerate(rows)]
