"""Activations on disk: a Zarr store that grows by one batch of prompts at a time.

A row is one *place*, a position of a prompt at a step, with its activation and where it comes from. A batch counts once
the number of its rows is in the attributes; a killed collection leaves rows that do not count, which the next batch
overwrites. Rows are in the order of the prompts. Plain xarray can open the store, too.

Pitfall: neighboring rows are of one prompt and resemble each other. Read chunks in random order for training.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Shaped
from torch import Tensor

from sinklens.errors import SettingError, nearest
from sinklens.sinks.store import rounded

FORMAT = "sinklens activations 1"
COLUMNS = {"prompt": "int32", "step": "int32", "pos": "int32", "state": "int8", "token_id": "int32"}
"""What is kept about a place: ``pos`` does not count padding, ``state`` is an index into `STATES`."""
VALUES = 2**20  # values per chunk: 4 MB in float32


class ActivationStore:
    """The activations that `collect` wrote at `path`.

    Args:
        path: path of the store.
        point: the point to read, of a store with several.

    Raises:
        SettingError: there is no such store at `path`, or it does not hold `point`.
    """

    def __init__(self, path: str | Path, point: str | None = None) -> None:
        self.path, self._point = Path(path), point
        if not is_store(self.path):
            raise SettingError(f"{path} is not a store of activations; make one with features.collect(..., to=path).")
        if point is not None and point not in self.points:
            raise SettingError(
                f"{path} holds no activations at {point!r}, only at {', '.join(self.points)}."
                f"{nearest(point, self.points)}"
            )

    @classmethod
    def begin(
        cls, path: str | Path, about: Mapping[str, Any], d_in: int | Mapping[str, int], dtype: str
    ) -> "ActivationStore":
        """Create an empty store, or open the one at `path` if it was begun with the same arguments.

        Args:
            about: what determines the rows, as plain JSON values.
            d_in: size of an activation, or of each of several points.
            dtype: type of the activations on disk; bfloat16 as rounded float32, see sinks/store.py.

        Raises:
            SettingError: something else is at `path`, or a collection with other arguments.
        """
        import zarr

        about = json.loads(json.dumps(dict(about)))
        if Path(path).exists():
            store = cls(path)
            other = [name for name in about if store.about.get(name) != about[name]]
            if other:
                raise SettingError(
                    f"{path} holds activations that were collected with other {', '.join(other)}; choose another path, "
                    f"or delete that folder."
                )
            return store
        group = zarr.open_group(Path(path), mode="w-")
        widths = {"activation": d_in} if isinstance(d_in, int) else {array_of(name): d_in[name] for name in d_in}
        rows = max(256, VALUES // max(widths.values()))
        for name, kind in COLUMNS.items():
            group.create_array(name, shape=(0,), chunks=(rows,), dtype=kind, dimension_names=("place",))
        for name, width in widths.items():
            axis = "d_in" if name == "activation" else f"d_in of {name}"
            group.create_array(
                name, shape=(0, width), chunks=(rows, width), dtype="float32" if dtype == "bfloat16" else dtype,
                dimension_names=("place", axis), **_compression(dtype),
            )  # fmt: skip
        group.update_attributes({"format": FORMAT, "about": about, "places": 0, "prompts_done": 0})
        return cls(path)

    @cached_property
    def _group(self) -> Any:
        import zarr

        return zarr.open_group(self.path, mode="r+")

    @property
    def points(self) -> list[str]:
        """The points whose activations are stored."""
        point = self.about["point"]
        return [point] if isinstance(point, str) else list(point)

    @property
    def _activation(self) -> Any:
        """The array of activations.

        Raises:
            SettingError: the store has several, and none was chosen.
        """
        if isinstance(self.about["point"], str):
            return self._group["activation"]
        if self._point is None:
            raise SettingError(
                f"{self.path} holds activations at {', '.join(self.points)}; choose one: "
                f"ActivationStore({str(self.path)!r}, {self.points[0]!r})."
            )
        return self._group[array_of(self._point)]

    @property
    def about(self) -> dict[str, Any]:
        """What was collected: model, point, prompts, settings."""
        return dict(self._group.attrs["about"])

    @property
    def prompts_done(self) -> int:
        """Number of prompts whose places are stored."""
        return int(self._group.attrs["prompts_done"])

    @property
    def finished(self) -> bool:
        """Whether all prompts are stored."""
        return self.prompts_done == self.about["prompts"]

    @property
    def d_in(self) -> int:
        """Size of an activation."""
        return int(self._activation.shape[1])

    @property
    def chunk(self) -> int:
        """Rows per chunk, which is what is read from disk at once."""
        return int(self._activation.chunks[0])

    def __len__(self) -> int:
        """Number of places."""
        return int(self._group.attrs["places"])

    def __repr__(self) -> str:
        about = self.about
        return (
            f"ActivationStore({len(self)} places of {about['model']} at {', '.join(self.points)}, "
            f"{self.prompts_done} of {about['prompts']} prompts, {self.path})"
        )

    def append(self, rows: Mapping[str, np.ndarray], prompts_done: int) -> None:
        """Add the rows of a batch, by the names of `COLUMNS` and of the arrays of activations."""
        first, last = len(self), len(self) + len(rows["prompt"])
        narrow = self.about.get("dtype") == "bfloat16"
        for name, values in rows.items():
            values = rounded(values, "bfloat16") if narrow and name not in COLUMNS else values
            array = self._group[name]
            array.resize((last, *array.shape[1:]))
            if last > first:
                array[first:last] = values
        self._group.update_attributes({"places": last, "prompts_done": prompts_done})

    def read(self, start: int, stop: int) -> Float[Tensor, "place d_in"]:
        """The activations of some rows, in float32."""
        stop = min(stop, len(self))
        return torch.from_numpy(np.asarray(self._activation[start:stop], dtype=np.float32))

    def column(self, name: str) -> Shaped[np.ndarray, " place"]:
        """One of `COLUMNS`, of all rows."""
        return np.asarray(self._group[name][: len(self)])

    def chunks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Bounds of the chunks that cover the rows from `first` to `last`."""
        for start in range(first - first % self.chunk, last, self.chunk):
            yield max(start, first), min(start + self.chunk, last)

    def dataset(self) -> xr.Dataset:
        """All rows, read lazily."""
        data = xr.open_zarr(self.path, chunks=None, consolidated=False)
        return data.isel(place=slice(0, len(self)))


def array_of(point: str) -> str:
    """Name of the array with the activations at `point`, in a store of several."""
    return f"activation.{point}"


def _compression(dtype: str) -> dict[str, Any]:
    """Compression that removes the zero bytes of rounded numbers; Zarr's own for other types."""
    if dtype != "bfloat16":
        return {}
    from zarr.codecs import BloscCodec

    return {"compressors": BloscCodec(cname="zstd", clevel=3, shuffle="shuffle", typesize=4)}


def is_store(path: Path) -> bool:
    """Whether there is a store of activations at `path`."""
    try:
        return bool(json.loads((path / "zarr.json").read_text())["attributes"]["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False
