"""Data of the published tasks, from JSON Lines files, plain or gzipped, or from the hub.

A *record* is the JSON object of one line, checked to have text in the fields that the task reads. Nothing is written
here; `datasets` keeps a cache of what it downloads from the hub.

Pitfall: a file of another split has the same fields and is not detected. Check the number of records
(`len(task.samples())`): 1,319 in GSM8K's test set, 164 in HumanEval.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sinklens.errors import TaskError, require
from sinklens.utils.documents import parse_json

DataRow = Mapping[str, str]
MOST_DATA = 2**30  # bytes of a file after decompression; a small zipped file can hold more than the memory


class HubSet(NamedTuple):
    """A data set on the hub: repository, configuration and split."""

    repository: str
    configuration: str
    split: str


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every non-empty line of a file, plain or gzipped, preceded by its place for error messages.

    Only a line feed ends a line.

    Raises:
        TaskError: the file is missing, empty, truncated or not UTF-8.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            content = opened.read(MOST_DATA + 1)
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TaskError(
            f"could not read {path} ({error}); give a file in UTF-8 that is complete, and zipped only if its name ends "
            f"in .gz."
        ) from error
    require(len(content) <= MOST_DATA, f"{path} holds more than {MOST_DATA:,} bytes; split it.", TaskError)
    require(text.strip(), f"{path} is empty; write one prompt per line, or one JSON object (*.jsonl).", TaskError)
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line.removesuffix("\r")


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of every non-empty line of a JSON Lines file, preceded by its place.

    Raises:
        TaskError: the file cannot be read, or a line is not an object.
    """
    for where, line in text_lines(path):
        found = parse_json(line, where, TaskError)
        require(
            isinstance(found, dict),
            f"{where} is not a JSON object but {line:.60}; write one object per line.",
            TaskError,
        )
        yield where, found


def read_file(path: Path, fields: Sequence[str]) -> list[DataRow]:
    """Read the records of a JSON Lines file, each with text in `fields`.

    Raises:
        TaskError: the file is missing or cannot be read, or a line is not an object with text in these fields.
    """
    return [_checked(entry, fields, where) for where, entry in json_lines(path)]


def _checked(found: Mapping[str, Any], fields: Sequence[str], where: str) -> DataRow:
    missing = [name for name in fields if not isinstance(found.get(name), str)]
    require(not missing, f"{where} has no text in {', '.join(missing)}; the task reads {', '.join(fields)}.", TaskError)
    return {name: found[name] for name in fields}


def read_published(path: Path | None, names: tuple[str, ...], source: HubSet, fields: tuple[str, ...]) -> list[DataRow]:
    """The records of a published data set.

    Args:
        path: a file, or a folder with a file of one of these `names`; None for the hub.

    Raises:
        TaskError: the folder has no such file; see also `read_file` and `read_hub`.
    """
    if path is None:
        return read_hub(source, fields)
    files = [path / name for name in names if (path / name).is_file()] if path.is_dir() else [path]
    require(
        files,
        f"{path} contains none of {', '.join(names)}; give the file itself, or the folder that contains it.",
        TaskError,
    )
    return read_file(files[0], fields)


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
            f"({type(error).__name__}); give a local JSON Lines file with the fields {', '.join(fields)}, or its "
            f"folder (`path`; --data of a command)."
        ) from error
    return [_checked(row, fields, f"{source.repository}, row {number}") for number, row in enumerate(rows)]
