"""Ledgers: one record for each finished unit of work, in an SQLite database.

A *ledger* is a folder with a database, ``ledger.sqlite``. It holds *runs*: a description of an evaluation (checkpoint,
weights, intervention, protocol, seed) and its records, as JSON. A run is named by a hash of its description, so a
different setting makes a different run. Verdicts on generated programs, which run later, are records of another kind.

A record is on disk when `Writer.add` returns, and records added together are stored together or not at all, even if a
process is killed or the disk is full. Several processes may write into one ledger, each to its own *shard*. A shard has
a lock, so that no two processes do the same work; the lock ends with its process.

Reading finds damage: SQLite checks the structure of the file, a run's name is compared with the hash of its
description, and every record has a checksum of its text and of the run and sample that it belongs to.

Limitation: SQLite's rollback journal needs working file locks. On a network file system without them, give each machine
its own folder and `merge` the ledgers. A deleted record leaves no trace; its sample is evaluated again.
"""

import errno
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from sinklens.errors import LedgerError, require
from sinklens.utils.atomic import write_file
from sinklens.utils.documents import parse_json

LedgerRecord = dict[str, Any]
RecordKind = Literal["records", "verdicts"]
KINDS: tuple[RecordKind, ...] = get_args(RecordKind)
FILE = "ledger.sqlite"
VERSION = 3
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, what TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    run TEXT NOT NULL, kind TEXT NOT NULL, sample TEXT NOT NULL, record TEXT NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (run, kind, sample)
);
PRAGMA user_version = {VERSION};
COMMIT;
"""
RESTORE = "restore it from a copy, or copy its sound records with `sinklens merge {folder} --out NEW` and rerun there."
NOT_READ = "{file} cannot be read ({error}); " + RESTORE
DAMAGED = "{file}: {what} was damaged or edited after it was written; " + RESTORE
NOT_WRITTEN = "could not write to {file}: {error}. All earlier records are complete; {remedy} and rerun."
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)  # the second is a limit on the size of files
WAIT = 60.0  # seconds that a process waits for another one's transaction
ROWS = "SELECT run, kind, sample, record, sha256 FROM records"
_parsed = partial(parse_json, error=ValueError, python=True)  # verdicts may be NaN
CIRCUMSTANCES = {
    "seconds", "batch", "device", "device_name", "versions", "sinks", "status", "detail", "isolation",
}  # fmt: skip
"""Fields in which two records of one result may differ."""
DATA = {"prompt_sha256": "prompt", "reference_sha256": "expected answer"}


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
    def of(cls, ledger: str | Path, what: Mapping[str, Any]) -> "LedgerRun":
        """The run described by `what` in the folder `ledger`; writes nothing."""
        return cls(what, Path(ledger), _run_name(_json(what)))

    def begin(self) -> "LedgerRun":
        """Write the run's description unless it exists."""
        with _writing(self.folder) as database, database:
            database.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (self.name, _json(self.what)))
        return self

    @classmethod
    def all(cls, ledger: str | Path) -> "list[LedgerRun]":
        """Every run in the folder `ledger`.

        Raises:
            LedgerError: the folder holds no run, or the ledger is damaged.
        """
        ledger = Path(ledger)
        found = {name: _described(ledger, name, what) for name, what in _rows(ledger, "SELECT name, what FROM runs")}
        require(found, f"{ledger} holds no run; create one with `sinklens evaluate ... --out {ledger}`.", LedgerError)
        for run, kind in _rows(ledger, "SELECT DISTINCT run, kind FROM records"):
            if run not in found or kind not in KINDS:
                raise _damaged(ledger, f"the place of records ({kind!r:.40} of {run!r:.40})")
        return [cls(found[name], ledger, name) for name in sorted(found)]

    def records(self, kind: RecordKind = "records") -> list[LedgerRecord]:
        """The records of a kind, sorted by sample: of each sample, the first record, or the last verdict.

        Raises:
            LedgerError: the ledger is damaged.
        """
        rows = _rows(self.folder, f"{ROWS} WHERE run = ? AND kind = ? ORDER BY sample", self.name, kind)
        return [_record(self.folder, row) for row in rows]

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
        checked = [(*row, _checksum(row)) for row in rows]
        on_conflict = "REPLACE" if self._kind == "verdicts" else "IGNORE"
        with _errors(NOT_WRITTEN, self._run.folder), self._database:
            self._database.executemany(f"INSERT OR {on_conflict} INTO records VALUES (?, ?, ?, ?, ?)", checked)


def holds_runs(folder: Path) -> bool:
    """Whether a folder holds a ledger with at least one run."""
    return bool(_rows(folder, "SELECT name FROM runs"))


def merge(ledgers: Sequence[str | Path], out: str | Path) -> int:
    """Copy all runs and records of `ledgers` into the ledger `out`, which need not exist; rerun to resume.

    Samples that have a record in `out` keep it. Of a damaged ledger the sound records are copied.

    Returns:
        The number of records that were copied.

    Raises:
        LedgerError: a ledger holds no run, two ledgers contradict each other about a sample (nothing was copied then),
            or a ledger is damaged (its sound records were copied).
    """
    target, damage, copied = Path(out), list[LedgerError](), 0
    present = _records_of(LedgerRun.all(target) if holds_runs(target) else [])
    known, runs = {place: (target, record) for place, record in present.items()}, dict[str, LedgerRun]()
    for ledger in map(Path, ledgers):
        try:
            found = LedgerRun.all(ledger)
            records = _records_of(found)
        except LedgerError as error:
            found, records = _sound(ledger)
            if not found:
                raise
            damage.append(error)
        runs |= {run.name: LedgerRun(run.what, target, run.name) for run in found}
        for place, record in records.items():
            folder, other = known.setdefault(place, (ledger, record))
            names = sorted({*record, *other} - CIRCUMSTANCES, key=lambda name: (name != "verdict", name))
            differing = (name for name in names if record.get(name) != other.get(name))
            if field := data_difference(record, other) or next(differing, ""):
                raise LedgerError(
                    f"{ledger} and {folder} have {place[1]} of {place[2]} in {place[0]} with another {field}, so they "
                    f"contradict each other; keep them apart. Nothing was copied."
                )
    for run, kind in product(runs.values(), KINDS):
        new = [record for place, (_, record) in known.items() if place[:2] == (run.name, kind) and place not in present]
        with Writer(run, kind=kind) as writer:
            writer.add(*new)
        copied += len(new)
    if damage:
        raise LedgerError(f"{copied} sound records were copied to {out}, and others were lost: {damage[0]}")
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
        for run, kind in product(LedgerRun.all(Path(ledger)), KINDS)
        for record in run.records(kind)
    ]
    write_file(file, "".join(lines))
    return len(lines)


def data_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs between the data of two records of a sample, "prompt" or "expected answer"; "" if nothing does."""
    return next((text for name, text in DATA.items() if one.get(name) != other.get(name)), "")


def _records_of(runs: Sequence[LedgerRun]) -> dict[tuple[str, str, str], LedgerRecord]:
    """The records of all runs, by run, kind and sample."""
    return {
        (run.name, kind, str(record["sample"])): record
        for run, kind in product(runs, KINDS)
        for record in run.records(kind)
    }


def _sound(ledger: Path) -> tuple[list[LedgerRun], dict[tuple[str, str, str], LedgerRecord]]:
    """The runs and records of a damaged ledger that can be read; its rows are tried from both ends."""
    runs, records = dict[str, LedgerRun](), dict[tuple[str, str, str], LedgerRecord]()
    for query in ("SELECT name, what FROM runs", ROWS):
        for order in ("ASC", "DESC"):
            with suppress(LedgerError), _reading(ledger) as database:
                _stored_version(database, ledger)
                for row in database.execute(f"{query} ORDER BY rowid {order}"):
                    with suppress(LedgerError):
                        if query == ROWS:
                            records[row[:3]] = _record(ledger, row)
                        else:
                            runs[row[0]] = LedgerRun(_described(ledger, *row), ledger, row[0])
    return list(runs.values()), {place: record for place, record in records.items() if place[0] in runs}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _run_name(what: str) -> str:
    return f"run-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _checksum(row: Sequence[Any]) -> str:
    """The checksum of a record's run, kind, sample and text."""
    return hashlib.sha256(json.dumps(row, default=repr).encode()).hexdigest()


def _damaged(folder: Path, what: str) -> LedgerError:
    return LedgerError(DAMAGED.format(file=folder / FILE, folder=folder, what=what))


def _described(folder: Path, name: str, what: str) -> dict[str, Any]:
    """The description of a run, checked."""
    with suppress(ValueError):
        if name == _run_name(str(what)) and isinstance(found := _parsed(what, name), dict):
            return found
    raise _damaged(folder, f"the description of {name!r:.40}")


def _record(folder: Path, row: Sequence[Any]) -> LedgerRecord:
    """The record in a row of `ROWS`, checked."""
    *place, text, checksum = row
    with suppress(ValueError):
        if checksum == _checksum((*place, text)):
            found = _parsed(text, place[2])
            if isinstance(found, dict) and str(found.get("sample")) == place[2]:
                return found
    raise _damaged(folder, f"the record of {place[2]!r:.60} in {place[0]!r:.40}")


@contextmanager
def _errors(text: str, folder: Path) -> Iterator[None]:
    """Raise the errors of SQLite as LedgerError with this text."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeEncodeError) as error:  # the last is of a folder's name
        full = getattr(error, "sqlite_errorcode", None) in FULL or getattr(error, "errno", None) == errno.ENOSPC
        remedy = "free some space" if full else "remove the cause"
        raise LedgerError(text.format(file=folder / FILE, folder=folder, error=error, remedy=remedy)) from error


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
            _check_structure(folder)
            yield database


@contextmanager
def _reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database of a ledger, to read."""
    with (
        _errors(NOT_READ, folder),  # on read-only media SQLite only reads
        closing(sqlite3.connect(f"{(folder / FILE).absolute().as_uri()}?mode=rw", timeout=WAIT, uri=True)) as database,
    ):
        database.text_factory = lambda content: content.decode(errors="replace")  # so a checksum names the record
        yield database


def _rows(folder: Path, query: str, *values: str) -> list[tuple[str, ...]]:
    """The result of a query; empty without a database."""
    if not (folder / FILE).exists():
        return []
    with _reading(folder) as database:
        if not _stored_version(database, folder):
            return []
        _check_structure(folder)
        return database.execute(query, values).fetchall()


def _check_structure(folder: Path) -> None:
    """Check that the pages of a database fit together, once for each state of the file."""
    about = (folder / FILE).stat()
    _structure(folder, (about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))


@lru_cache(maxsize=64)
def _structure(folder: Path, state: tuple[int, ...]) -> None:
    with _reading(folder) as database:
        if (found := database.execute("PRAGMA integrity_check(1)").fetchall()) != [("ok",)]:
            raise sqlite3.DatabaseError(f"{' '.join(str(found[0][0]).split())}: malformed")


def _stored_version(database: sqlite3.Connection, folder: Path) -> int:
    """The version of a database; 0 before its tables exist."""
    both = "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"
    ((version, tables),) = database.execute(both)  # at one moment: another process may be making the tables
    require(
        version == VERSION or (not version and not tables),
        f"{folder / FILE} has format {version}; this version reads {VERSION}.",
        LedgerError,
    )
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
