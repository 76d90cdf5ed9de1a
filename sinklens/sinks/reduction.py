"""A store that hands recorded steps to a function and forgets them, so that memory does not grow with the steps.

`ReducingStore` collects steps until they take `AT_ONCE` bytes, calls the function with them as a track, and drops them.
A short run is therefore one track, and one of a large model a few steps at a time.

Pitfall: a function that keeps a part of the track without copying it keeps all of it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.sinks.stores import MemoryStore, Store

if TYPE_CHECKING:
    from sinklens.sinks.track import SinkTrack

AT_ONCE = 16 * 2**20  # bytes of steps that are collected before they are handed over


class ReducingStore(Store):
    """Steps that are handed to a function.

    Args:
        axes: variable -> its axes after batch and step.
        reduce: called with consecutive steps, as a track.
    """

    def __init__(self, axes: Mapping[str, tuple[str, ...]], reduce: "Callable[[SinkTrack], None]") -> None:
        self._axes, self._reduce = dict(axes), reduce
        self._held, self._size = MemoryStore(self._axes), 0

    def append(self, step: Mapping[str, np.ndarray]) -> None:
        """Collect the step."""
        if self._size + sum(value.nbytes for value in step.values()) > AT_ONCE:
            self.flush()
        self._held.append(step)
        self._size += sum(value.nbytes for value in step.values())

    def describe(self, attrs: Mapping[str, Any], per_run: Mapping[str, np.ndarray]) -> None:
        """Keep the attributes and variables, which later tracks get too."""
        self._held.describe(attrs, per_run)

    def flush(self) -> None:
        """Hand over the steps collected so far."""
        from sinklens.sinks.track import SinkTrack

        data = self._held.dataset()
        if data is None:
            return
        per_run = {str(name): data[name].to_numpy() for name in data if "step" not in data[name].dims}
        self._held, self._size = MemoryStore(self._axes), 0
        self._held.describe(dict(data.attrs), per_run)
        self._reduce(SinkTrack(data))

    def dataset(self) -> None:
        """Hand over the last steps; no track is kept."""
        self.flush()
