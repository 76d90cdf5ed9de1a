"""Where a recorder keeps the steps of a run: main memory, or a Zarr store on disk.

A `Store` takes the steps in order and returns an xarray.Dataset at the end. While the next step is computed,
`ZarrStore` writes each step as separate chunks and then updates the number of complete steps in its attributes. No file
it needs is ever missing: files are replaced, not removed, and a run that is killed at any moment leaves a store that
opens with the steps that were written.

Size: a step of scores takes layers × heads × positions × 4 bytes (2 in float16). LLaDA-8B (32 layers, 32 heads) at
1,024 positions: 4.2 MB, or 2.1 MB in float16; its full patterns would take 2.1 GB in bfloat16.

Limitation: each chunk is a file, so a run of many short steps creates many small files; `SinkTrack.save` combines them
in one file.
"""

import json
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from sinklens.errors import SettingError, SinklensError
from sinklens.sinks.data import AXES

if TYPE_CHECKING:
    from collections.abc import Iterator

CANVASES = dict.fromkeys(("token_id", "masked", "committed"), ("pos",))
WIDE = frozenset({"stream_peak", "stream_median", "stream_channel_median"})  # above float16's 65,504 in some models
FORMAT = "sinklens sink track 2"
FORMATS = ("sinklens sink track 1", FORMAT)  # formats that can be opened; 1 calls is_real "real"
WRITTEN = "steps_written"  # attribute of a Zarr store: number of complete steps
FINISHED = "finished"  # attribute: 0 until the run has ended


class Store(ABC):
    """Takes the steps of a run."""

    @abstractmethod
    def append(self, step: Mapping[str, np.ndarray]) -> None:
        """Add a step: variable -> [batch, ...] without a step axis."""

    @abstractmethod
    def describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        """Set attributes, and variables [batch, pos] of the run; a later call replaces those of an earlier one."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until every step appended so far is stored."""

    @abstractmethod
    def dataset(self) -> xr.Dataset | None:
        """All steps, once the run has ended; None if there is no step."""


class MemoryStore(Store):
    """Steps in main memory.

    Args:
        axes: variable -> its axes after batch and step.
    """

    def __init__(self, axes: Mapping[str, tuple[str, ...]]) -> None:
        self._axes = CANVASES | dict(axes)
        self._steps: dict[str, list[np.ndarray]] = {name: [] for name in self._axes}
        self._attrs: dict[str, Any] = {}
        self._per_run: dict[str, np.ndarray] = {}

    def append(self, step: Mapping[str, np.ndarray]) -> None:
        """Keep the step."""
        for name, value in step.items():
            self._steps[name].append(value)

    def describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        """Keep the attributes and variables."""
        self._attrs, self._per_run = dict(attrs), dict(per_run)

    def flush(self) -> None:
        """Nothing to wait for."""

    def dataset(self) -> xr.Dataset | None:
        """The steps stacked."""
        if not self._steps["token_id"]:
            return None
        stacked = {
            name: (("batch", "step", *axes), np.stack(self._steps[name], axis=1)) for name, axes in self._axes.items()
        }
        return xr.Dataset(
            stacked | {name: (("batch", "pos"), value) for name, value in self._per_run.items()}, attrs=self._attrs
        )


class ZarrStore(Store):
    """Steps in a Zarr store at `path`, a new folder created with the first step; plain xarray can open it, too.

    A separate thread writes, in the order of the calls, at most one call behind: the next call waits for it and raises
    its error, if any.

    Args:
        axes: variable -> its axes after batch and step.
        steps: planned number of steps; the arrays have this length, `WRITTEN` says how many steps are complete.
        dtype: type of floating-point variables on disk; those in `WIDE` stay in float32.
        overwrite: replace an earlier track at `path` when the first step arrives.

    Raises:
        SettingError: `path` exists and may not be replaced.
    """

    def __init__(
        self, path: str | Path, axes: Mapping[str, tuple[str, ...]], steps: int, dtype: str, overwrite: bool = False
    ) -> None:
        refuse_existing(path, overwrite)
        self.path, self._overwrite = Path(path).absolute(), overwrite
        self._axes, self._steps, self._dtype = CANVASES | dict(axes), steps, np.dtype(dtype)
        self._arrays: dict[str, Any] = {}
        self._done = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sinklens-zarr")
        self._pending: Future[None] | None = None

    @cached_property
    def _group(self) -> Any:
        import zarr

        old = beside(self.path, "old")
        restore(self.path, old)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{self.path.stem}.", suffix=".part.zarr", dir=self.path.parent))
        try:
            zarr.open_group(part, mode="w-").update_attributes({"format": FORMAT, WRITTEN: 0, FINISHED: 0})
            part.chmod(0o777 & ~_umask())
            if self._overwrite and self.path.exists():  # moved first: a kill leaves the earlier track or nothing
                self.path.replace(old)
            self._claim(part)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        restore(self.path, old)
        return zarr.open_group(self.path, mode="r+")

    def _claim(self, part: Path) -> None:
        """Move the new store into place, which only one of several runs can do.

        Raises:
            SettingError: another run was faster.
        """
        try:
            part.rename(self.path)
        except OSError as error:
            if not self.path.exists():
                raise
            raise SettingError(
                f"another run began to record at {self.path} in the meantime; give each run a path of its own."
            ) from error

    def _consolidate(self) -> None:
        """List all arrays in the group's metadata, where xarray looks for them first."""
        import zarr

        with warnings.catch_warnings():  # other readers of format 3 may not know such lists
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
            self._group = zarr.consolidate_metadata(self._group.store)

    @contextmanager
    def _writing(self) -> "Iterator[None]":
        try:
            yield
        except OSError as error:
            kept = f"The {self._done} steps before this one are complete; open them with SinkTrack.open. "
            raise SinklensError(
                f"could not write to {self.path}: {error}. {kept if self._done else ''}Make room or choose another "
                f"place."
            ) from error

    def append(self, step: Mapping[str, np.ndarray]) -> None:
        """Write the step; it counts once all its variables are on disk."""
        self.flush()
        self._pending = self._thread.submit(self._append, dict(step))

    def flush(self) -> None:
        """Wait until everything is on disk.

        Raises:
            SinklensError: the step could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _append(self, step: Mapping[str, np.ndarray]) -> None:
        with self._writing():
            new = [name for name in step if name not in self._arrays]
            for name, value in step.items():
                if name in new:
                    self._create(name, ("batch", "step", *self._axes[name]), value, (self._steps,))
                self._arrays[name][:, self._done] = value
            if new:
                self._number({"step": self._steps}, step)
                self._consolidate()
            self._group.update_attributes({WRITTEN: self._done + 1})
        self._done += 1

    def _create(self, name: str, axes: tuple[str, ...], value: np.ndarray, planned: tuple[int, ...] = ()) -> None:
        """Create an array that holds `value` once per step, or once; every chunk is a file, even if it is empty."""
        floating = np.issubdtype(value.dtype, np.floating)
        first, *sizes = value.shape
        self._arrays[name] = self._group.create_array(
            name,
            shape=(first, *planned, *sizes),
            chunks=(first, *(1 for _ in planned), *sizes),
            dtype=self._dtype if floating and name not in WIDE else value.dtype,
            fill_value=np.nan if floating else None,
            dimension_names=axes,
            config={"write_empty_chunks": True},
        )

    def _number(self, sizes: Mapping[str, int], step: Mapping[str, np.ndarray]) -> None:
        """Write the coordinates: indices along each axis."""
        found = dict(sizes)
        for name, value in step.items():
            found |= dict(zip(("batch", *self._axes[name]), value.shape, strict=True))
        for axis in AXES:  # their coordinates are their indices
            if axis in found and axis not in self._arrays:
                numbers = np.arange(found[axis])
                self._create(axis, (axis,), numbers)
                self._arrays[axis][:] = numbers

    def describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        """Write the attributes and variables."""
        self.flush()
        self._pending = self._thread.submit(self._describe, dict(attrs), dict(per_run))

    def _describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        with self._writing():
            new = [name for name in per_run if name not in self._arrays]
            for name, value in per_run.items():
                if name in new:
                    self._create(name, ("batch", "pos"), value)
                self._arrays[name][:] = value
            if new:
                self._consolidate()
            self._group.update_attributes({"format": FORMAT, **attrs})

    def dataset(self) -> xr.Dataset | None:
        """The steps, read lazily from disk; marks the run as finished."""
        self.flush()
        if self._done == 0:
            return None
        with self._writing():
            self._group.update_attributes({FINISHED: 1})
        data = xr.open_zarr(self.path, chunks=None, consolidated=False)
        return data.isel(step=slice(0, data.attrs.pop(WRITTEN)))


def _umask() -> int:
    """The process's umask, which `tempfile` does not use."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def refuse_existing(path: str | Path, overwrite: bool = False) -> None:
    """Check that a run may record at `path`: a new store, or with `overwrite` an earlier track.

    Raises:
        SettingError: `path` exists and is not a track, or may not be replaced.
    """
    restore(Path(path), beside(Path(path), "old"))
    if not Path(path).exists():
        return
    if not is_store(Path(path)):
        raise SettingError(f"{path} exists and is not a sink track; choose another path.")
    if not overwrite:
        raise SettingError(
            f"{path} already exists; choose another path, or replace the recording with Record(..., overwrite=True)."
        )


def is_store(path: Path) -> bool:
    """Whether `path` is a sink track's Zarr store, finished or not."""
    try:
        return json.loads((path / "zarr.json").read_text())["attributes"]["format"] in FORMATS
    except (OSError, ValueError, KeyError, TypeError):
        return False


def beside(path: Path, state: str) -> Path:
    """The hidden folder next to a store that holds its "part" or "old" version."""
    return path.with_name(f".{path.stem}.{state}.zarr")


def restore(path: Path, old: Path) -> None:
    """Undo a replacement that was interrupted before the new store was in place; otherwise delete the old store."""
    if old.exists() and not path.exists():
        old.replace(path)
    shutil.rmtree(old, ignore_errors=True)
