"""Ledgers of version 0.1 and 0.2: folders of JSON Lines, which later versions read and never write.

``run-HASH/run.json`` describes a run. Its records are lines of ``records-N.jsonl``, its verdicts on generated programs
lines of ``verdicts-N.jsonl``; each line is JSON, a tab and the CRC-32 of the JSON.

Pitfall: a kill could leave a partial last line, which is not a record. A broken line anywhere else means that the file
was changed or damaged, and is an error.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sinklens.errors import LedgerError

FORMAT = "sinklens ledger 1"


def descriptions(ledger: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the description of every run in the folder `ledger`.

    Raises:
        LedgerError: a description cannot be read.
    """
    for note in sorted(ledger.glob("run-*/run.json")):
        try:
            content = json.loads(note.read_text())
            if content["format"] != FORMAT:
                raise LedgerError(f"{note} has format {content['format']!r}; this version reads {FORMAT!r}.")
            yield note.parent.name, content["what"]
        except (OSError, ValueError, KeyError) as error:
            raise LedgerError(f"{note} cannot be read ({error}); restore the file or delete its folder.") from error


def records(run: Path, kind: str) -> Iterator[dict[str, Any]]:
    """All complete records of a kind in the folder `run`, file by file.

    Raises:
        LedgerError: a broken line that is not the last of its file.
    """
    for file in sorted(run.glob(f"{kind}-*.jsonl")):
        lines = file.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            text, _, check = line.rpartition(b"\t")
            if check == b"%08x\n" % zlib.crc32(text):
                yield json.loads(text)
            elif number < len(lines):
                raise LedgerError(
                    f"{file}, line {number}: the checksum does not match, and more lines follow. The file was changed "
                    f"or damaged; restore it from a copy, or delete that line to evaluate its sample again."
                )
