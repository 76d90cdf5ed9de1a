"""Sink tracks on disk, and several tracks as one.

A track is one NetCDF-4 file or a Zarr store, told apart by the suffix ``.zarr``. Files are written beside their place
and moved there when they are whole. The store of a run that was killed is opened with the steps it finished.

One way this fails: a NetCDF file is made in main memory first, because on a full disk the HDF5 library fails while
closing, where its error cannot be caught. Keep a track that is larger than memory as a Zarr store.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from sinklens.errors import SinklensError, TrackError
from sinklens.sinks.stores import FORMAT, WRITTEN
from sinklens.writing import whole

if TYPE_CHECKING:
    from sinklens.sinks.track import SinkTrack

SAME = ("model", "revision", "family", "causal", "settings", "dtype")  # of tracks that are put together


def save(track: "SinkTrack", path: Path, dtype: str) -> Path:
    """See `SinkTrack.save`."""
    if dtype not in ("float32", "float16"):
        raise TrackError(f"dtype on disk is 'float32' or 'float16'; got {dtype!r}.")
    data = track.data.assign_attrs(format=FORMAT).drop_encoding()
    recorded = [name for name in data.data_vars if np.issubdtype(data[name].dtype, np.floating)]
    data = data.assign({name: data[name].astype(dtype) for name in recorded})
    if path.suffix == ".zarr":
        return _save_store(data, path)
    compressed = {name: {"zlib": True, "complevel": 1} for name in recorded}
    content = data.to_netcdf(engine="h5netcdf", encoding=compressed, invalid_netcdf=dtype == "float16")
    with whole(path) as part:
        part.write_bytes(content)
    return path


def _save_store(data: xr.Dataset, path: Path) -> Path:
    if path.exists() and not _is_store(path):
        raise TrackError(f"{path} exists and is no sink track; choose another place.")
    part = path.with_name(f".{path.stem}.part.zarr")
    try:
        shutil.rmtree(part, ignore_errors=True)
        data.to_zarr(part, mode="w", consolidated=False)
        if path.exists():
            shutil.rmtree(path)
        part.replace(path)
    except OSError as error:
        raise SinklensError(f"could not write {path}: {error}. Make room or choose another place.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return path


def _is_store(path: Path) -> bool:
    try:
        return json.loads((path / "zarr.json").read_text())["attributes"]["format"] == FORMAT
    except (OSError, ValueError, KeyError):
        return False


def open_dataset(path: Path) -> xr.Dataset:
    """See `SinkTrack.open`."""
    if not path.exists():
        raise TrackError(f"{path} does not exist; give the path that SinkTrack.save returned.")
    data = _open_store(path) if path.is_dir() else _open_file(path)
    if data.attrs.get("format") != FORMAT:
        raise TrackError(f"{path} is no sink track of this version (format {data.attrs.get('format')!r}).")
    return data


def _open_file(path: Path) -> xr.Dataset:
    try:
        return xr.open_dataset(path, engine="h5netcdf")
    except (OSError, ValueError, KeyError) as error:
        raise TrackError(f"{path} is not a whole NetCDF-4 file ({error}); it may be truncated.") from error


def _open_store(path: Path) -> xr.Dataset:
    """A Zarr store; steps behind the last whole one are left out, missing chunks are refused."""
    import zarr

    if not _is_store(path):
        raise TrackError(f"{path} is a folder, but no sink track's Zarr store.")
    try:
        data = xr.open_zarr(path, chunks=None, consolidated=False)
        scores = zarr.open_array(path / "score", mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise TrackError(f"{path} is not a whole Zarr store ({error}); it may be truncated.") from error
    steps = int(data.attrs.get(WRITTEN, data.sizes["step"]))
    if scores.nchunks_initialized < steps * scores.nchunks // max(1, data.sizes["step"]):
        raise TrackError(f"{path} lacks chunks of its scores; part of the store was lost. Copy it again, whole.")
    return data if "unmask_step" in data else _unfinished(data.isel(step=slice(0, steps)))


def _unfinished(data: xr.Dataset) -> xr.Dataset:
    """The finished steps of a run that was killed; the step that decided each position is read off them."""
    token, committed = data["token_id"].to_numpy(), data["committed"].to_numpy()
    steps = token.shape[1]
    changed = np.concatenate([token[:, 1:] != token[:, :-1], committed[:, -1:]], axis=1)
    last = np.where(changed, np.arange(steps)[None, :, None], -1).max(axis=1)
    undecided = data["masked"].to_numpy()[:, -1] & ~committed[:, -1]
    unmask_step = np.where(undecided, steps, last)
    return data.assign(unmask_step=(("batch", "pos"), unmask_step)).assign_attrs(finished=0)


def concat(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """See `SinkTrack.concat`."""
    if not parts:
        raise TrackError("there is no track to put together; give at least one.")
    first = parts[0]
    for part in parts[1:]:
        for name in SAME:
            if part.attrs.get(name) != first.attrs.get(name):
                raise TrackError(
                    f"tracks put together come from one model and one setting; {name} is {first.attrs.get(name)!r} in "
                    f"the first and {part.attrs.get(name)!r} in another. Keep them apart."
                )
        if set(part.data_vars) != set(first.data_vars):
            differing = ", ".join(sorted(str(name) for name in set(part.data_vars) ^ set(first.data_vars)))
            raise TrackError(f"tracks put together hold the same quantities; {differing} is in some of these only.")
    answers = {part.sizes["pos"] - int(part.attrs["prompt_length"]) for part in parts}
    if len(answers) > 1:
        raise TrackError(f"tracks put together have answers of one length; these have {sorted(answers)} positions.")
    steps, length = (max(part.sizes[axis] for part in parts) for axis in ("step", "pos"))
    padded = [_padded(part, length - part.sizes["pos"], steps - part.sizes["step"]) for part in parts]
    return xr.concat(padded, dim="batch", combine_attrs="drop").assign_attrs(_shared_attrs(parts, length))


def _padded(part: xr.Dataset, left: int, late: int) -> xr.Dataset:
    nothing: dict[str, float] = {"masked": False, "committed": False, "real": False}
    bare = part.drop_vars([name for name in part.coords if name in ("step", "pos")]).drop_attrs()
    nothing |= {str(name): -1 for name, values in bare.items() if np.issubdtype(values.dtype, np.integer)}
    return bare.pad({"pos": (left, 0), "step": (0, late)}, constant_values=nothing)


def _shared_attrs(parts: Sequence[xr.Dataset], length: int) -> dict[str, object]:
    vocabulary: dict[str, str] = {}
    for part in parts:
        vocabulary |= json.loads(part.attrs.get("vocabulary", "{}"))
    seeds = {part.attrs["seed"] for part in parts if "seed" in part.attrs}
    answer = parts[0].sizes["pos"] - int(parts[0].attrs["prompt_length"])
    shared = parts[0].attrs | {"prompt_length": length - answer, "vocabulary": json.dumps(vocabulary)}
    if len(seeds) > 1:
        shared["seed"] = sorted(int(seed) for seed in seeds)
    if any(not part.attrs.get("finished", 1) for part in parts):
        shared["finished"] = 0
    return shared
