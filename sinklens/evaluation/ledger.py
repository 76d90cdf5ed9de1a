"""Ledgers: one record for each finished unit of work, in an SQLite database.

A *ledger* is a folder with a database, ``ledger.sqlite``. It holds *runs*: a description of an evaluation (checkpoint,
weights, intervention, protocol, seed) and its records, as JSON. A run is named by a hash of its description, so a
different setting makes a different run. Verdicts on generated programs, which run later, are records of another kind.

A record is on disk when `Writer.add` returns, and records added together are stored together or not at all, even if a
process is killed or the disk is full. Several processes may write into one ledger, each to its own *shard*. A shard has
a lock, so that no two processes do the same work; the lock ends with its process.

Limitation: SQLite's rollback journal needs working file locks. On a network file system without them, give each machine
its own folder and `merge` the ledgers.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sinklens.errors import LedgerError
from sinklens.utils.atomic import atomic_write

LedgerRecord = dict[str, Any]
RecordKind = Literal["records", "verdicts"]
FILE = "ledger.sqlite"
VERSION = 2
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, what TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    run TEXT NOT NULL, kind TEXT NOT NULL, sample TEXT NOT NULL, record TEXT NOT NULL, PRIMARY KEY (run, kind, sample)
);
PRAGMA user_version = {VERSION};
COMMIT;
"""
NOT_READ = "{file} cannot be read ({error}); restore it from a copy."
NOT_WRITTEN = "could not write to {file}: {error}. All earlier records are complete; free some space and rerun."
WAIT = 60.0  # seconds that a process waits for another one's transaction


@dataclass(frozen=True)
class LedgerRun:
    """One evaluated combination of model, task, protocol, condition and seed.

    Attributes:
        what: everything that determines a verdict, as plain JSON values.
        folder: folder of the ledger.
        name: "run-" and a hash of `what`.
    """

    what: Mapping[str, Any]
    folder: Path
    name: str

    @classmethod
    def of(cls, ledger: Path, what: Mapping[str, Any]) -> "LedgerRun":
        """The run described by `what` in the folder `ledger`; writes nothing."""
        return cls(what, ledger, f"run-{hashlib.sha256(_json(what).encode()).hexdigest()[:16]}")

    def begin(self) -> "LedgerRun":
        """Write the run's description unless it exists."""
        with _writing(self.folder) as database, database:
            database.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (self.name, _json(self.what)))
        return self

    @classmethod
    def all(cls, ledger: Path) -> "list[LedgerRun]":
        """Every run in the folder `ledger`.

        Raises:
            LedgerError: the folder holds no run, or a description cannot be read.
        """
        found = {name: json.loads(what) for name, what in _rows(ledger, "SELECT name, what FROM runs")}
        if not found:
            raise LedgerError(f"{ledger} holds no run; create one with `sinklens evaluate ... --out {ledger}`.")
        return [cls(found[name], ledger, name) for name in sorted(found)]

    def records(self, kind: RecordKind = "records") -> list[LedgerRecord]:
        """All records of a kind, one per sample, sorted by sample: the first record, or the last verdict.

        Raises:
            LedgerError: the ledger is damaged.
        """
        query = "SELECT record FROM records WHERE run = ? AND kind = ?"
        found = [json.loads(text) for (text,) in _rows(self.folder, query, self.name, kind)]
        return sorted(found, key=lambda record: str(record["sample"]))

    def done(self) -> set[str]:
        """The ids of samples that have a record."""
        query = "SELECT sample FROM records WHERE run = ? AND kind = 'records'"
        return {name for (name,) in _rows(self.folder, query, self.name)}


class Writer(ExitStack):
    """Add records to one shard of a run; use it as ``with Writer(run) as writer: writer.add(record)``.

    Raises:
        LedgerError: another process is writing to the shard, or the ledger cannot be written.
    """

    def __init__(self, run: LedgerRun, shard: int = 0, kind: RecordKind = "records") -> None:
        super().__init__()
        self._run, self._kind, self._shard = run, kind, shard
        self._database: sqlite3.Connection

    def __enter__(self) -> "Writer":
        with ExitStack() as opened:
            self._run.begin()
            opened.enter_context(_locked(self._run, self._kind, self._shard))
            self._database = opened.enter_context(_writing(self._run.folder))
            self.push(opened.pop_all())
        return self

    def add(self, *records: Mapping[str, Any]) -> None:
        """Add records, all or none of them; they are on disk when this returns.

        A sample keeps its first record, and its last verdict.

        Raises:
            LedgerError: the records could not be written; no earlier record is affected.
        """
        rows = [(self._run.name, self._kind, str(record["sample"]), _json(record)) for record in records]
        on_conflict = "REPLACE" if self._kind == "verdicts" else "IGNORE"
        with _errors(NOT_WRITTEN, self._run.folder), self._database:
            self._database.executemany(f"INSERT OR {on_conflict} INTO records VALUES (?, ?, ?, ?)", rows)


def holds_runs(folder: Path) -> bool:
    """Whether a folder holds a ledger with at least one run."""
    return bool(_rows(folder, "SELECT name FROM runs"))


def merge(ledgers: Sequence[str | Path], out: str | Path) -> int:
    """Copy all runs and records of `ledgers` into the ledger `out`, which need not exist; rerun to resume.

    Samples that have a record in `out` keep it.

    Returns:
        The number of records that were copied.

    Raises:
        LedgerError: a ledger holds no run, or two ledgers have records of one run and sample with different data.
    """
    copied = 0
    for run in (run for ledger in ledgers for run in LedgerRun.all(Path(ledger))):
        target = LedgerRun(run.what, Path(out), run.name)
        for kind in get_args(RecordKind):
            present = {record["sample"]: record for record in target.records(kind)}
            missing = []
            for record in run.records(kind):
                if record["sample"] not in present:
                    missing.append(record)
                elif difference := data_difference(record, present[record["sample"]]):
                    raise LedgerError(
                        f"{run.folder} and {out} have records of {record['sample']} in {run.name} with another "
                        f"{difference}, so they were evaluated on different data; keep them apart."
                    )
            with Writer(target, kind=kind) as writer:
                writer.add(*missing)
            copied += len(missing)
    return copied


def export(ledger: str | Path, file: str | Path) -> int:
    """Write all records of a ledger to `file` as JSON Lines, each with its run's name and description and its kind.

    Returns:
        The number of lines.

    Raises:
        LedgerError: the ledger holds no run.
    """
    lines = [
        _json({"run": run.name, "what": run.what, "kind": kind, "record": record}) + "\n"
        for run in LedgerRun.all(Path(ledger))
        for kind in get_args(RecordKind)
        for record in run.records(kind)
    ]
    with atomic_write(file) as part:
        part.write_text("".join(lines))
    return len(lines)


def data_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs between the data of two records of a sample, "prompt" or "expected answer"; "" if nothing does."""
    if one.get("prompt_sha256") != other.get("prompt_sha256"):
        return "prompt"
    return "expected answer" if one.get("reference_sha256") != other.get("reference_sha256") else ""


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


@contextmanager
def _errors(text: str, folder: Path) -> Iterator[None]:
    """Raise the errors of SQLite as LedgerError with this text."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(text.format(file=folder / FILE, error=error)) from error


@contextmanager
def _writing(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a ledger, created if it does not exist; each ``with database:`` is one transaction."""
    with _errors(NOT_WRITTEN, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(folder / FILE, timeout=WAIT, isolation_level="IMMEDIATE")) as database:
            database.execute("PRAGMA journal_mode = DELETE")
            database.execute("PRAGMA synchronous = FULL")
            if not _stored_version(database, folder):
                database.executescript(SCHEMA)
            yield database


def _rows(folder: Path, query: str, *values: str) -> list[tuple[str, ...]]:
    """The result of a query; empty without a database."""
    file = folder / FILE
    if not file.exists():
        return []
    uri = f"{file.absolute().as_uri()}?mode=rw"  # on read-only media SQLite only reads
    with _errors(NOT_READ, folder), closing(sqlite3.connect(uri, timeout=WAIT, uri=True)) as database:
        return database.execute(query, values).fetchall() if _stored_version(database, folder) else []


def _stored_version(database: sqlite3.Connection, folder: Path) -> int:
    """The version of a database; 0 before its tables exist."""
    ((version,),) = database.execute("PRAGMA user_version")
    if version not in (0, VERSION):
        raise LedgerError(f"{folder / FILE} has format {version}; this version reads {VERSION}.")
    return int(version)


@contextmanager
def _locked(run: LedgerRun, kind: RecordKind, shard: int) -> Iterator[None]:
    """Hold the lock of a shard, an open transaction of an empty database, which ends with this process.

    Raises:
        LedgerError: another process holds it.
    """
    file = run.folder / "locks" / f"{run.name}-{kind}-{shard}"
    with _errors(NOT_WRITTEN, run.folder):
        file.parent.mkdir(exist_ok=True)
        with closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as lock:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                raise LedgerError(
                    f"another process is writing to {run.folder} ({run.name}, {kind}, shard {shard}); wait until it "
                    f"has finished, or use another folder (--out) or shard (`sinklens evaluate --shard`) here."
                ) from error
            yield
