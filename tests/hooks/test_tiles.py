"""The fastest tile is found once, and kept."""

import json
import math

import pytest

from sinklens.hooks import tiles
from sinklens.hooks.tiles import DEFAULT, SMALL, TILES, fastest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def clock(best, asked):
    """A clock by which `best` is the fastest and the last does not fit."""

    def seconds(tile):
        asked.append(tile)
        return math.inf if tile == TILES[-1] else 1.0 if tile == best else 2.0

    return seconds


def test_the_fastest_is_taken_and_not_timed_again():
    asked = []
    assert fastest("sums | H100", TILES, clock(TILES[2], asked)) == TILES[2]
    assert asked == list(TILES)
    assert fastest("sums | H100", TILES, clock(TILES[1], asked)) == TILES[2]
    assert len(asked) == len(TILES)
    assert fastest("lse | H100", TILES, clock(TILES[1], asked)) == TILES[1]
    assert json.loads(tiles.file().read_text()) == {"sums | H100": list(TILES[2]), "lse | H100": list(TILES[1])}


def test_a_tile_that_is_no_longer_offered_is_timed_again():
    tiles.file().parent.mkdir()
    tiles.file().write_text(json.dumps({"sums": list(SMALL)}))
    assert fastest("sums", TILES, clock(TILES[1], [])) == TILES[1]


@pytest.mark.parametrize("text", ["{", "[1]", '{"sums": 3}', '{"sums": [1, 2]}', ""])
def test_a_damaged_file_is_replaced(text):
    tiles.file().parent.mkdir()
    tiles.file().write_text(text)
    assert fastest("sums", TILES, clock(TILES[1], [])) == TILES[1]
    assert json.loads(tiles.file().read_text()) == {"sums": list(TILES[1])}


def test_where_nothing_can_be_kept_nothing_is_timed(cache):
    (cache / "sinklens").write_text("a file where the folder should be")
    asked = []
    assert fastest("sums", TILES, clock(TILES[2], asked)) == DEFAULT
    assert asked == []
