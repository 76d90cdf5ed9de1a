"""Activations for other tools: what a store will take on disk, and its rows in common formats.

`store_size` runs a few of the prompts and says how large a store of all of them would be. `store_frame` returns a store
as a pandas table; `export_store` writes it as Parquet shards, which `datasets.load_dataset` and pandas read, or as
safetensors. Only one shard is in memory at a time.

Pitfall: Parquet and safetensors files do not say what was collected. `export_store` writes that beside them, as
``about.json``.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import xarray as xr

from sinklens.errors import SettingError
from sinklens.features.places import Scope, places_of_step, states_of, states_of_run, stream_point
from sinklens.features.store import COLUMNS, ActivationStore
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.intervention import place_mask, within
from sinklens.sinks.kinds import STATES
from sinklens.utils.arguments import Count, read_as

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

Format = Literal["parquet", "safetensors"]
BYTES = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class StoreSize:
    """How large a store would be, before compression.

    Attributes:
        places: number of rows.
        bytes: activations and columns.
        sampled: number of prompts that were run; an estimate unless it is all of them.
    """

    places: int
    bytes: int
    sampled: int


def store_size(
    model: Model,
    prompts: Sequence[Any],
    points: str | Sequence[str],
    *,
    scope: Scope = "all",
    only_steps: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    sample: Count = 4,
    **settings: Any,
) -> StoreSize:
    """The size of what `collect` would store, from runs of the first prompts; exact if `sample` covers all.

    Args:
        points: one point or several.
        sample: number of prompts to run, alone; the others are taken to have as many places on average.
        scope, only_steps, positions, dtype, **settings: as in `collect`; a detector would only keep fewer places.

    Raises:
        SettingError: no prompts, a sample below 1, or see `collect`.
    """
    read_as(Count, "sample", sample)
    if isinstance(prompts, str) or not len(prompts):
        raise SettingError("store_size needs a list of at least one prompt.")
    names = [stream_point(model, point) for point in ([points] if isinstance(points, str) else points)]
    some = prompts[:sample]
    counts = []
    for prompt in some:
        run = generate(model, [prompt], record_sinks=False, progress=False, **settings)
        states, limit = states_of_run(run), place_mask(positions, run.real).cpu().numpy()
        wanted = np.isin(states, [STATES.index(state) for state in states_of(scope)])
        steps = within("step", only_steps, run.steps_run)
        counts.append(sum(int((places_of_step(run, step) & limit & wanted[:, step]).sum()) for step in steps))
    width = sum(_sizes(model, names))
    places = round(sum(counts) * len(prompts) / len(some))
    columns = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
    return StoreSize(places, places * (width * BYTES[dtype] + columns), len(some))


def store_frame(store: ActivationStore) -> "DataFrame":
    """A store as a table with a row for each place: its columns, the name of its state, and its activations as arrays.

    All of it is in memory; for large stores use `export_store`.
    """
    return _frame(store.dataset())


def export_store(
    store: ActivationStore, to: str | Path, kind: Format = "parquet", *, rows: Count = 100_000
) -> list[Path]:
    """Write a store as files of `rows` places each, numbered ``train-00000-of-00003``.

    Parquet files lie in ``to/data``, where ``datasets.load_dataset(to)`` finds them.

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
    if not len(store):
        raise SettingError(f"the store {store.path} holds no places; collect some first.")
    folder = Path(to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{to} is not an empty folder; choose another, or delete it.")
    files = []
    total = -(-len(store) // rows)
    (folder / "data").mkdir(parents=True)
    for number, part in enumerate(_shards(store, rows)):
        file = folder / "data" / f"train-{number:05}-of-{total:05}.{kind}"
        if kind == "parquet":
            _frame(part).to_parquet(file, index=False)
        else:
            _save_tensors(part, file)
        files.append(file)
    (folder / "about.json").write_text(json.dumps(store.about | {"places": len(store)}, indent=1) + "\n")
    return files


def _shards(store: ActivationStore, rows: int) -> Iterator[xr.Dataset]:
    data = store.dataset()
    for start in range(0, len(store), rows):
        yield data.isel(place=slice(start, start + rows)).load()


def _frame(data: xr.Dataset) -> "DataFrame":
    """One column for each variable; those with a second axis hold an array in each row."""
    from pandas import DataFrame

    columns: dict[str, Any] = {}
    for name, variable in data.data_vars.items():
        array = variable.to_numpy()
        columns[str(name)] = array if array.ndim == 1 else list(array)
    if "state" in columns:
        columns["state"] = np.array(STATES)[columns["state"]]
    return DataFrame(columns)


def _save_tensors(data: xr.Dataset, file: Path) -> None:
    from safetensors.numpy import save_file

    save_file({str(name): np.ascontiguousarray(array.to_numpy()) for name, array in data.data_vars.items()}, file)


def _sizes(model: Model, names: Sequence[str]) -> list[int]:
    """Numbers in an activation at each point."""
    import torch

    ids = torch.zeros(1, 1, dtype=torch.long, device=model.cfg.device)
    time = torch.zeros(1, device=model.cfg.device) if model.tree.architecture.time else None
    seen = model.tree.peek(ids, None, names, time)
    return [seen[name].flatten(2).shape[2] for name in names]
