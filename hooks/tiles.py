"""The size of a Triton kernel's tiles: timed once on each kind of GPU, then kept on disk.

Which size is fastest depends on the card, the type and the head width. `fastest` times a few on the tensors of the
first long call and writes the winner to ``tiles.json`` in the user's cache folder (``$XDG_CACHE_HOME/sinklens``, else
``~/.cache/sinklens``), under the card's name and the versions of PyTorch and Triton.

One way this fails: tiles decide the order in which numbers are added, and with it the last bits of a column sum. Two
machines, or one machine before and after the file is deleted, can differ there. On one machine the file keeps runs the
same; where it cannot be written, the default tile is used and nothing is timed.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sinklens.atomic import atomic_write
from sinklens.errors import SinklensError

LONG = 512 * 512  # scores per head; shorter calls take the default tile, which costs them little


class Tile(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        rows, columns: queries and keys of a tile.
        warps: groups of 32 threads that share it.
        stages: tiles being fetched at a time.
    """

    rows: int
    columns: int
    warps: int
    stages: int


DEFAULT = Tile(64, 64, 4, 2)
SMALL = Tile(32, 32, 4, 1)  # for heads so wide that the default does not fit into a processor's memory
TILES = (DEFAULT, Tile(128, 64, 4, 2), Tile(64, 128, 4, 3), Tile(128, 128, 8, 2))


def fastest(place: str, tiles: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
    """The tile that takes the fewest `seconds`, from the file where `place` has been timed before.

    Args:
        place: kernel, card, versions, type and widths; one line of the file.
        tiles: the choice; the first is used where the file cannot be written.
        seconds: times one; infinity where it does not fit the card.
    """
    known = _read()
    if place in known and Tile(*known[place]) in tiles:
        return Tile(*known[place])
    try:
        _write(known | {place: list(tiles[0])})  # before the clock starts: a choice that is not kept is not repeatable
    except SinklensError:
        return tiles[0]
    best = min(tiles, key=seconds)
    _write(_read() | {place: list(best)})
    return best


def file() -> Path:
    """Where the tiles are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "sinklens" / "tiles.json"


def _read() -> dict[str, list[int]]:
    """What was timed before; nothing where the file is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        known = json.loads(file().read_text(encoding="utf-8"))
        return {place: tile for place, tile in known.items() if len(tile) == len(Tile._fields)}
    return {}


def _write(known: dict[str, list[int]]) -> None:
    with atomic_write(file()) as part:
        part.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
