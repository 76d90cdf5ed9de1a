"""Captioned pictures: caption and picture agree, seeds are reproducible, and held-out pictures stay apart."""

import re

import pytest

from training import pictures
from training.pictures import COLOURS, held_out, training
from training.tokenizer import train_tokenizer

SHAPES = {  # rows of a figure, drawn
    "dot": ["#"],
    "bar": ["##"],
    "pole": ["#", "#"],
    "corner": ["#.", "##"],
    "square": ["##", "##"],
}


@pytest.fixture(scope="module")
def many():
    return training(seed=9, size=4000)


def painted(caption):
    """The picture that a caption describes, painted from `SHAPES`."""
    figures, background = re.fullmatch(r" (.*) on (\w+)", caption).groups()
    grid = [[background] * 4 for _ in range(4)]
    for colour, name, row, column in re.findall(r"(\w+) (\w+) at (\d) (\d)", figures):
        for i, line in enumerate(SHAPES[name]):
            for j, mark in enumerate(line):
                if mark == "#":
                    assert grid[int(row) - 1 + i][int(column) - 1 + j] == background
                    grid[int(row) - 1 + i][int(column) - 1 + j] = colour
    return [colour for line in grid for colour in line]


def test_captions_and_pictures_determine_each_other(many):
    for picture in many:
        assert [COLOURS[code] for code in picture.codes] == painted(picture.caption)
    assert len({picture.caption for picture in many}) == len({picture.codes for picture in many})


def test_held_out_pictures_are_distinct_and_never_trained_on():
    kept = held_out()
    assert len({picture.codes for picture in kept}) == pictures.HELD_OUT_SIZE
    assert not {picture.codes for picture in kept} & {picture.codes for picture in training(1, 30_000)}
    assert {picture.codes for picture in kept} & {
        p.codes for p, _ in zip(pictures.stream(1), range(9999), strict=False)
    }
    with pytest.raises(ValueError, match="train on any other seed"):
        training(pictures.HELD_OUT_SEED, 1)


def test_a_cell_and_a_word_are_single_tokens(many):
    tokenizer = train_tokenizer(with_pictures=True)
    codes = tokenizer.convert_tokens_to_ids(list(pictures.CODE_TOKENS))
    assert codes == list(range(len(tokenizer) - len(COLOURS), len(tokenizer)))
    for picture in many[:200]:
        ids = tokenizer(picture.tokens, add_special_tokens=False).input_ids
        assert [token - codes[0] for token in ids] == list(picture.codes)
        words = tokenizer(picture.caption, add_special_tokens=False).input_ids
        assert (len(words), tokenizer.decode(words)) == (len(picture.caption.split()), picture.caption)
