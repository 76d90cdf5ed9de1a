"""Small captioned pictures: the second modality of tiny-mmada.

A *picture* is a grid of 4 × 4 cells with one color code each: a background and one or two figures in other colors.
Its *caption* names the figures in reading order of their first cells, with rows and columns counted from 1:
`` red square at 2 3 and blue dot at 1 1 on white``. Caption and picture determine each other. MMaDA's task tokens
distinguish the two directions: `T2I` requests the picture of a caption, `MMU` the caption of a picture.

Pitfall: two figures of the same color could touch and form another figure, so all colors in a picture differ.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from sinklens.tasks.generated import first_distinct, training_set

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
        codes: the color code (index into `COLOURS`) of every cell, row by row.
    """

    caption: str
    codes: tuple[int, ...]

    @property
    def tokens(self) -> str:
        """The picture as a sequence of code tokens."""
        return "".join(CODE_TOKENS[code] for code in self.codes)

    @property
    def to_draw(self) -> tuple[str, str]:
        """Prompt and answer, from caption to picture."""
        return f"{T2I}{self.caption}{IMAGE_START}", f"{self.tokens}{IMAGE_END}"

    @property
    def to_describe(self) -> tuple[str, str]:
        """Prompt and answer, from picture to caption."""
        return f"{MMU}{IMAGE_START}{self.tokens}{IMAGE_END}", self.caption


def stream(seed: int) -> Iterator[Picture]:
    """Yield pictures endlessly; equal seeds give equal streams.

    If figures would overlap, the complete picture is drawn again, so one figure is more frequent than two.
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
    """The row and column of a figure's first cell, such that it fits on the grid, and the figure's name."""
    name = rng.choice(tuple(FIGURES))
    height, width = (1 + max(cell[axis] for cell in FIGURES[name]) for axis in (0, 1))
    return (rng.randint(0, SIDE - height), rng.randint(0, SIDE - width)), name


def _cells(place: tuple[int, int], name: str) -> list[tuple[int, int]]:
    return [(place[0] + row, place[1] + column) for row, column in FIGURES[name]]


def held_out(size: int = HELD_OUT_SIZE) -> list[Picture]:
    """The first `size` distinct pictures of the held-out seed, in a fixed order."""
    return first_distinct(stream(HELD_OUT_SEED), attrgetter("caption"), size)


def training(seed: int, size: int) -> list[Picture]:
    """The first `size` pictures of another seed that are not held out.

    Raises:
        TaskError: `seed` is the held-out seed.
    """
    return training_set(stream, attrgetter("caption"), held_out(), seed=seed, held_out_seed=HELD_OUT_SEED, size=size)
