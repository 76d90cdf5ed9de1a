"""Sinks of many runs in one Zarr store that grows by run.

A `RunStore` has the variables of a track with one row per run, [batch, step, ...]: all scores, only the strongest keys
of each head, or only the sinks of a detector. Chunks hold steps of one run, so a run is read alone; *shards*, the
files, hold several chunks, so thousands of short runs make few files. A run counts once its batch has ended; a killed
recording leaves rows that do not count, which the next one overwrites. Every part is written when it comes, so memory
grows neither with the number of runs nor with their steps.

Pitfall: prompts are padded on the left to the longest of the store. Padding and steps after a run has ended are NaN, -1
or False.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from sinklens.errors import SettingError, TrackError
from sinklens.sinks.store import Store, TrackStore
from sinklens.sinks.track import SinkTrack

SHARD = 8 * 2**20  # bytes of a variable in a shard, before compression
ROWS = 2**18  # sinks, or runs, in a chunk
COLUMNS = {"run": "int32", "step": "int32", "layer": "int16", "head": "int16", "pos": "int32", "score": "float32"}
"""What a store of sinks keeps of each, in arrays ``sink_run``, ``sink_step``, …"""


class RunStore(Store):
    """The runs that `collect_sinks` recorded at `path`.

    Raises:
        SettingError: there is no such store at `path`.
    """

    form, made, along = "sinklens runs 3", "features.collect_sinks(model, prompts, to=path)", "batch"

    @classmethod
    def begin(cls, path: str | Path, about: Mapping[str, Any], steps: int = 1, positions: int = 1) -> "RunStore":
        """A store to add runs to, as `Store.begin`.

        Args:
            about: as in `Store.begin`, with ``prompts``, their number.
            steps, positions: sizes of these axes.
        """
        store = super().begin(path, about)
        store.sizes |= {"batch": store.about["prompts"], "step": steps, "pos": positions}
        return store

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.sinks_so_far = int(self.group.attrs.get("sinks", 0))

    @property
    def finished(self) -> bool:
        """Whether all runs are stored."""
        return len(self) == self.about["prompts"]

    def __repr__(self) -> str:
        about = self.about
        return f"RunStore({len(self)} of {about['prompts']} runs of {about['model']}, {about['keep']}, {self.path})"

    def dataset(self) -> xr.Dataset:
        """The variables of all finished runs, [batch, ...], read from disk when they are used."""
        return super().dataset().drop_vars([f"sink_{name}" for name in COLUMNS], errors="ignore")

    def track(self, runs: int | slice | Sequence[int] = slice(None)) -> SinkTrack:
        """Some runs as a track, read from disk when it is used.

        Raises:
            TrackError: there is no such run, or the store keeps only the strongest keys or the sinks.
        """
        if self.about["keep"] != "all":
            raise TrackError(
                f"{self.path} keeps only {self.about['keep']}, which is no track; read dataset(), or sinks(run) of "
                f"sinks. Record keep='all' for a track."
            )
        return SinkTrack(self.dataset().assign_attrs(format=TrackStore.form)).isel(batch=runs)

    def tracks(self, at_once: int = 1) -> Iterator[SinkTrack]:
        """All runs as tracks of `at_once` runs, one after the other."""
        for first in range(0, len(self), at_once):
            yield self.track(slice(first, first + at_once))

    def sinks(self, run: int) -> xr.Dataset:
        """The sinks of a run, one row each: ``step``, ``layer``, ``head``, ``pos`` and ``score`` [sink].

        Raises:
            TrackError: there is no such run, or the store does not keep sinks.
        """
        if self.about["keep"] != "sinks":
            raise TrackError(f"{self.path} keeps {self.about['keep']}, not sinks; record it with keep='sinks'.")
        if not 0 <= run < len(self):
            raise TrackError(f"run {run} does not exist; the store has {len(self)} finished runs.")
        part = slice(*(int(self.group[name][run]) for name in ("sinks_first", "sinks_last")))
        mine = self.group["sink_run"][part] == run  # those of a batch lie together
        return xr.Dataset({name: ("sink", self.group[f"sink_{name}"][part][mine]) for name in [*COLUMNS][1:]})

    def add(self, step: int, part: xr.Dataset) -> None:
        """Add consecutive steps of a batch of runs, which follow the finished ones.

        Args:
            step: the first of the steps.
            part: variables [batch, step, ...]; the axis "pos" may be shorter than the store's, and ends with it.
        """
        for name, value in part.data_vars.items():
            self.write(str(name), value.dims, value.to_numpy(), batch=len(self), step=step, pos=self._left(value))

    def add_sinks(self, found: Mapping[str, np.ndarray]) -> None:
        """Add sinks of the batch: an array for each of `COLUMNS`."""
        for name, kind in COLUMNS.items():
            self.write(f"sink_{name}", ("sink",), np.asarray(found[name], dtype=kind), sink=self.sinks_so_far)
        self.sinks_so_far += len(found["run"])

    def end_batch(self, per_run: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> None:
        """End the batch, whose runs count from now on.

        Args:
            per_run: variables [batch] or [batch, pos] of its runs.
            attributes: of the track.
        """
        for name, values in per_run.items():
            value = xr.DataArray(values, dims=("batch", "pos")[: values.ndim])
            self.write(name, value.dims, values, batch=len(self), pos=self._left(value))
        texts = [json.loads(str(one.get("vocabulary", "{}"))) for one in (self.group.attrs, attributes)]
        merged = {**attributes, "vocabulary": json.dumps(texts[0] | texts[1]), "sinks": self.sinks_so_far}
        self.commit(len(self) + len(values), **merged)

    def _left(self, value: xr.DataArray) -> int:
        """Positions of padding before those of `value`."""
        short = self.sizes["pos"] - value.sizes.get("pos", 0)
        if short < 0:
            raise SettingError(f"a run has {value.sizes['pos']} positions, the store {self.sizes['pos']}.")
        return short

    def layout(self, sizes: Mapping[str, int], itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
        """Steps of one run in a chunk, several runs, or the steps of one that is too long, in a shard."""
        if "step" not in sizes:
            return {axis: ROWS for axis in ("batch", "sink") if axis in sizes}, {}
        step = max(1, itemsize * math.prod(size for axis, size in sizes.items() if axis not in ("batch", "step")))
        steps = min(sizes["step"], max(1, SHARD // step))
        runs = min(sizes["batch"], max(1, SHARD // (step * steps)))
        return {"batch": 1, "step": steps}, {"batch": runs, "step": steps}
