"""Finished prompts of a study, stored on disk one by one, so that a rerun measures only the others.

A *unit* is one prompt, measured on one model. Units are records of a ledger (sinklens/evaluation/ledger.py) in
``OUT/units``, with one run per model. A run is identified by everything that determines the numbers: the study and its
options, the model's weights and settings, the prompts, the code and its versions. If any of these differs, it is
another run, and no units are shared. The number of prompts measured together (`batch`) does not matter.

Pitfall: the units of every run ever started in a folder remain there. Delete ``units`` when there is nothing left to
resume; tables, figures and measurements are stored beside it.
"""

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xarray as xr

from sinklens.errors import SettingError
from sinklens.evaluation.ledger import LedgerRun, Writer

FOLDER = "units"


class Units(ExitStack):
    """The units of one model; use it in a ``with`` block, which keeps other processes from writing them.

    Attributes:
        done: indices of the finished prompts.
        total: number of prompts.

    Raises:
        LedgerError: another process is measuring them, or the folder cannot be written.
    """

    def __init__(self, out: Path | None, what: Mapping[str, Any], total: int, shard: int = 0) -> None:
        """Units of the run that `what` describes.

        Args:
            out: folder of the study; None keeps the units in memory.
            what: everything that determines the numbers.
            total: number of prompts.
            shard: the part of the prompts that this process measures.
        """
        super().__init__()
        self.total, self._shard = total, shard
        self._run = None if out is None else LedgerRun.of(out / FOLDER, what)
        self._writer: Writer | None = None
        self._found: dict[int, xr.Dataset | str] = {}

    def __enter__(self) -> "Units":
        if self._run is not None:
            self._writer = self.enter_context(Writer(self._run.begin(), self._shard))
            self._found = {int(record["sample"]): record["measured"] for record in self._run.records()}
        return self

    @property
    def done(self) -> set[int]:
        return set(self._found)

    def kept(self) -> int:
        """The number of finished prompts on disk, or in memory without a folder."""
        return len(self.done if self._run is None else self._run.done())

    def add(self, numbers: Sequence[int], measured: xr.Dataset) -> None:
        """Store the measurements of the prompts with the indices `numbers`, along ``prompt``.

        Raises:
            SettingError: `measured` holds another number of prompts.
        """
        if measured.sizes.get("prompt") != len(numbers):
            raise SettingError(
                f"measure got {len(numbers)} prompts and returned {dict(measured.sizes)}; its result needs the axis "
                f"'prompt' with one entry per prompt."
            )
        parts = {number: measured.isel(prompt=[place]) for place, number in enumerate(numbers)}
        if self._writer is None:
            self._found |= parts
        else:
            packed = {number: _packed(part) for number, part in parts.items()}
            self._writer.add(*({"sample": str(number), "measured": text} for number, text in packed.items()))
            self._found |= packed

    def dataset(self) -> xr.Dataset:
        """All units, in the order of the prompts."""
        parts = [self._found[number] for number in range(self.total)]
        found = [_unpacked(part) if isinstance(part, str) else part for part in parts]
        return xr.concat(found, dim="prompt", join="outer").drop_encoding()


def _packed(measured: xr.Dataset) -> str:
    """A netCDF file as text, which preserves every number, type and label."""
    return base64.b64encode(zlib.compress(bytes(measured.to_netcdf(engine="h5netcdf")))).decode()


def _unpacked(text: str) -> xr.Dataset:
    return xr.load_dataset(io.BytesIO(zlib.decompress(base64.b64decode(text))), engine="h5netcdf")
