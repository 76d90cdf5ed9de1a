"""Sink tracks on disk, and several tracks concatenated into one.

A track is one NetCDF-4 file, or a Zarr store if its name ends in ``.zarr``. Files are written to a temporary path
beside the target and moved into place once complete. The store of a killed run opens with the steps that it completed.
A store has one chunk per step, so single steps of an opened track can be read alone.

Limitation: a NetCDF file is first built in main memory, because on a full disk the HDF5 library fails while closing,
where its error cannot be caught. Save a track that is larger than memory as a Zarr store.
"""

import json
import shutil
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from sinklens.errors import SinklensError, TrackError
from sinklens.sinks.active import nothing
from sinklens.sinks.data import TrackData
from sinklens.sinks.stores import FINISHED, FORMAT, FORMATS, WIDE, WRITTEN, beside, is_store, restore
from sinklens.utils.atomic import atomic_write

SAME = ("model", "revision", "family", "causal", "settings", "dtype")  # must match to concatenate tracks


def save(track: TrackData, path: Path, dtype: str, overwrite: bool = True) -> Path:
    """See `SinkTrack.save`."""
    if dtype not in ("float32", "float16"):
        raise TrackError(f"dtype on disk must be 'float32' or 'float16'; got {dtype!r}.")
    _refuse(path, overwrite)
    data = track.data.assign_attrs(format=FORMAT).drop_encoding()
    recorded = [name for name in data.data_vars if np.issubdtype(data[name].dtype, np.floating)]
    data = data.assign({name: data[name].astype("float32" if name in WIDE else dtype) for name in recorded})
    if path.suffix == ".zarr":
        return _save_store(data, path)
    compressed = {name: {"zlib": True, "complevel": 1} for name in recorded}
    content = data.to_netcdf(engine="h5netcdf", encoding=compressed, invalid_netcdf=dtype == "float16")
    with atomic_write(path) as part:
        part.write_bytes(content)
    return path


def _save_store(data: xr.Dataset, path: Path) -> Path:
    part, old = (beside(path, state) for state in ("part", "old"))
    chunks = {
        name: {"chunks": tuple(1 if axis == "step" else size for axis, size in values.sizes.items())}
        for name, values in data.data_vars.items()
    }
    try:
        restore(path, old)
        shutil.rmtree(part, ignore_errors=True)
        with warnings.catch_warnings():  # other readers of format 3 may not know consolidated metadata
            warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
            data.to_zarr(part, mode="w", consolidated=True, encoding=chunks, write_empty_chunks=True)
        if path.exists():
            path.replace(old)
        part.replace(path)
    except OSError as error:
        raise SinklensError(f"could not write {path}: {error}. Make room or choose another place.") from error
    finally:
        restore(path, old)
        shutil.rmtree(part, ignore_errors=True)
    return path


def _refuse(path: Path, overwrite: bool) -> None:
    """Reject a path that holds something other than a track, or a track that may not be replaced."""
    if not path.exists():
        return
    if not (is_store(path) if path.is_dir() else _is_file(path)):
        raise TrackError(f"{path} exists and is not a sink track; choose another path.")
    if not overwrite:
        raise TrackError(f"{path} already exists; pass overwrite=True to replace it, or choose another path.")


def _is_file(path: Path) -> bool:
    """Whether `path` is a sink track's NetCDF file, or empty like a new temporary file."""
    import h5py

    if path.stat().st_size == 0:
        return True
    try:
        with h5py.File(path) as file:
            found = file.attrs.get("format")
    except OSError:
        return False
    return (found.decode() if isinstance(found, bytes) else found) in FORMATS


def open_dataset(path: Path) -> xr.Dataset:
    """See `SinkTrack.open`."""
    if not path.exists():
        raise TrackError(f"{path} does not exist; pass the path that SinkTrack.save returned.")
    data = _open_store(path) if path.is_dir() else _open_file(path)
    if data.attrs.get("format") not in FORMATS:
        raise TrackError(
            f"{path} is not a sink track that this version can read (format {data.attrs.get('format')!r})."
        )
    return data


def _open_file(path: Path) -> xr.Dataset:
    try:
        return _converted(xr.open_dataset(path, engine="h5netcdf"))
    except (OSError, ValueError, KeyError) as error:
        raise TrackError(
            f"{path} is not a complete NetCDF-4 file ({error}); it may be truncated. Save the track again."
        ) from error


def _open_store(path: Path) -> xr.Dataset:
    """Open a Zarr store up to its last complete step; missing chunks are an error."""
    import zarr

    if not (path / "zarr.json").exists():
        raise TrackError(f"{path} is a folder, but not the Zarr store of a sink track.")
    try:
        with warnings.catch_warnings():  # a kill during a write leaves a *.partial, which is never read
            warnings.filterwarnings("ignore", r"Object at .*\.partial is not recognized")
            data = _converted(xr.open_zarr(path, chunks=None, consolidated=False))
            arrays = dict(zarr.open_group(path, mode="r", use_consolidated=False).arrays())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackError(
            f"{path} is not a complete Zarr store ({error}); it may be truncated. Copy or record it again."
        ) from error
    if data.attrs.get("format") not in FORMATS:
        return data
    killed = WRITTEN in data.attrs and not data.attrs.get(FINISHED, 1)
    steps = int(data.attrs.pop(WRITTEN, data.sizes.get("step", 0)))
    if steps == 0:
        raise TrackError(f"{path} holds no step: its run ended during the first one. Delete it and run again.")
    for name in set(arrays) - ({"unmask_step"} if killed else set()):
        lost = _lost_chunks(path / name, arrays[name], steps)
        if lost:
            raise TrackError(
                f"{path} lacks {lost} chunks of {name}; part of the store was lost. Copy the complete folder again."
            )
    data = data.isel(step=slice(0, steps))
    return _unfinished(data) if killed else data


def _converted(data: xr.Dataset) -> xr.Dataset:
    """Rename the variables of format 1 to the current names."""
    return data.rename(real="is_real") if data.attrs.get("format") == FORMATS[0] and "real" in data else data


def _lost_chunks(folder: Path, array: Any, steps: int) -> int:
    """Number of chunks of the first `steps` steps that are missing on disk."""
    places = [
        range(-(-steps // size) if axis == "step" else count)
        for axis, size, count in zip(array.metadata.dimension_names, array.chunks, array.cdata_shape, strict=True)
    ]
    keys = (array.metadata.encode_chunk_key(place) for place in product(*places))
    return sum(not (folder / key).is_file() for key in keys)


def _unfinished(data: xr.Dataset) -> xr.Dataset:
    """The track of a killed run; ``unmask_step`` is derived from the completed steps."""
    token, committed, real = (data[name].to_numpy() for name in ("token_id", "committed", "is_real"))
    steps, prompt = token.shape[1], np.arange(token.shape[2]) < int(data.attrs["prompt_length"])
    changed = np.concatenate([token[:, 1:] != token[:, :-1], committed[:, -1:]], axis=1)
    last = np.where(changed, np.arange(steps)[None, :, None], -1).max(axis=1)
    undecided = data["masked"].to_numpy()[:, -1] & ~committed[:, -1]
    last = np.where(undecided, np.where(prompt, -1, steps), last)
    return data.assign(unmask_step=(("batch", "pos"), np.where(real, last, -1)))


def concat(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """See `SinkTrack.concat`."""
    if not parts:
        raise TrackError("there are no tracks to concatenate; pass at least one.")
    first = parts[0]
    for part in parts[1:]:
        for name in SAME:
            if part.attrs.get(name) != first.attrs.get(name):
                raise TrackError(
                    f"concatenated tracks must share one model and its settings; {name} is {first.attrs.get(name)!r} "
                    f"in the first and {part.attrs.get(name)!r} in another. Keep them separate."
                )
        if set(part.data_vars) != set(first.data_vars):
            differing = ", ".join(sorted(str(name) for name in set(part.data_vars) ^ set(first.data_vars)))
            raise TrackError(f"concatenated tracks must hold the same quantities; only some of these hold {differing}.")
        _refuse_other_places(part, first)
    answers = {part.sizes["pos"] - int(part.attrs["prompt_length"]) for part in parts}
    if len(answers) > 1:
        raise TrackError(
            f"concatenated tracks must have answers of one length; these have {sorted(answers)} positions."
        )
    steps, length = (max(part.sizes[axis] for part in parts) for axis in ("step", "pos"))
    padded = [_padded(part, length - part.sizes["pos"], steps - part.sizes["step"]) for part in parts]
    together = xr.concat(padded, dim="batch", join="exact", combine_attrs="drop")
    longest = max(parts, key=lambda part: part.sizes["step"])
    kept = {axis: longest[axis] for axis in ("step", "layer", "head") if axis in longest.coords}
    return together.assign_coords(kept).assign_attrs(_shared_attrs(parts, length))


def _refuse_other_places(part: xr.Dataset, first: xr.Dataset) -> None:
    """Reject parts cut with `SinkTrack.isel` that do not hold the same layers, heads and steps."""
    for axis in ("step", "layer", "head"):
        numbers = [data[axis].to_numpy().tolist() for data in (first, part)]
        common = min(map(len, numbers)) if axis == "step" else None
        if numbers[0][:common] != numbers[1][:common]:
            raise TrackError(
                f"concatenated tracks must hold the same layers, heads and steps; {axis}s are {numbers[0]} in the "
                f"first and {numbers[1]} in another. Cut them alike, or concatenate before cutting."
            )


def _padded(part: xr.Dataset, left: int, late: int) -> xr.Dataset:
    bare = part.drop_vars(list(part.coords)).drop_attrs()
    missing: dict[str, float] = {str(name): nothing(values.dtype) for name, values in bare.items()}
    steps, unmask = part.sizes["step"], bare["unmask_step"]  # never decided: unmask_step is the number of steps
    bare = bare.assign(unmask_step=unmask.where(unmask != steps, steps + late))
    return bare.pad({"pos": (left, 0), "step": (0, late)}, constant_values=missing)


def _shared_attrs(parts: Sequence[xr.Dataset], length: int) -> dict[str, object]:
    vocabulary: dict[str, str] = {}
    for part in parts:
        vocabulary |= json.loads(part.attrs.get("vocabulary", "{}"))
    seeds = {int(seed) for part in parts for seed in np.ravel(part.attrs.get("seed", []))}
    answer = parts[0].sizes["pos"] - int(parts[0].attrs["prompt_length"])
    shared = parts[0].attrs | {"prompt_length": length - answer, "vocabulary": json.dumps(vocabulary)}
    if len(seeds) > 1:
        shared["seed"] = sorted(seeds)
    if any(not part.attrs.get(FINISHED, 1) for part in parts):
        shared[FINISHED] = 0
    return shared
