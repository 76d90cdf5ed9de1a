"""Sink tracks on disk, and several tracks concatenated into one.

A track is one NetCDF-4 file, or a Zarr store (`TrackStore`) if its name ends in ``.zarr``. Both are written to a
temporary path beside the target and moved into place once complete. The store of a killed run opens with the steps that
it completed. A store has one chunk per step, so single steps of an opened track can be read alone.

Limitation: a NetCDF file is first built in main memory, because on a full disk the HDF5 library fails while closing,
where its error cannot be caught.
"""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge, Le
from xarray.core import indexing

from sinklens.errors import SettingError, TrackError, require
from sinklens.sinks.data import AXES, TrackData, unmask_steps
from sinklens.sinks.store import Checked, TrackStore, attributes_of, nothing, replacing, writing
from sinklens.utils.arguments import Count, read_as
from sinklens.utils.atomic import write_file
from sinklens.utils.documents import parse_json, read_json
from sinklens.utils.hub import local

FILE = "track.nc"  # in a folder on the hub
PLACES = ("batch", "step", "pos")
VARIABLES = {  # name -> axes and kinds of numbers
    "score": (AXES, "f"), "token_id": (PLACES, "iu"), "masked": (PLACES, "b"), "committed": (PLACES, "b"),
    "active": (("batch", "step"), "b"), "is_real": (("batch", "pos"), "b"), "unmask_step": (("batch", "pos"), "iu"),
    "final_id": (("batch", "pos"), "iu"),
}  # fmt: skip
DOCUMENTS = ("settings", "versions", "vocabulary", "special")  # attributes that hold a JSON object
ATTRIBUTES: dict[str, Any] = dict.fromkeys(
    ("model", "revision", "family", "attention", "sampler", "dtype", "device", *DOCUMENTS), str
) | dict.fromkeys(("causal", "block_length"), int)
SAME = ("model", "revision", "family", "causal", "settings", "dtype")  # must match to concatenate tracks


def save(track: TrackData, path: Path) -> Path:
    refuse_other(path)
    data = track.data.assign_attrs(format=TrackStore.form).drop_encoding()
    if path.suffix == ".zarr":
        with writing(path), replacing(path) as part:
            store = TrackStore.begin(part, {})
            for name, variable in data.variables.items():
                store.write(str(name), variable.dims, variable.to_numpy())
            store.commit(track.steps, **data.attrs)
        return path
    compressed = {name: {"zlib": True, "complevel": 1} for name in data.data_vars if data[name].dtype.kind == "f"}
    write_file(path, data.to_netcdf(engine="h5netcdf", encoding=compressed))
    return path


def refuse_other(path: Path) -> None:
    """Check that a track may be written to `path`: a new path, or that of an earlier track.

    Raises:
        SettingError: `path` holds something else.
    """
    empty = path.is_file() and not path.stat().st_size  # like a new temporary file
    require(
        not path.exists() or empty or _format_of(path) == TrackStore.form,
        f"{path} exists and is not a sink track; choose another path.",
    )


def _format_of(path: Path) -> Any:
    """The attribute "format" of a Zarr folder or a NetCDF file; None if there is none."""
    if path.is_dir():
        return attributes_of(path).get("format")
    try:
        with xr.open_dataset(path, engine="h5netcdf") as data:
            return data.attrs.get("format")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def found(path: str | Path, revision: str | None) -> Path:
    """The file or the store at `path`, downloaded if it is a name on the hub."""
    place = local(path, revision, [FILE])
    return place if place == Path(path) else place / FILE


def open_dataset(path: Path) -> xr.Dataset:
    require(path.exists(), f"{path} does not exist; pass the path that SinkTrack.save returned.", TrackError)
    try:
        data = _open_store(path) if path.is_dir() else xr.open_dataset(path, engine="h5netcdf")
        if data.attrs.get("format") == TrackStore.form:
            _check(data)
    except TrackError:
        raise
    except Exception as error:  # HDF5 and Zarr raise errors of any class for files that they did not write
        kind = "Zarr store" if path.is_dir() else "NetCDF-4 file"
        raise TrackError(
            f"{path} is not a complete {kind} ({error!s:.300}); it may be truncated. Copy, save or record it again."
        ) from error
    require(
        data.attrs.get("format") == TrackStore.form,
        f"{path} is not a sink track of this version (format {data.attrs.get('format')!r:.80}).",
        TrackError,
    )
    checked = {name: Checked(values.variable, path) for name, values in data.data_vars.items()}
    return data.copy(data={name: indexing.LazilyIndexedArray(values) for name, values in checked.items()})


def _check(data: xr.Dataset) -> None:
    """Check the variables and attributes of a track that another program may have written.

    Raises:
        SinklensError: one has another type, axes or range.
    """
    attributes = data.attrs
    for name in ATTRIBUTES.keys() & attributes.keys():
        read_as(ATTRIBUTES[name], name, attributes[name])
    objects = {name: parse_json(attributes.get(name, "{}"), name) for name in DOCUMENTS}
    for name, found in objects.items():
        read_as(dict, name, found)
    for token, text in objects["vocabulary"].items():
        read_as(str, f"the text of token {int(token)}", text)
    for name, ids in objects["special"].items():
        for token in read_as(list, f"special.{name}", ids):
            read_as(int, f"a token of special.{name}", token)
    for name in ("steps", "canvas_length"):
        read_as(Count | None, name, objects["settings"].get(name))
    for seed in np.ravel(attributes.get("seed", [])).tolist():
        read_as(int, "a seed", seed)
    for name, (axes, kinds) in VARIABLES.items():
        if (name in data or name not in ("final_id", "active")) and (
            data[name].dims != axes or data[name].dtype.kind not in kinds
        ):
            raise SettingError(f"{name} must have the axes {axes}; it has {data[name].dims} of {data[name].dtype}")
    for axis, values in data.coords.items():
        require(values.dims == (axis,), f"the coordinate {axis} must have the axis {axis}; it has {values.dims}")
    read_as(Annotated[int, Ge(0), Le(data.sizes["pos"])], "prompt_length", attributes["prompt_length"])


def _open_store(path: Path) -> xr.Dataset:
    """Open a Zarr store up to its last complete step; missing chunks are an error."""
    attributes = read_json(path / "zarr.json")["attributes"]
    if attributes.get("format") != TrackStore.form:
        return xr.Dataset(attrs=attributes)
    store = TrackStore(path)
    require(
        len(store), f"{path} holds no step: its run ended during the first one. Delete it and run again.", TrackError
    )
    data = store.dataset()
    for name in data.variables:
        if lost := store.lost_chunks(str(name)):
            raise TrackError(
                f"{path} lacks {lost} chunks of {name}; part of the store was lost. Copy the complete folder again."
            )
    return data if "unmask_step" in data else _unfinished(data)


def _unfinished(data: xr.Dataset) -> xr.Dataset:
    """The track of a killed run; ``unmask_step`` and ``final_id`` are derived from the completed steps."""
    token, masked, committed, real = (
        torch.from_numpy(data[name].to_numpy()) for name in ("token_id", "masked", "committed", "is_real")
    )
    # after the last step, committed positions hold other tokens, whichever they are
    canvas = torch.cat([token, torch.where(committed[:, -1:], -2, token[:, -1:])], dim=1)
    undecided = torch.cat([masked, (masked & ~committed)[:, -1:]], dim=1)
    last = unmask_steps(canvas, undecided, real, int(data.attrs["prompt_length"]))
    places = ("batch", "pos")
    return data.assign(unmask_step=(places, last.numpy()), final_id=(places, token[:, -1].numpy()))


def concat(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    require(parts, "there are no tracks to concatenate; pass at least one.", TrackError)
    for part in parts[1:]:
        steps = min(part.sizes["step"], parts[0].sizes["step"])
        first, other = _common(parts[0], steps), _common(part, steps)
        for name in first:
            require(
                first[name] == other[name],
                f"concatenated tracks must have the same {name}; the first has {first[name]!r} and another "
                f"{other[name]!r}. Keep them separate, cut them alike, or concatenate before cutting.",
                TrackError,
            )
    steps, length = (max(part.sizes[axis] for part in parts) for axis in ("step", "pos"))
    padded = [_padded(part, length - part.sizes["pos"], steps - part.sizes["step"]) for part in parts]
    together = xr.concat(padded, dim="batch", join="exact", combine_attrs="drop")
    longest = max(parts, key=lambda part: part.sizes["step"])
    kept = {axis: longest[axis] for axis in ("step", "layer", "head") if axis in longest.coords}
    return together.assign_coords(kept).assign_attrs(_shared_attrs(parts, length))


def _common(part: xr.Dataset, steps: int) -> dict[str, Any]:
    """What the parts of a concatenated track share; of the steps, the first `steps`."""
    return {
        **{name: part.attrs.get(name) for name in SAME},
        "answer length": part.sizes["pos"] - int(part.attrs["prompt_length"]),
        "quantities": sorted(map(str, part.data_vars)),
        **{f"{axis}s": part[axis].to_numpy().tolist() for axis in ("layer", "head")},
        "steps": part["step"].to_numpy().tolist()[:steps],
    }


def _padded(part: xr.Dataset, left: int, late: int) -> xr.Dataset:
    bare = part.drop_vars(list(part.coords)).drop_attrs()
    missing: dict[str, float] = {str(name): nothing(values.dtype) for name, values in bare.items()}
    size, last, unmask = part.sizes["step"], bare.isel(step=-1), bare["unmask_step"]
    same = bare.get("final_id", last["token_id"]) == last["token_id"]
    bare = bare.assign(unmask_step=unmask.where(~same | ~last["masked"] | (unmask != size), size + late))
    return bare.pad({"pos": (left, 0), "step": (0, late)}, constant_values=missing)


def _shared_attrs(parts: Sequence[xr.Dataset], length: int) -> dict[str, object]:
    vocabulary = dict(chain.from_iterable(json.loads(part.attrs.get("vocabulary", "{}")).items() for part in parts))
    seeds = {int(seed) for part in parts for seed in np.ravel(part.attrs.get("seed", []))}
    answer = parts[0].sizes["pos"] - int(parts[0].attrs["prompt_length"])
    shared = parts[0].attrs | {"prompt_length": length - answer, "vocabulary": json.dumps(vocabulary)}
    if len(seeds) > 1:
        shared["seed"] = sorted(seeds)
    if any(not part.attrs.get("finished", 1) for part in parts):
        shared["finished"] = 0
    return shared
