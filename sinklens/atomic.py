"""Atomic file writes.

sinklens writes every file beside its destination first and renames it when it is complete, so an interrupt, a kill or
a full disk leaves either the old file or none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinklens.errors import SinklensError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends, what was written there replaces `path`.

    Raises:
        SinklensError: the file cannot be written (no folder, no right, disk full).
    """
    path = Path(path)
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")  # two processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        raise SinklensError(f"could not write {path}: {error}. Make room or choose another place.") from error
    finally:
        with suppress(OSError):  # a folder that could not be made holds no part either
            part.unlink(missing_ok=True)
