"""Atomic file writes.

sinklens first writes every file next to its destination and renames it once it is complete, so after an interrupt, a
kill or a full disk either the old file remains or there is no file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinklens.errors import SinklensError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends, the file written there replaces `path`.

    Raises:
        SinklensError: the file cannot be written (missing folder, no permission, full disk).
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
        with suppress(OSError):  # if the folder could not be created, there is nothing to remove
            part.unlink(missing_ok=True)


def write_file(path: str | Path, content: str | bytes | memoryview) -> None:
    """Write a complete file, text as UTF-8; raises as `atomic_write`."""
    with atomic_write(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
