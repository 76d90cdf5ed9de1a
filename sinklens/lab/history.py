"""The lab's runs on disk: one file each, complete or absent.

A run is ``runs/ID.npz`` with its arrays and, as JSON, its record: what was requested, what came out, and the provenance
that a sink track has. What a tab showed is ``states/LINK.json``. Without ``--keep``, the folder is a temporary one.

Names of files are made here and never come from a request: a request's id is looked up among those that exist.

Limitation: two labs may write to one folder, but each lists only the runs that were there when it started.
"""

import json
import secrets
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from sinklens.atomic import atomic_write
from sinklens.errors import SinklensError
from sinklens.lab.outcome import ARRAYS, Outcome
from sinklens.lab.refusal import Refused, require

IN_MEMORY = 4  # outcomes that are not read again
MOST_STATES = 2_000
STATE_CHARACTERS = 64_000


class Kept(NamedTuple):
    """A run found on disk.

    Attributes:
        id: its id.
        summary: the line of the history.
        spec: what was requested, as JSON.
        created: when, in seconds since 1970.
    """

    id: str
    summary: dict[str, Any]
    spec: dict[str, Any]
    created: float


class History:
    """A folder of runs and states.

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
        self._recent: OrderedDict[str, Outcome] = OrderedDict()
        try:
            for part in ("runs", "states"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinklensError(
                f"could not create {self.folder}: {error}. Choose another folder for --keep."
            ) from error
        self._states = {file.stem for file in (self.folder / "states").glob("*.json")}

    def runs(self) -> Iterator[Kept]:
        """The runs in the folder, oldest first; files that cannot be read are skipped with a warning."""
        found = []
        for file in (self.folder / "runs").glob("*.npz"):
            if file.name.startswith("."):  # being written, or left by a kill
                continue
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    record = json.loads(str(arrays["record"]))
                found.append(Kept(file.stem, record["summary"], record["spec"], float(record["summary"]["created"])))
            except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
                warnings.warn(f"{file} is not a run of the lab and was skipped: {error}", stacklevel=2)
        yield from sorted(found, key=lambda run: run.created)

    def save(self, run: str, summary: dict[str, Any], spec: dict[str, Any], outcome: Outcome) -> None:
        """Write a run.

        Raises:
            SinklensError: the file cannot be written.
        """
        record = json.dumps({"summary": summary, "spec": spec, "outcome": outcome.record()})
        arrays = {name: getattr(outcome, name) for name in ARRAYS}
        with atomic_write(self._file(run)) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, record=np.array(record), **arrays)
        self._remember(run, outcome)

    def load(self, run: str) -> Outcome:
        """The outcome of a run.

        Raises:
            Refused: its file is gone or damaged.
        """
        known = self._recent.get(run)
        if known is not None:
            return known
        try:
            with np.load(self._file(run), allow_pickle=False) as arrays:
                record = json.loads(str(arrays["record"]))
                outcome = Outcome.from_record(record["outcome"], {name: arrays[name] for name in ARRAYS})
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise Refused(f"the run's file can no longer be read: {error}. Run it again.", 410) from error
        self._remember(run, outcome)
        return outcome

    def remove(self, run: str) -> None:
        """Delete a run's file."""
        self._recent.pop(run, None)
        self._file(run).unlink(missing_ok=True)

    def add_state(self, state: Any) -> str:
        """Keep what a tab shows; returns its link.

        Raises:
            Refused: it is too large, or there are too many.
        """
        text = json.dumps(state)
        require(len(text) <= STATE_CHARACTERS, f"a state has at most {STATE_CHARACTERS:,} characters of JSON.", 413)
        require(len(self._states) < MOST_STATES, f"the lab keeps at most {MOST_STATES:,} links.", 429)
        link = secrets.token_hex(8)
        with atomic_write(self.folder / "states" / f"{link}.json") as part:
            part.write_text(text)
        self._states.add(link)
        return link

    def state(self, link: str) -> Any:
        """What a tab showed.

        Raises:
            Refused: there is no such link.
        """
        require(link in self._states, "no such link; it was made by another lab, or without --keep.", 404)
        return json.loads((self.folder / "states" / f"{link}.json").read_text())

    def close(self) -> None:
        """Delete the folder if it is a temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _file(self, run: str) -> Path:
        return self.folder / "runs" / f"{run}.npz"

    def _remember(self, run: str, outcome: Outcome) -> None:
        self._recent[run] = outcome
        while len(self._recent) > IN_MEMORY:
            self._recent.popitem(last=False)
