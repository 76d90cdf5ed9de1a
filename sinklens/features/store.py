"""Activations on disk: a store that grows by one batch of prompts at a time.

A row is one *place*, a position of a prompt at a step, with its activations and where it comes from. Rows are in the
order of the prompts. `dataset` opens it as xarray does; any reader of Zarr opens it, too.

Pitfall: neighboring rows are of one prompt and resemble each other. Read chunks in random order for training.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from sinklens.errors import nearest, require
from sinklens.sinks.store import Store, reading
from sinklens.utils.arguments import checked, read_as

COLUMNS = {"prompt": "int32", "step": "int32", "pos": "int32", "state": "int8", "token_id": "int32"}
"""What is kept about a place: ``pos`` does not count padding, ``state`` is an index into `STATES`."""
VALUES = 2**20  # values per chunk: 4 MB in float32


class ActivationStore(Store):
    """The activations that `collect` wrote at `path`.

    Args:
        path: path of the store.
        point: the point to read; None is the first.

    Raises:
        SettingError: there is no such store at `path`, or it does not hold `point`.
    """

    form, made, along = "sinklens activations 3", "features.collect(..., out=path)", "place"

    @checked
    def __init__(self, path: str | Path, point: str | None = None) -> None:
        super().__init__(path)
        self.points: list[str] = list(self.about["points"])
        self.point = point or self.points[0]
        require(
            self.point in self.points,
            f"{path} holds no activations at {point!r}, only at {', '.join(self.points)}."
            f"{nearest(self.point, self.points)}",
        )

    def check(self) -> None:
        super().check()
        require(read_as(list, "points", self.about["points"]), "it has no points")
        read_as(str, "model", self.about["model"])
        for point in self.about["points"]:
            self.group[array_of(read_as(str, "a point", point))] if len(self) else None
        for name, number in (("prompts", self.about["prompts"]), ("prompts_done", self.prompts_done)):
            read_as(int, name, number)

    def layout(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Chunks of about `VALUES` numbers; those of columns have as many rows as activations of 256."""
        width = next((size for axis, size in sizes.items() if axis != "place"), 256)
        return {"place": max(256, VALUES // width)}

    @property
    def prompts_done(self) -> int:
        """Number of prompts whose places are stored."""
        return int(self.group.attrs.get("prompts_done", 0))

    @property
    def finished(self) -> bool:
        """Whether all prompts are stored."""
        return self.prompts_done == int(self.about["prompts"])

    @property
    def d_in(self) -> int:
        """Size of an activation."""
        return int(self.group[array_of(self.point)].shape[1])

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
            axes = ("place",) if name in COLUMNS else ("place", f"d_in of {name}")
            self.write(name, axes, values.astype(COLUMNS.get(name, np.float32)), place=first)
        self.commit(first + len(rows["prompt"]), prompts_done=prompts_done)

    def read(self, start: int, stop: int) -> Float[Tensor, "place d_in"]:
        """The activations of some rows at the point, in float32."""
        stop = min(stop, len(self))
        with reading(self.path):
            return torch.from_numpy(np.asarray(self.group[array_of(self.point)][start:stop], dtype=np.float32))

    def column(self, name: str) -> Shaped[np.ndarray, " place"]:
        """One of `COLUMNS`, of all rows."""
        with reading(self.path):
            return np.asarray(self.group[name][: len(self)])


def array_of(point: str) -> str:
    """Name of the array with the activations at `point`."""
    return f"activation.{point}"
