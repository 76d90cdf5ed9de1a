"""Folders for results, checked before the work that fills them: what marks each kind, and whether they can be written.

A folder holds results of one kind, so that a rerun finds its own files and no file of another kind is replaced.

Pitfall: the check cannot see the future. A disk that fills up during the run still ends it; what was written by then
remains.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from sinklens.errors import SinklensError, require

FolderKind = Literal[
    "an evaluation", "a study", "a trace", "a demo", "a training run", "a checkpoint", "a reproduction"
]
MARKS: dict[FolderKind, tuple[str, ...]] = {
    "an evaluation": ("ledger.sqlite", "run-*/run.json"),  # the latter in version 0.2
    "a study": ("units/ledger.sqlite", "units/run-*/run.json"),
    "a trace": ("answer.txt",),
    "a demo": ("answers.txt",),
    "a training run": ("state.pt",),
    "a checkpoint": ("config.json",),
    "a reproduction": ("reproduce.json",),
}
"""Kind -> patterns of files that only folders of this kind have."""
PROBE = 512  # bytes that must fit on the disk, at least a block of it


def check_folder(folder: str | Path, kind: FolderKind) -> None:
    """Check that results of `kind` can be written into `folder`, which need not exist; leaves nothing behind.

    Raises:
        SinklensError: the folder holds results of another kind; or see `require_writable`.
    """
    folder = Path(folder)
    for other, marks in MARKS.items():
        require(
            other == kind or not any(any(folder.glob(mark)) for mark in marks),
            f"{folder} holds {other} already; choose another folder for {kind}.",
            SinklensError,
        )
    require_writable(folder)


def cache_folder() -> Path:
    """sinklens's folder in the user's cache: ``$XDG_CACHE_HOME/sinklens``, else ``~/.cache/sinklens``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sinklens"


def inside(folder: Path, name: Any) -> Path:
    """The path in `folder` of a name that was read from a file.

    Raises:
        ValueError: the name is not text, empty, absolute, or leads outside.
    """
    parts = Path(name).parts if isinstance(name, str) else ()
    require(
        parts and not Path(name).is_absolute() and ".." not in parts and "\0" not in name,
        f"the name {name!r:.80} leads outside the folder",
        ValueError,
    )
    return folder / name


def require_writable(folder: str | Path) -> None:
    """Check that files can be written into `folder`, which need not exist; leaves nothing behind.

    Raises:
        SinklensError: it is a file, may not be written, or lies on a full disk.
    """
    folder = Path(folder).absolute()
    try:
        place = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(PROBE))
            file.flush()
    except OSError as error:
        raise SinklensError(
            f"cannot write to {folder}: {error.strerror}. Make room or choose another folder."
        ) from error
