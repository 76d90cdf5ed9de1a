"""The lab's runs on disk: one file each, complete or absent.

A run is ``runs/ID.npz`` with its arrays and, as JSON, its record: what was requested, what came out, and the provenance
that a sink track has. Without ``--keep``, the folder is a temporary one.

Names of files are made here and never come from a request: a request's id is looked up among those that exist. What the
files contain is checked like a request, since it may be damaged or forged: a run that cannot be read is listed with the
reason, and the lab opens.

A run that cannot be written, e.g. to a full disk, is held in memory.

Only regular files of the folder are opened, of at most `MOST_BYTES`: a device or a pipe never ends, and a link may lead
anywhere.

Two labs may share a folder, since a run's file has a random name and is never changed. Each lists only the runs that
were there when it started.
"""

import json
import math
import os
import re
import stat
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from sinklens.errors import SinklensError
from sinklens.live.outcome import ARRAYS, RunOutcome
from sinklens.live.refusal import Refused, require
from sinklens.live.spec import RunSpec
from sinklens.live.thread import Stop
from sinklens.utils.atomic import atomic_write
from sinklens.utils.documents import parse_json

if TYPE_CHECKING:
    from sinklens.live.execution import LiveRun

IN_MEMORY = 4  # outcomes that are not read again
MOST_BYTES = 4_000_000_000  # of a run's file
MOST_RECORD = 64_000_000  # bytes of a record
MOST_UNWRITTEN = 64  # outcomes that are held because they could not be written
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
ENDED = ("done", "cancelled", "failed")
FACTS: Mapping[str, tuple[type, ...]] = {  # of a summary: what the run came to
    "sampler": (str,), "gen_length": (int,), "steps": (int,), "steps_run": (int,), "seconds": (int, float),
    "text": (str,), "right": (bool,), "error": (str,), "weights": (str,),
}  # fmt: skip
SUMMARY = [name for name in FACTS if name != "weights"]  # what every summary has, if only as None
SHOWN = 200  # characters of a prompt or an answer in the history


@dataclass
class LabRun:
    """A run and what became of it.

    Attributes:
        id: random, made by the lab.
        spec: what was requested.
        status: "queued", "running", "done", "failed" or "cancelled".
        created: when, in seconds since 1970; 0 if its file cannot be read.
        facts: parts of the summary that are known only later: those of `FACTS` for a run from a file, or ``error``.
        live: the run under way.
        stop: ends it before its next step, or before its first one; after the run, ends the trial of its heads.
        heads: state of its newest trial of heads (heads.py).
        removed: whether it was removed while it was running.
        damaged: whether its file cannot be read; `spec` then means nothing.
    """

    id: str
    spec: RunSpec
    status: str = "queued"
    created: float = field(default_factory=time.time)
    facts: dict[str, Any] = field(default_factory=dict)
    live: "LiveRun | None" = None
    stop: Stop = field(default_factory=Stop)
    heads: dict[str, Any] | None = None
    removed: bool = False
    damaged: bool = False

    @property
    def readable(self) -> bool:
        """Whether it has an outcome."""
        return self.status in ENDED and (self.facts.get("steps_run") or 0) > 0

    def summary(self) -> dict[str, Any]:
        """The run's entry in the history."""
        spec = self.spec
        prompt = spec.prompt if isinstance(spec.prompt, str) else f"token ids {spec.prompt}"
        task = None if spec.task is None else {"task": spec.task[0], "index": spec.task[1]}
        changes = [chip for chip in spec.chips if chip["on"]]
        return dict.fromkeys(SUMMARY) | {
            "id": self.id, "model": spec.model, "prompt": prompt[:SHOWN], "status": self.status,
            "created": self.created, "seed": spec.seed, "chips": len(changes), "changes": changes,
            "replay": spec.replay, "task": task, "compare_to": spec.compare_to,
        } | self.facts  # fmt: skip


class RunHistory:
    """A folder of runs.

    Attributes:
        folder: the folder.
        kept: whether it outlives the lab.
    """

    def __init__(self, folder: Path | None) -> None:
        """Open `folder`, or a temporary one.

        Raises:
            SinklensError: the folder cannot be created.
        """
        self._temporary = tempfile.TemporaryDirectory(prefix="sinklens-lab-") if folder is None else None
        self.kept = folder is not None
        self.folder = Path(self._temporary.name) if self._temporary else Path(folder or ".").absolute()
        self._unwritten: dict[str, RunOutcome] = {}
        self._read = lru_cache(IN_MEMORY)(self._outcome)
        try:
            (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinklensError(
                f"could not create {self.folder}: {error}. Choose another folder for --keep."
            ) from error
        if (self.folder / "runs").is_symlink():
            raise SinklensError(f"{self.folder / 'runs'} is a link. Remove it, or choose another folder for --keep.")

    def runs(self) -> list[LabRun]:
        """The runs in the folder, oldest first, with those that cannot be read."""
        files = (self.folder / "runs").glob("*.npz")  # one with a dot is being written, or was left by a kill
        return sorted((_found(file) for file in files if ID.fullmatch(file.stem)), key=lambda run: run.created)

    def save(self, run: str, summary: dict[str, Any], spec: dict[str, Any], outcome: RunOutcome) -> None:
        """Write a run, or hold it in memory if that fails.

        Raises:
            SinklensError: the file cannot be written.
        """
        self._unwritten[run] = outcome
        for oldest in [*self._unwritten][:-MOST_UNWRITTEN]:
            del self._unwritten[oldest]
        record = json.dumps({"summary": summary, "spec": spec, "outcome": outcome.record()})
        arrays = {name: getattr(outcome, name) for name in ARRAYS}
        size = sum(array.nbytes for array in arrays.values())
        if size > MOST_BYTES - MOST_RECORD or 4 * len(record) > MOST_RECORD:
            raise SinklensError(f"the run has {size:,} bytes, too many for a file of the lab.")
        with atomic_write(self._file(run)) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, record=np.array(record), **arrays)
        del self._unwritten[run]

    def load(self, run: str) -> RunOutcome:
        """The outcome of a run.

        Raises:
            Refused: its file is gone or damaged.
        """
        return self._unwritten.get(run) or self._read(run)

    def _outcome(self, run: str) -> RunOutcome:
        try:
            record, arrays = _read(self._file(run), ARRAYS)
            return RunOutcome.from_record(record["outcome"], arrays)
        except Exception as error:  # NumPy may raise anything for a damaged or forged file
            raise Refused(
                f"the run's file can no longer be read: {str(error).rstrip('.')}. Run it again.", 410
            ) from error

    def remove(self, run: str) -> None:
        """Delete a run's file.

        Raises:
            SinklensError: it cannot be deleted.
        """
        try:
            self._file(run).unlink(missing_ok=True)
        except OSError as error:
            raise SinklensError(f"could not delete {self._file(run)}: {error}. Delete it by hand.") from error
        self._unwritten.pop(run, None)

    def close(self) -> None:
        """Delete the folder if it is a temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _file(self, run: str) -> Path:
        return self.folder / "runs" / f"{run}.npz"


def _read(file: Path, names: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record of a run's file, and some of its arrays."""
    with _opened(file) as opened:
        with ZipFile(opened) as archive:  # so that a small file cannot fill the memory
            parts, size = archive.infolist(), os.fstat(opened.fileno()).st_size
            require(all(part.compress_type == ZIP_STORED for part in parts), "its arrays are compressed.")
            require(sum(part.file_size for part in parts) <= size, "its arrays overlap.")
            require(archive.getinfo("record.npy").file_size <= MOST_RECORD, "its record is too large.")
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as arrays:
            record = parse_json(str(arrays["record"]), "its record", Refused)
            require(isinstance(record, dict), "its record is not an object.")
            return record, {name: arrays[name] for name in names}


def _opened(file: Path) -> BinaryIO:
    """A run's file, opened; the folder of all runs is two above it."""
    place = Path(os.path.realpath(file))
    require(os.path.lexists(file), "it was deleted.")
    require(place.is_relative_to(file.parents[1].resolve()), "it is a link that leads out of the folder; remove it.")
    require(place.is_file(), "it is not a regular file; remove it.")  # before it is opened, which can act on a device
    opened = os.fdopen(os.open(place, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    state = os.fstat(opened.fileno())  # of what was opened: the name may mean another file by now
    if stat.S_ISREG(state.st_mode) and state.st_size <= MOST_BYTES:
        return opened
    opened.close()
    raise Refused(f"it has {state.st_size:,} bytes, and a run at most {MOST_BYTES:,}; remove it.")


def _found(file: Path) -> LabRun:
    """The run in a file, or why it cannot be read."""
    try:
        record, _ = _read(file)
        summary = record["summary"]
        status, created = summary["status"], summary["created"]
        require(status in ENDED, "its status is unknown.")
        require(type(created) in (int, float) and 0 <= created < math.inf, "its time is not a number.")
        facts = {name: summary.get(name) for name in FACTS}
        for name, value in facts.items():
            require(value is None or type(value) in FACTS[name], f"{name} of its summary has the wrong type.")
        return LabRun(file.stem, RunSpec.from_json(record["spec"]), status, created, facts)
    except Exception as error:  # noqa: BLE001 — NumPy may raise anything for a damaged or forged file
        reason = str(error) if isinstance(error, Refused | SinklensError) else f"{type(error).__name__}: {error}"
        text = f"{file.name} is damaged, or not a run of this version of the lab: {reason:.300}"
        warnings.warn(text.encode("ascii", "backslashreplace").decode(), stacklevel=2)
        facts = {"error": text.encode("utf-8", "replace").decode()}
        return LabRun(file.stem, RunSpec("", ""), "failed", 0.0, facts, damaged=True)
