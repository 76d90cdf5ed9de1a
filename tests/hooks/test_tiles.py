"""The fastest tile is found once and stored."""

import json
import math

import pytest

from sinklens.hooks.attention import tiles
from sinklens.hooks.attention.tiles import DEFAULT, SMALL, TILES, fastest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def clock(best, timed):
    """A clock for which `best` is the fastest tile and the last one does not fit."""

    def seconds(tile):
        timed.append(tile)
        return math.inf if tile == TILES[-1] else 1.0 if tile == best else 2.0

    return seconds


def test_the_fastest_tile_is_stored_and_not_timed_again():
    timed = []
    assert fastest("sums | H100", TILES, clock(TILES[2], timed)) == TILES[2]
    assert timed == list(TILES)
    assert fastest("sums | H100", TILES, clock(TILES[1], timed)) == TILES[2]
    assert len(timed) == len(TILES)
    assert fastest("lse | H100", TILES, clock(TILES[1], timed)) == TILES[1]
    assert json.loads(tiles.file().read_text()) == {"sums | H100": list(TILES[2]), "lse | H100": list(TILES[1])}


@pytest.mark.parametrize("text", ["{", "[1]", '{"sums": 3}', '{"sums": [1, 2]}', "", json.dumps({"sums": list(SMALL)})])
def test_a_damaged_file_or_a_tile_that_is_no_longer_offered_is_replaced(text):
    tiles.file().parent.mkdir()
    tiles.file().write_text(text)
    assert fastest("sums", TILES, clock(TILES[1], [])) == TILES[1]
    assert json.loads(tiles.file().read_text()) == {"sums": list(TILES[1])}


def test_nothing_is_timed_if_the_file_cannot_be_written(cache):
    (cache / "sinklens").write_text("a file where the folder should be")
    timed = []
    assert fastest("sums", TILES, clock(TILES[2], timed)) == DEFAULT
    assert timed == []
