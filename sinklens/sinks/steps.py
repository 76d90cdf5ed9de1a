"""Where a recorder keeps the steps of a run: main memory, a function that takes them, or a Zarr store on disk.

While the next step is computed, `StoredSteps` writes each step as separate chunks, then the number of complete steps. A
run that is killed at any moment leaves a store that opens with the steps that were written.

Size: a step of scores takes layers × heads × positions × 4 bytes. LLaDA-8B (32 layers, 32 heads) at 1,024 positions:
4.2 MB; its full patterns would take 2.1 GB in bfloat16.

Limitation: each chunk is a file, so a run of many short steps creates many small files; `SinkTrack.save` combines them
in one file.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from sinklens.errors import require
from sinklens.sinks.store import TrackStore, writing
from sinklens.sinks.track import SinkTrack

CANVASES = dict.fromkeys(("token_id", "masked", "committed"), ("pos",))
OF_RUN = ("is_real", "unmask_step", "final_id")  # [batch, pos]
AT_ONCE = 16 * 2**20  # bytes of steps that are collected before a function gets them


def refuse_existing(path: str | Path) -> None:
    """Check that nothing is at `path`.

    Raises:
        SettingError: something is.
    """
    require(not Path(path).exists(), f"{path} already exists; choose another path, or delete it.")


class Steps:
    """Steps in main memory, in arrays allocated for the planned number of steps.

    Args:
        axes: variable -> its axes after batch and step.
        steps: planned number of steps.
    """

    def __init__(self, axes: Mapping[str, tuple[str, ...]], steps: int) -> None:
        self._axes = {name: ("batch", "step", *tail) for name, tail in (CANVASES | dict(axes)).items()}
        self._room, self._done = steps, 0
        self._kept: dict[str, np.ndarray] = {}
        self._attrs: dict[str, Any] = {}
        self._per_run: dict[str, np.ndarray] = {}

    def append(self, step: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add a step: variable -> [batch, ...] without a step axis; returns a copy, as callers reuse the arrays."""
        if self._done % self._room == 0:  # the rows of a batch may need more steps than planned for each
            room = {name: np.empty((len(one), self._room, *one.shape[1:]), one.dtype) for name, one in step.items()}
            self._kept = {
                name: np.concatenate([self._kept[name], one], axis=1) if self._done else one
                for name, one in room.items()
            }
        for name, value in step.items():
            self._kept[name][:, self._done] = value
        self._done += 1
        return {name: one[:, self._done - 1] for name, one in self._kept.items()}

    def describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        """Set attributes, and variables [batch, pos] of the run; a later call replaces those of an earlier one."""
        self._attrs, self._per_run = dict(attrs), dict(per_run)

    def flush(self) -> None:
        """Wait until every step appended so far is stored."""

    def dataset(self) -> xr.Dataset | None:
        """All steps, once the run has ended; None if there is no step."""
        if not self._done:
            return None
        stacked = {name: (axes, self._kept[name][:, : self._done]) for name, axes in self._axes.items()}
        per_run = {name: (("batch", "pos"), value) for name, value in self._per_run.items()}
        return xr.Dataset(stacked | per_run, attrs=self._attrs)


class ReducedSteps(Steps):
    """Steps that a function gets as tracks of at most `AT_ONCE` bytes, so that memory does not grow with their number.

    Pitfall: a function that keeps a part of a track without copying it keeps all of it.

    Args:
        axes, steps: as in `Steps`.
        reduce: called with consecutive steps, as a track.
    """

    def __init__(self, axes: Mapping[str, tuple[str, ...]], steps: int, reduce: Callable[[SinkTrack], None]) -> None:
        super().__init__(axes, steps)
        self._reduce = reduce

    def append(self, step: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the step; hand over those before it if together they exceed `AT_ONCE` bytes."""
        self._room = max(1, min(self._room, AT_ONCE // sum(value.nbytes for value in step.values())))
        if self._done == self._room:
            self.flush()
        return super().append(step)

    def flush(self) -> None:
        """Hand over the steps added so far."""
        data = super().dataset()
        self._kept, self._done = {}, 0
        if data is not None:
            self._reduce(SinkTrack(data))

    def dataset(self) -> None:
        """Hand over the last steps; no track is kept."""
        self.flush()


class StoredSteps(Steps):
    """Steps in a Zarr store at `path`, a new folder created with the first step.

    A separate thread writes, in the order of the calls, at most one call behind: the next call waits for it and raises
    its error, if any.

    Args:
        path: path of the store.
        axes, steps: as in `Steps`.

    Raises:
        SettingError: `path` exists.
    """

    def __init__(self, path: str | Path, axes: Mapping[str, tuple[str, ...]], steps: int) -> None:
        super().__init__(axes, steps)
        refuse_existing(path)
        self.path = Path(path).absolute()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sinklens-zarr")
        self._pending: Future[None] | None = None

    @cached_property
    def _store(self) -> TrackStore:
        refuse_existing(self.path)  # another run may have begun there
        store = TrackStore.begin(self.path, {})
        store.sizes["step"] = self._room
        return store

    def append(self, step: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write the step; it counts once all its variables are on disk."""
        self._write(self._append, kept := {name: value.copy() for name, value in step.items()})
        return kept

    def describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        """Write the attributes and variables."""
        self._write(self._describe, dict(attrs), dict(per_run))

    def _write(self, write: Callable[..., None], *what: dict[str, Any]) -> None:
        self.flush()
        self._pending = self._thread.submit(self._explained, write, *what)

    def _explained(self, write: Callable[..., None], *what: dict[str, Any]) -> None:
        kept = f"The {self._done} steps before this one are complete; open them with SinkTrack.open. "
        with writing(self.path, kept if self._done else ""):
            write(*what)

    def flush(self) -> None:
        """Wait until everything is on disk.

        Raises:
            SinklensError: the step could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _append(self, step: dict[str, np.ndarray]) -> None:
        for name, value in step.items():
            self._store.write(name, self._axes[name], value[:, None], step=self._done)
        self._store.commit(self._done + 1, finished=0)
        self._done += 1

    def _describe(self, attrs: dict[str, Any], per_run: dict[str, np.ndarray]) -> None:
        for name, value in per_run.items():
            self._store.write(name, ("batch", "pos"), value)
        self._store.commit(self._done, **attrs, finished=0)

    def dataset(self) -> xr.Dataset | None:
        """The steps, read lazily from disk; marks the run as finished."""
        self.flush()
        if self._done == 0:
            return None
        with writing(self.path):
            self._store.commit(self._done, finished=1)
        return self._store.dataset()
