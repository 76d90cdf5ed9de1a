"""Ledgers: append-only files with one record for each finished unit of work.

A *ledger* is a folder with one *run* per subfolder. ``run-HASH/run.json`` describes the evaluation (checkpoint,
weights, intervention, protocol, seed), and the folder's name is a hash of that description, so another setting makes
another run. Records are lines of JSON in *shards*, ``records-N.jsonl``; each line ends in a checksum. A shard has one
writer at a time, ensured by a lock of the operating system that is released when the process ends. Verdicts on
generated programs, which run later, are separate records in ``verdicts-N.jsonl``.

A record counts once its line is complete: each line is written in one call and synced to disk before the next. A kill
or a full disk can leave a partial last line, which the next writer cuts off. A broken line anywhere else cannot come
from an interruption and is an error.

Limitation: file locks do not work on some network file systems. There, give each machine its own shard.
"""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from sinklens.atomic import atomic_write
from sinklens.errors import LedgerError

FORMAT = "sinklens ledger 1"
Record = dict[str, Any]
Kind = Literal["records", "verdicts"]


@dataclass(frozen=True)
class LedgerRun:
    """One evaluated combination of model, task, protocol, condition and seed.

    Attributes:
        what: everything that determines a verdict, as plain JSON values.
        folder: folder of its records.
    """

    what: Mapping[str, Any]
    folder: Path

    @classmethod
    def of(cls, ledger: Path, what: Mapping[str, Any]) -> "LedgerRun":
        """The run described by `what` in the folder `ledger`; writes nothing."""
        text = json.dumps(what, sort_keys=True)
        return cls(what, ledger / f"run-{hashlib.sha256(text.encode()).hexdigest()[:16]}")

    def begin(self) -> "LedgerRun":
        """Write the run's description unless it exists."""
        note = self.folder / "run.json"
        if not note.exists():
            with atomic_write(note) as part:
                part.write_text(json.dumps({"format": FORMAT, "what": self.what}, indent=1, sort_keys=True) + "\n")
        return self

    @classmethod
    def all(cls, ledger: Path) -> "list[LedgerRun]":
        """Every run in the folder `ledger`.

        Raises:
            LedgerError: the folder holds no run, or a description cannot be read.
        """
        found = []
        for note in sorted(ledger.glob("run-*/run.json")):
            try:
                content = json.loads(note.read_text())
                if content["format"] != FORMAT:
                    raise LedgerError(f"{note} has format {content['format']!r}; this version reads {FORMAT!r}.")
                found.append(cls(content["what"], note.parent))
            except (OSError, ValueError, KeyError) as error:
                raise LedgerError(f"{note} cannot be read ({error}); restore the file or delete its folder.") from error
        if not found:
            raise LedgerError(f"{ledger} holds no run; create one with `sinklens evaluate ... --out {ledger}`.")
        return found

    def records(self, kind: Kind = "records") -> list[Record]:
        """All complete records of a kind from all shards, sorted by sample; the first record of each sample.

        Raises:
            LedgerError: a broken line that is not the last of its shard.
        """
        found: dict[str, Record] = {}
        for record in self.every(kind):
            found.setdefault(str(record["sample"]), record)
        return [found[sample] for sample in sorted(found)]

    def every(self, kind: Kind = "records") -> Iterator[Record]:
        """All complete records of a kind, shard by shard, including repeats of a sample; raises like `records`."""
        for shard in sorted(self.folder.glob(f"{kind}-*.jsonl")):
            yield from _read(shard)[0]

    def done(self) -> set[str]:
        """The ids of samples that have a record."""
        return {str(record["sample"]) for record in self.records()}


class Writer:
    """Append records to one shard of a run; use it as ``with Writer(run) as writer: writer.add(record)``.

    Attributes:
        path: the shard's file.

    Raises:
        LedgerError: another process is writing to the shard, or the file cannot be opened.
    """

    def __init__(self, run: LedgerRun, shard: int = 0, kind: Kind = "records") -> None:
        self.path = run.folder / f"{kind}-{shard}.jsonl"
        self._file: int | None = None

    def __enter__(self) -> "Writer":
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            raise LedgerError(
                f"another process is writing to {self.path}; wait until it has finished, or use another folder (--out) "
                f"or shard (`sinklens evaluate --shard`) here."
            ) from error
        except OSError as error:
            self._close()
            raise LedgerError(f"could not open {self.path}: {error}.") from error
        _, complete_length = _read(self.path)
        os.ftruncate(self._file, complete_length)
        return self

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one record; it is on disk when this returns.

        Raises:
            LedgerError: the record could not be written completely; a partial line is removed.
        """
        assert self._file is not None, "use a Writer in a with block"
        line = _line(record)
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("only part of a record fit on the disk")
            os.fsync(self._file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise LedgerError(
                f"could not write to {self.path}: {error}. All earlier records are complete; free some space and rerun."
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)  # also releases the lock
            self._file = None


def _line(record: Mapping[str, Any]) -> bytes:
    """A record as a line: JSON, a tab, the CRC-32 of the JSON."""
    text = json.dumps(record, sort_keys=True, ensure_ascii=True)
    return f"{text}\t{zlib.crc32(text.encode()):08x}\n".encode()


def _parse(line: bytes) -> Record | None:
    """The record of a line; None if the line is broken."""
    text, tab, check = line.rstrip(b"\n").rpartition(b"\t")
    if not tab or not line.endswith(b"\n") or f"{zlib.crc32(text):08x}".encode() != check:
        return None
    try:
        return dict(json.loads(text))
    except ValueError:
        return None


def _read(shard: Path) -> tuple[list[Record], int]:
    """The complete records of a shard and their length in bytes.

    Raises:
        LedgerError: a broken line that is not the last.
    """
    records, length = [], 0
    for number, line in enumerate(_lines(shard), 1):
        record = _parse(line)
        if record is None:
            if length + len(line) < shard.stat().st_size:
                raise LedgerError(
                    f"{shard}, line {number}: the checksum does not match, and more lines follow. The file was changed "
                    f"or damaged; restore it from a copy, or delete that line to evaluate its sample again."
                )
            break
        records.append(record)
        length += len(line)
    return records, length


def _lines(shard: Path) -> Iterator[bytes]:
    if not shard.exists():
        return
    with shard.open("rb") as file:
        yield from file
