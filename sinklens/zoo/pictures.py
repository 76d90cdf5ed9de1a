"""Small captioned pictures: the second modality of tiny-mmada.

A *picture* is a grid of 4 × 4 cells, one colour code each: a background and, on it, one or two figures of other
colours. Its *caption* names the figures in reading order of their first cells, rows and columns counted from 1:
`` red square at 2 3 and blue dot at 1 1 on white``. Caption and picture determine each other. MMaDA's task tokens tell
the two directions apart: `T2I` asks for the picture of a caption, `MMU` for the caption of a picture.

One way this fails: two figures of one colour could touch and become another figure, so the colours of a picture are
all different.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

T2I, MMU, IMAGE_START, IMAGE_END = "<|t2i|>", "<|mmu|>", "<|soi|>", "<|eoi|>"
TASK_TOKENS = (T2I, MMU, IMAGE_START, IMAGE_END)
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "pink", "brown")
FIGURES = {
    "dot": ((0, 0),),
    "bar": ((0, 0), (0, 1)),
    "pole": ((0, 0), (1, 0)),
    "corner": ((0, 0), (1, 0), (1, 1)),
    "square": ((0, 0), (0, 1), (1, 0), (1, 1)),
}
WORDS = (*COLOURS, *FIGURES, "at", "on")
CODE_TOKENS = tuple(f"<|{colour}|>" for colour in COLOURS)
SIDE = 4

HELD_OUT_SEED = 20_251_016
HELD_OUT_SIZE = 250


@dataclass(frozen=True)
class Picture:
    """One captioned picture.

    Attributes:
        caption: the text, with a space before every word.
        codes: the colour code (index into `COLOURS`) of every cell, row by row.
    """

    caption: str
    codes: tuple[int, ...]

    @property
    def tokens(self) -> str:
        """The picture as a run of code tokens."""
        return "".join(CODE_TOKENS[code] for code in self.codes)

    @property
    def to_draw(self) -> tuple[str, str]:
        """Prompt and answer, caption to picture."""
        return f"{T2I}{self.caption}{IMAGE_START}", f"{self.tokens}{IMAGE_END}"

    @property
    def to_describe(self) -> tuple[str, str]:
        """Prompt and answer, picture to caption."""
        return f"{MMU}{IMAGE_START}{self.tokens}{IMAGE_END}", self.caption


def stream(seed: int) -> Iterator[Picture]:
    """Endless pictures; equal seeds give equal streams.

    Figures that would overlap are drawn again with all else, so one figure is more frequent than two.
    """
    rng = random.Random(seed)
    while True:
        count = rng.randint(1, 2)
        background, *colours = rng.sample(range(len(COLOURS)), count + 1)
        figures = sorted(_place(rng) for _ in range(count))
        cells = [cell for place, name in figures for cell in _cells(place, name)]
        if len(set(cells)) < len(cells):
            continue
        codes = [background] * SIDE**2
        parts = []
        for (place, name), colour in zip(figures, colours, strict=True):
            for row, column in _cells(place, name):
                codes[row * SIDE + column] = colour
            parts.append(f" {COLOURS[colour]} {name} at {place[0] + 1} {place[1] + 1}")
        yield Picture(f"{' and'.join(parts)} on {COLOURS[background]}", tuple(codes))


def _place(rng: random.Random) -> tuple[tuple[int, int], str]:
    """A figure and the row and column of its first cell, so that all of it lies on the grid."""
    name = rng.choice(tuple(FIGURES))
    height, width = (1 + max(cell[axis] for cell in FIGURES[name]) for axis in (0, 1))
    return (rng.randint(0, SIDE - height), rng.randint(0, SIDE - width)), name


def _cells(place: tuple[int, int], name: str) -> list[tuple[int, int]]:
    return [(place[0] + row, place[1] + column) for row, column in FIGURES[name]]


def held_out(size: int = HELD_OUT_SIZE) -> list[Picture]:
    """The first `size` distinct pictures of the held-out seed, in a fixed order."""
    pictures: dict[str, Picture] = {}
    for picture in stream(HELD_OUT_SEED):
        if len(pictures) == size:
            return list(pictures.values())
        pictures.setdefault(picture.caption, picture)
    raise AssertionError("an endless stream ended")


def training(seed: int, size: int) -> list[Picture]:
    """`size` pictures of another seed, none of them held out.

    Raises:
        ValueError: `seed` is the held-out seed.
    """
    if seed == HELD_OUT_SEED:
        raise ValueError(f"seed {seed} is the held-out seed; train on any other seed.")
    forbidden = {picture.caption for picture in held_out()}
    source = (picture for picture in stream(seed) if picture.caption not in forbidden)
    return [next(source) for _ in range(size)]
