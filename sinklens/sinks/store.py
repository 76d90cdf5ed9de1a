"""Zarr folders that grow: a track by steps, activations by places.

A `Store` is a group of named variables with named axes; plain xarray opens it, too. It grows along one axis. How much
of it counts is an attribute of the group, which is written last. So a writer that is killed at any moment leaves a
store that opens with what counted before, and the next writer overwrites the rest. No file that a store needs is ever
missing: every chunk is a file, even if it holds nothing.

Zarr has no bfloat16. Such numbers are rounded to bfloat16 and stored as float32, whose last two bytes are then zero and
vanish in the compression; any reader opens them.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import xarray as xr
from annotated_types import Ge
from xarray.backends import BackendArray
from xarray.core import indexing

from sinklens.errors import CheckpointError, SettingError, SinklensError, TrackError, require
from sinklens.utils.arguments import read_as
from sinklens.utils.documents import read_json

AnyStore = TypeVar("AnyStore", bound="Store")
StoredType = Literal["float32", "float16", "bfloat16"]


class Store:
    """The store at `path`.

    Attributes:
        form: the attribute "format" of its kind.
        made: how to make one, for messages.
        along: the axis along which it grows.
        sizes: planned sizes of axes; an array grows along all others when something is written beyond its end.

    Raises:
        SettingError: there is no such store at `path`.
    """

    form: ClassVar[str]
    made: ClassVar[str]
    along: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        import zarr

        self.path = Path(path)
        require(
            attributes_of(self.path).get("format") == self.form,
            f"{path} is not a store of {self.form.split()[1]}; make one with {self.made}.",
        )
        try:
            self.group: Any = zarr.open_group(self.path, mode="r+")
            self.check()
        except Exception as error:  # Zarr raises errors of any class for files that it did not write
            raise SettingError(f"{path} is damaged ({error!s:.300}); copy it again, or make another.") from error
        self.sizes: dict[str, int] = {}
        self._arrays: dict[str, Any] = {}
        self._changed = False

    @classmethod
    def begin(cls: type[AnyStore], path: str | Path, about: Mapping[str, Any]) -> AnyStore:
        """Create an empty store, or open the one at `path` if it was begun with the same arguments.

        Args:
            about: what determines its content, as plain JSON values.

        Raises:
            SettingError: something else is at `path`, or a store that was begun with other arguments.
        """
        import zarr

        about = json.loads(json.dumps(dict(about)))
        if not Path(path).exists():
            zarr.open_group(Path(path), mode="w-").update_attributes({"format": cls.form, "about": about, "written": 0})
        store = cls(path)
        other = [name for name in about if store.about.get(name) != about[name]]
        require(
            not other, f"{path} was recorded with other {', '.join(other)}; choose another path, or delete that folder."
        )
        return store

    def check(self) -> None:
        """Check the attributes, which another program may have written; an error of any class refuses them."""
        read_as(dict, "about", self.group.attrs["about"])
        read_as(Annotated[int, Ge(0)], "written", self.group.attrs["written"])

    @property
    def about(self) -> dict[str, Any]:
        """What was recorded, and with which settings."""
        return dict(self.group.attrs["about"])

    def __len__(self) -> int:
        """How much counts along the axis that grows."""
        return int(self.group.attrs["written"])

    def dataset(self) -> xr.Dataset:
        """What counts, read from disk when it is used."""
        try:
            data = xr.open_zarr(self.path, chunks=None, consolidated=True)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SettingError(f"{self.path} is damaged ({error!s:.300}); copy it again, or make another.") from error
        data.attrs = {name: value for name, value in data.attrs.items() if name not in ("about", "written")}
        return data.isel({self.along: slice(0, len(self))})

    def write(self, name: str, dims: Sequence[Any], values: np.ndarray, **start: int) -> None:
        """Write `values` into a variable, from `start` along some axes; creates it, or makes it longer.

        What was never written is NaN, −1 or False. It counts after `commit`.
        """
        if np.issubdtype(values.dtype, np.floating):
            values = rounded(values, self.about.get("dtype", "float32"))
        if name not in self._arrays:
            self._arrays[name] = self.group[name] if name in self.group else self._create(name, dims, values)
        array = self._arrays[name]
        spans = [(start.get(axis, 0), start.get(axis, 0) + size) for axis, size in zip(dims, values.shape, strict=True)]
        shape = tuple(max(size, stop) for size, (_, stop) in zip(array.shape, spans, strict=True))
        if shape != array.shape:
            array.resize(shape)
            self._changed = True
        array[tuple(slice(*span) for span in spans)] = values

    def _create(self, name: str, dims: Sequence[Any], values: np.ndarray) -> Any:
        from zarr.codecs import BloscCodec

        self._changed = True
        sizes = {str(axis): self.sizes.get(axis, size) for axis, size in zip(dims, values.shape, strict=True)}
        return self.group.create_array(
            name, shape=tuple(sizes.values()), dtype=values.dtype, fill_value=nothing(values.dtype), overwrite=True,
            chunks=tuple((sizes | self.layout(sizes)).values()),
            compressors=BloscCodec(cname="zstd", clevel=3, shuffle="shuffle", typesize=values.itemsize),
            dimension_names=tuple(sizes), config={"write_empty_chunks": True},
        )  # fmt: skip

    def layout(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of a chunk along the axes that it divides."""
        raise NotImplementedError

    def commit(self, written: int, **attributes: Any) -> None:
        """Count everything up to `written` along the axis that grows, and set attributes."""
        if self._changed:
            import zarr

            with warnings.catch_warnings():  # other readers of format 3 may not know consolidated metadata
                warnings.filterwarnings("ignore", "Consolidated metadata is currently not part")
                self.group = zarr.consolidate_metadata(self.group.store)
            self._changed = False
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in attributes.items()}
        self.group.update_attributes({**plain, "written": written})


class TrackStore(Store):
    """A track of one run, or of several as one batch; every step is a chunk, so one step can be read alone."""

    form, made, along = "sinklens track 3", "track.save(path)", "step"

    def layout(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """One chunk for each step."""
        return {"step": 1} if "step" in sizes and len(sizes) > 1 else {}

    def lost_chunks(self, name: str) -> int:
        """Number of chunks of a variable that are missing on disk."""
        array = self.group[name]
        sizes = dict(zip(array.metadata.dimension_names, array.shape, strict=True))
        sizes |= {self.along: len(self)} if self.along in sizes else {}
        counts = [math.ceil(size / chunk) for size, chunk in zip(sizes.values(), array.chunks, strict=True)]
        files = (self.path / name / array.metadata.encode_chunk_key(place) for place in np.ndindex(*counts))
        return sum(not file.is_file() for file in files)


class Checked(BackendArray):
    """A variable of a file that is read when it is used; a part that cannot be read is an error with the file's name.

    Raises:
        TrackError: when it is used; the part is damaged.
    """

    def __init__(self, values: xr.Variable, path: Path) -> None:
        self.shape, self.dtype, self._values, self._path = values.shape, values.dtype, values, path

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        with reading(self._path):
            return self._values[key].to_numpy()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Explain what fails while a part of `path` is read: HDF5 and Zarr raise errors of any class.

    Raises:
        TrackError: it cannot be read.
    """
    try:
        yield
    except Exception as error:
        raise TrackError(f"a part of {path} is damaged ({error!s:.300}); copy or record it again.") from error


def attributes_of(path: Path) -> dict[str, Any]:
    """The attributes of the Zarr group at `path`; empty if there is none."""
    try:
        return dict(read_json(path / "zarr.json")["attributes"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return {}


def nothing(dtype: np.dtype) -> Any:
    """The fill value of a variable where a position or step does not exist."""
    if np.issubdtype(dtype, np.floating):
        return np.nan
    return -1 if np.issubdtype(dtype, np.integer) else False


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floating-point numbers as a store holds them; bfloat16 as float32 with zeros in the last two bytes."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).bfloat16().float().numpy()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path`; the folder that the block makes there then moves into place.

    An error or interrupt at any moment leaves the old folder at `path` or the new one; a kill between the two moves
    leaves both in the hidden folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Zarr's threads may write for a moment after an error
    with TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent, ignore_cleanup_errors=True) as aside:
        new, old = Path(aside, "new"), Path(aside, "old")
        try:
            yield new
            if path.exists():
                path.replace(old)
            new.replace(path)
        finally:
            if old.exists() and not path.exists():
                old.replace(path)


@contextmanager
def writing(path: Path, advice: str = "") -> Iterator[None]:
    """Explain what fails while something is written to `path`.

    Raises:
        SinklensError: it cannot be written (missing folder, no permission, full disk).
    """
    try:
        yield
    except OSError as error:
        raise SinklensError(
            f"could not write to {path}: {error}. {advice}Make room or choose another place."
        ) from error
