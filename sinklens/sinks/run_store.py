"""Sinks of many runs in one Zarr store that grows by run.

A `RunStore` has the variables of a track with one row per run, [batch, step, ...]: all scores, only the strongest keys
of each head, or only the sinks of a detector. Chunks hold steps of one run, so a run is read alone; *shards*, the
files, hold several chunks, so thousands of short runs make few files. A run counts once it is in the number of finished
runs in the attributes; a killed recording leaves rows that do not count, which the next one overwrites.

In memory is one shard, or of longer runs one shard for each row of a batch, whatever the number of runs.

Zarr has no bfloat16. Such numbers are rounded to bfloat16 and stored as float32, whose last two bytes are then zero and
vanish in the compression; any reader opens them.

Pitfall: prompts are padded on the left to the longest of the store. Padding and steps after a run has ended are NaN, -1
or False.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import xarray as xr

from sinklens.errors import SettingError, TrackError
from sinklens.sinks.active import nothing
from sinklens.sinks.stores import FORMAT as TRACK
from sinklens.sinks.stores import WIDE
from sinklens.sinks.track import SinkTrack

FORMAT = "sinklens runs 1"
SHARD, CHUNK = 8 * 2**20, 2**20  # bytes of all variables in a shard, and of one variable in a chunk, before compression
ROWS = 2**16  # sinks in a chunk; a shard holds eight
EVERY = 60.0  # seconds after which finished runs are written, even if their shard is not full
COLUMNS = {"run": "int32", "step": "int32", "layer": "int16", "head": "int16", "pos": "int32", "score": "float32"}
"""What a store of sinks keeps of each, in arrays ``sink_run``, ``sink_step``, …"""

StoredType = Literal["float32", "float16", "bfloat16"]


class RunStore:
    """The runs that `collect_sinks` recorded at `path`.

    Raises:
        SettingError: there is no such store at `path`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_run_store(self.path):
            raise SettingError(
                f"{path} is not a store of runs; make one with features.collect_sinks(model, prompts, {str(path)!r})."
            )

    @cached_property
    def group(self) -> Any:
        """The Zarr group."""
        import zarr

        return zarr.open_group(self.path, mode="r+", use_consolidated=False)

    @property
    def about(self) -> dict[str, Any]:
        """What was recorded: model, prompts, settings, what is kept."""
        return dict(self.group.attrs["about"])

    @property
    def finished(self) -> bool:
        """Whether all runs are stored."""
        return len(self) == self.about["prompts"]

    def __len__(self) -> int:
        """Number of finished runs."""
        return int(self.group.attrs["runs_done"])

    def __repr__(self) -> str:
        about = self.about
        return f"RunStore({len(self)} of {about['prompts']} runs of {about['model']}, {about['keep']}, {self.path})"

    def dataset(self) -> xr.Dataset:
        """The variables of all finished runs, [batch, ...], read from disk when they are used."""
        data = xr.open_zarr(self.path, chunks=None, consolidated=False)
        return data.drop_vars([f"sink_{name}" for name in COLUMNS], errors="ignore").isel(batch=slice(0, len(self)))

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
        return SinkTrack(self.dataset().assign_attrs(format=TRACK)).isel(batch=runs)

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

    def tracks(self, at_once: int = 1) -> Iterator[SinkTrack]:
        """All runs as tracks of `at_once` runs, one after the other."""
        for first in range(0, len(self), at_once):
            yield self.track(slice(first, first + at_once))


def is_run_store(path: Path) -> bool:
    """Whether there is a store of runs at `path`."""
    try:
        return bool(json.loads((path / "zarr.json").read_text())["attributes"]["runs_format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class RunWriter:
    """Writes runs to a store, a batch at a time; a call with the same arguments goes on where the last one ended.

    Args:
        path: path of the store.
        about: what determines the runs, as plain JSON values, with ``prompts``, their number, and ``dtype``.
        steps, positions: sizes of these axes.

    Attributes:
        ended: runs that have ended, of which the last may not be on disk yet.
        runs_in_shard: runs in a file; 0 before the first step.

    Raises:
        SettingError: something else is at `path`, or runs with other arguments.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any], steps: int, positions: int) -> None:
        import zarr

        about = json.loads(json.dumps(dict(about)))
        if Path(path).exists():
            found = RunStore(path).about
            other = [name for name in about if found.get(name) != about[name]]
            if other:
                raise SettingError(
                    f"{path} holds runs that were recorded with other {', '.join(other)}; choose another path, or "
                    f"delete that folder."
                )
        else:
            attributes = {"runs_format": FORMAT, "about": about, "runs_done": 0, "sinks_done": 0}
            zarr.open_group(Path(path), mode="w-").update_attributes(attributes)
        self.store = RunStore(path)
        self._steps, self.positions, self._dtype = steps, positions, about["dtype"]
        if self._dtype not in get_args(StoredType):
            raise SettingError(f"dtype must be one of {', '.join(get_args(StoredType))}; got {self._dtype!r}.")
        self.runs_in_shard = int(self.store.group.attrs.get("runs_in_shard", 0))
        self._steps_in_shard = int(self.store.group.attrs.get("steps_in_shard", 0))
        self._buffer: dict[str, np.ndarray] = {}
        self._first_run = self._first_step = 0  # of the buffer
        self.ended = len(self.store)
        self._written_at = time.monotonic()
        self._sinks: list[dict[str, np.ndarray]] = []
        self._sinks_at = int(self.store.group.attrs["sinks_done"])  # rows on disk
        self._attributes: dict[str, Any] = {}

    def room(self) -> int:
        """How many runs the next batch may have: those up to the end of a shard, or any number of long runs."""
        if self.runs_in_shard <= 1:
            return 2**31
        return self.runs_in_shard - self.ended % self.runs_in_shard

    def add(self, step: int, part: xr.Dataset, rows: int) -> None:
        """Add consecutive steps of a batch of `rows` runs, which follow the finished ones.

        Args:
            step: the first of the steps.
            part: variables [batch, step, ...]; the axis "pos" may be shorter than the store's, and ends with it.
        """
        values = {str(name): self._placed(value) for name, value in part.data_vars.items()}
        if self.runs_in_shard == 0:
            self._divide(values, rows)
        for name, value in values.items():
            self._array(name, part[name].dims, value)
        at = 0
        while at < part.sizes["step"]:
            self._move_to(step + at, rows)
            number = min(part.sizes["step"] - at, self._first_step + self._window() - step - at)
            for name, value in values.items():
                buffer = self._buffered(name, value, rows)
                first = self.ended - self._first_run
                place = step + at - self._first_step
                buffer[first : first + rows, place : place + number] = value[:, at : at + number]
            at += number

    def add_sinks(self, found: Mapping[str, np.ndarray]) -> None:
        """Add sinks of the batch: an array for each of `COLUMNS`."""
        self._sinks.append({name: np.asarray(found[name], dtype=kind) for name, kind in COLUMNS.items()})
        if sum(len(part["run"]) for part in self._sinks) >= 8 * ROWS:
            self._write_sinks(whole_shards=True)

    def end_batch(self, rows: int, per_run: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> None:
        """End the batch.

        Args:
            per_run: variables [batch] or [batch, pos] of its runs.
            attributes: of the track.
        """
        self._attributes = _merged(self._attributes or dict(self.store.group.attrs), attributes)
        for name, value in per_run.items():
            dims = ("batch", "pos")[: value.ndim]
            self._array(name, dims, value)
            value = self._placed(xr.DataArray(value, dims=dims))
            self.store.group[name][self.ended : self.ended + rows] = value
        self.ended += rows
        full = self.runs_in_shard <= 1 or self.ended % self.runs_in_shard == 0
        if full or time.monotonic() - self._written_at > EVERY:
            self.flush()

    def sinks_so_far(self) -> int:
        """Number of sinks added."""
        return self._sinks_at + sum(len(part["run"]) for part in self._sinks)

    def flush(self) -> None:
        """Write what is in memory, and count the runs that have ended."""
        self._write_buffer()
        self._write_sinks()
        done = {"runs_done": self.ended, "sinks_done": self._sinks_at}
        self.store.group.update_attributes({**self._attributes, **done})
        self._written_at = time.monotonic()

    def _placed(self, value: xr.DataArray) -> np.ndarray:
        """`value` with padding before its positions, in the type of the store."""
        array = np.asarray(value)
        if "pos" in value.dims:
            short = self.positions - value.sizes["pos"]
            if short < 0:
                raise SettingError(f"a run has {value.sizes['pos']} positions, the store {self.positions}.")
            widths = [(short if axis == "pos" else 0, 0) for axis in value.dims]
            array = np.pad(array, widths, constant_values=nothing(array.dtype))
        if not np.issubdtype(array.dtype, np.floating) or str(value.name) in WIDE:
            return array
        return rounded(array, self._dtype)

    def _divide(self, values: Mapping[str, np.ndarray], rows: int) -> None:
        """Decide how many runs, or steps of a run, a shard holds."""
        step = max(1, sum(value[0, 0].nbytes for value in values.values() if value.ndim > 1))
        runs = int(self.store.about["prompts"])  # a shard lists all of its chunks, even those without data
        self.runs_in_shard = min(runs, max(1, SHARD // (step * self._steps)))
        if self.runs_in_shard < rows:  # a shard of several runs is written when all of them have ended
            self.runs_in_shard = 1
        fits = max(1, SHARD // (step * rows))
        self._steps_in_shard = self._steps if self.runs_in_shard > 1 else min(self._steps, fits)
        self.store.group.update_attributes(
            {"runs_in_shard": self.runs_in_shard, "steps_in_shard": self._steps_in_shard}
        )

    def _array(self, name: str, dims: Sequence[Any], value: np.ndarray) -> None:
        """Create the array of a variable, if the store has none; what is not written takes no room."""
        if name not in self.store.group:
            self._create(name, tuple(map(str, dims)), value)

    def _create(self, name: str, dims: tuple[str, ...], value: np.ndarray) -> None:
        from zarr.codecs import BloscCodec

        sizes = dict(zip(dims, value.shape, strict=True))
        sizes |= {"batch": self.store.about["prompts"]} | ({"step": self._steps} if "step" in dims else {})
        sizes |= {"pos": self.positions} if "pos" in dims else {}
        chunk, shard = dict(sizes), dict(sizes)
        if "step" in dims:
            one = max(1, math.prod(size for axis, size in sizes.items() if axis not in ("batch", "step")))
            chunk |= {"batch": 1, "step": _divisor(self._steps_in_shard, CHUNK // (one * value.itemsize))}
            shard |= {"batch": self.runs_in_shard, "step": self._steps_in_shard}
        else:
            chunk |= {"batch": min(sizes["batch"], 256)}
            shard |= chunk
        self.store.group.create_array(
            name, shape=tuple(sizes.values()), chunks=tuple(chunk.values()), shards=tuple(shard.values()),
            dtype=value.dtype, fill_value=nothing(value.dtype), dimension_names=dims,
            compressors=BloscCodec(cname="zstd", clevel=3, shuffle="shuffle", typesize=value.itemsize),
        )  # fmt: skip

    def _window(self) -> int:
        """Steps that the buffer holds."""
        return self._steps_in_shard

    def _move_to(self, step: int, rows: int) -> None:
        """Make the buffer one that holds `step` of the runs of this batch."""
        first_step = step - step % self._steps_in_shard
        first_run = self.ended - self.ended % self.runs_in_shard if self.runs_in_shard > 1 else self.ended
        if (first_run, first_step) != (self._first_run, self._first_step) or not self._buffer:
            self._write_buffer()
            self._buffer, self._first_run, self._first_step = {}, first_run, first_step

    def _buffered(self, name: str, value: np.ndarray, rows: int) -> np.ndarray:
        if name not in self._buffer:
            runs = self.runs_in_shard if self.runs_in_shard > 1 else rows
            shape = (runs, self._steps_in_shard, *value.shape[2:])
            self._buffer[name] = np.full(shape, nothing(value.dtype), dtype=value.dtype)
            earlier = self.ended - self._first_run
            if earlier:  # of an earlier call, in the same shard
                self._buffer[name][:earlier] = self.store.group[name][self._first_run : self.ended]
        return self._buffer[name]

    def _write_buffer(self) -> None:
        """Write the buffer, which stays in memory for the next runs of its shard."""
        for name, values in self._buffer.items():
            array = self.store.group[name]
            stop = min(self._first_run + len(values), array.shape[0])
            steps = slice(self._first_step, min(self._first_step + values.shape[1], self._steps))
            array[self._first_run : stop, steps] = values[: stop - self._first_run, : steps.stop - steps.start]

    def _write_sinks(self, whole_shards: bool = False) -> None:
        """Write sinks to disk; with `whole_shards` only as many as fill shards."""
        if not self._sinks:
            return
        joined = {name: np.concatenate([part[name] for part in self._sinks]) for name in COLUMNS}
        number = len(joined["run"])
        if whole_shards:
            number -= (self._sinks_at + number) % (8 * ROWS)
        last = self._sinks_at + number
        for name, values in joined.items():
            if f"sink_{name}" not in self.store.group:
                self.store.group.create_array(
                    f"sink_{name}", shape=(0,), chunks=(ROWS,), shards=(8 * ROWS,), dtype=COLUMNS[name],
                    dimension_names=("sink",),
                )  # fmt: skip
            array = self.store.group[f"sink_{name}"]
            array.resize((last,))
            array[self._sinks_at : last] = values[:number]
        self._sinks = [{name: values[number:] for name, values in joined.items()}]
        self._sinks_at = last


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floating-point numbers as a store holds them; bfloat16 as float32 with zeros in the last two bytes."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).bfloat16().float().numpy()


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`, and at least 1."""
    return next((one for one in range(max(1, min(number, most)), 0, -1) if number % one == 0), 1)


def _merged(earlier: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a track, with the texts of the tokens of all of them."""
    texts = json.loads(str(earlier.get("vocabulary", "{}"))) | json.loads(str(attributes.get("vocabulary", "{}")))
    return {**attributes, "vocabulary": json.dumps(texts)}
