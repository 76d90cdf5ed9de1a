"""Activations on disk: a store that grows by one batch of prompts at a time.

A row is one *place*, a position of a prompt at a step, with its activation and where it comes from. Rows are in the
order of the prompts. `ActivationStore.frame` returns them as a pandas table; `ActivationStore.export` writes Parquet
shards, which `datasets.load_dataset` and pandas read, or safetensors.

Pitfall: neighboring rows are of one prompt and resemble each other. Read chunks in random order for training.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Shaped
from torch import Tensor

from sinklens.errors import SettingError, nearest
from sinklens.sinks.kinds import STATES
from sinklens.sinks.store import Store
from sinklens.utils.arguments import Count, read_as

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

Format = Literal["parquet", "safetensors"]
COLUMNS = {"prompt": "int32", "step": "int32", "pos": "int32", "state": "int8", "token_id": "int32"}
"""What is kept about a place: ``pos`` does not count padding, ``state`` is an index into `STATES`."""
VALUES = 2**20  # values per chunk: 4 MB in float32


class ActivationStore(Store):
    """The activations that `collect` wrote at `path`.

    Args:
        path: path of the store.
        point: the point to read, of a store with several.

    Raises:
        SettingError: there is no such store at `path`, or it does not hold `point`.
    """

    form, made, along = "sinklens activations 2", "features.collect(..., to=path)", "place"

    def __init__(self, path: str | Path, point: str | None = None) -> None:
        super().__init__(path)
        self._point = point
        if point is not None and point not in self.points:
            raise SettingError(
                f"{path} holds no activations at {point!r}, only at {', '.join(self.points)}."
                f"{nearest(point, self.points)}"
            )

    @classmethod
    def begin(
        cls, path: str | Path, about: Mapping[str, Any], widths: int | Mapping[str, int] = 1
    ) -> "ActivationStore":
        """A store to add places to, as `Store.begin`.

        Args:
            about: as in `Store.begin`, with ``model``, ``point`` and ``prompts``, their number.
            widths: size of an activation, or of each of several points.
        """
        store = super().begin(path, about)
        if "prompts_done" not in store.group.attrs:
            sizes = (
                {"activation": widths} if isinstance(widths, int) else {array_of(one): widths[one] for one in widths}
            )
            store.append(
                {name: np.zeros(0, dtype=kind) for name, kind in COLUMNS.items()}
                | {name: np.zeros((0, width), dtype=np.float32) for name, width in sizes.items()},
                prompts_done=0,
            )
        return store

    def layout(self, sizes: Mapping[str, int], itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
        """Chunks of about `VALUES` numbers; those of columns have as many rows as activations of 256."""
        width = next((size for axis, size in sizes.items() if axis != "place"), 256)
        return {"place": max(256, VALUES // width)}, {}

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
            return self.group["activation"]
        if self._point is None:
            raise SettingError(
                f"{self.path} holds activations at {', '.join(self.points)}; choose one: "
                f"ActivationStore({str(self.path)!r}, {self.points[0]!r})."
            )
        return self.group[array_of(self._point)]

    @property
    def prompts_done(self) -> int:
        """Number of prompts whose places are stored."""
        return int(self.group.attrs["prompts_done"])

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

    def __repr__(self) -> str:
        about = self.about
        return (
            f"ActivationStore({len(self)} places of {about['model']} at {', '.join(self.points)}, "
            f"{self.prompts_done} of {about['prompts']} prompts, {self.path})"
        )

    def append(self, rows: Mapping[str, np.ndarray], prompts_done: int) -> None:
        """Add the rows of a batch, by the names of `COLUMNS` and of the arrays of activations."""
        first = len(self)
        for name, values in rows.items():
            axis = "d_in" if name == "activation" else f"d_in of {name}"
            self.write(name, ("place",) if name in COLUMNS else ("place", axis), values, place=first)
        self.commit(first + len(rows["prompt"]), prompts_done=prompts_done)

    def read(self, start: int, stop: int) -> Float[Tensor, "place d_in"]:
        """The activations of some rows, in float32."""
        stop = min(stop, len(self))
        return torch.from_numpy(np.asarray(self._activation[start:stop], dtype=np.float32))

    def column(self, name: str) -> Shaped[np.ndarray, " place"]:
        """One of `COLUMNS`, of all rows."""
        return np.asarray(self.group[name][: len(self)])

    def chunks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Bounds of the chunks that cover the rows from `first` to `last`."""
        for start in range(first - first % self.chunk, last, self.chunk):
            yield max(start, first), min(start + self.chunk, last)

    def frame(self) -> "DataFrame":
        """A table with a row for each place: its columns, the name of its state, and its activations as arrays.

        All of it is in memory; for large stores use `export`.
        """
        return _frame(self.dataset())

    def export(self, to: str | Path, kind: Format = "parquet", *, rows: Count = 100_000) -> list[Path]:
        """Write files of `rows` places each, numbered ``train-00000-of-00003``, one at a time in memory.

        They lie in ``to/data``, where ``datasets.load_dataset(to)`` finds Parquet files, and ``to/about.json`` says
        what was collected.

        Args:
            to: a new or empty folder.
            kind: "parquet", with lists of numbers as activations; or "safetensors", with one tensor for each column.
            rows: places per file.

        Returns:
            The files, in the order of the places.

        Raises:
            SettingError: an unknown kind, fewer than one row per file, an empty store, or `to` holds something.
        """
        read_as(Count, "rows", rows)
        if kind not in get_args(Format):
            raise SettingError(f"kind must be one of {', '.join(get_args(Format))}; got {kind!r}.")
        if not len(self):
            raise SettingError(f"the store {self.path} holds no places; collect some first.")
        folder, data, total = Path(to), self.dataset(), -(-len(self) // rows)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingError(f"{to} is not an empty folder; choose another, or delete it.")
        (folder / "data").mkdir(parents=True)
        files = [folder / "data" / f"train-{number:05}-of-{total:05}.{kind}" for number in range(total)]
        for number, file in enumerate(files):
            part = data.isel(place=slice(number * rows, (number + 1) * rows)).load()
            if kind == "parquet":
                _frame(part).to_parquet(file, index=False)
            else:
                _save_tensors(part, file)
        (folder / "about.json").write_text(json.dumps(self.about | {"places": len(self)}, indent=1) + "\n")
        return files


def array_of(point: str) -> str:
    """Name of the array with the activations at `point`, in a store of several."""
    return f"activation.{point}"


def _frame(data: xr.Dataset) -> "DataFrame":
    """One column for each variable; those with a second axis hold an array in each row."""
    from pandas import DataFrame

    arrays = {str(name): variable.to_numpy() for name, variable in data.data_vars.items()}
    arrays["state"] = np.array(STATES)[arrays["state"]]
    return DataFrame({name: array if array.ndim == 1 else list(array) for name, array in arrays.items()})


def _save_tensors(data: xr.Dataset, file: Path) -> None:
    from safetensors.numpy import save_file

    save_file({str(name): np.ascontiguousarray(array.to_numpy()) for name, array in data.data_vars.items()}, file)
