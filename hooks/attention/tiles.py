"""The tile size of a Triton kernel: timed once on each kind of GPU, then stored on disk.

The best size depends on the GPU, the type and the head width. `fastest` times a few sizes on the tensors of the first
long call and writes the fastest to ``tiles.json`` in the user's cache folder (``$XDG_CACHE_HOME/sinklens``, else
``~/.cache/sinklens``), under the GPU's name and the versions of PyTorch and Triton.

Limitation: tiles determine the order in which numbers are added, and so the last bits of a column sum. These can differ
between two machines, or on one machine before and after the file is deleted. On one machine the file makes runs
repeatable; if it cannot be written, the default tile is used and nothing is timed.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sinklens.errors import SinklensError
from sinklens.utils.atomic import write_file
from sinklens.utils.folders import cache_folder

LONG = 512 * 512  # scores per head; shorter calls use the default tile, at little cost


class Tile(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        rows, columns: queries and keys of a tile.
        warps: groups of 32 threads that share a tile.
        stages: tiles that are fetched at once.
    """

    rows: int
    columns: int
    warps: int
    stages: int


DEFAULT = Tile(64, 64, 4, 2)
SMALL = Tile(32, 32, 4, 1)  # for heads too wide for the default tile to fit into on-chip memory
TILES = (DEFAULT, Tile(128, 64, 4, 3), Tile(128, 128, 8, 2), Tile(64, 256, 8, 3))


def fastest(place: str, tiles: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
    """The tile that takes the fewest `seconds`; read from the file if `place` was timed before.

    Args:
        place: kernel, GPU, versions, type and widths; one line of the file.
        tiles: the candidates; the first is used if the file cannot be written.
        seconds: times a tile; infinity if it does not fit the GPU.
    """
    known = _read()
    if place in known and Tile(*known[place]) in tiles:
        return Tile(*known[place])
    try:
        _write(known | {place: list(tiles[0])})  # before timing: a choice that cannot be stored is not repeatable
    except SinklensError:
        return tiles[0]
    best = min(tiles, key=seconds)
    _write(_read() | {place: list(best)})
    return best


def file() -> Path:
    """The file that stores the tiles."""
    return cache_folder() / "tiles.json"


def _read() -> dict[str, list[int]]:
    """The tiles timed before; empty if the file is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        known = json.loads(file().read_text(encoding="utf-8"))
        return {place: tile for place, tile in known.items() if len(tile) == len(Tile._fields)}
    return {}


def _write(known: dict[str, list[int]]) -> None:
    write_file(file(), json.dumps(known, indent=1, sort_keys=True) + "\n")
