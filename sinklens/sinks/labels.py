"""Text on figures: tokens and names are data and are shown verbatim.

matplotlib parses text between two dollar signs as a formula, drops legend entries that begin with an underscore, and
draws a box for a character that its font lacks. Text from a prompt, a vocabulary or a path goes through `plain`.
"""

import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from sinklens.errors import TrackError
from sinklens.sinks.data import TrackData

if TYPE_CHECKING:
    from matplotlib.axis import Axis

UNITS = {
    "sum": "attention received, column sum (uniform = 1)",
    "percent": "attention received, % of all",
    "fraction": "attention received, share of all",
    "visible": "mean attention of the queries that see the key",
}
BLANK = "░"
_SIGNS = str.maketrans({"\n": "⏎", "\t": "⇥"})


def plain(text: str) -> str:
    r"""`text` escaped so that matplotlib shows it verbatim.

    >>> plain("$x$")
    '\\$x\\$'
    """
    drawn = "".join(sign if ord(sign) in _font() else f"U+{ord(sign):04X}" for sign in text).replace("$", r"\$")
    return f" {drawn}" if drawn.startswith("_") else drawn


def wrapped(text: str, width: int = 26) -> str:
    """`text` in lines of at most `width` characters, for an axis shorter than the text."""
    return textwrap.fill(text, width)


def short(name: str) -> str:
    """A model's name without its parent folders."""
    return plain(name.rstrip("/").rpartition("/")[2])


def token_label(text: str, limit: int = 16) -> str:
    r"""A token's text for a figure: line breaks as ⏎, stripped (a single space as ␣), at most `limit` characters.

    >>> [token_label(text) for text in ("\n\n", " ", " apples")]
    ['⏎⏎', '␣', 'apples']
    """
    bare = text.translate(_SIGNS).strip(" ") or "␣"
    bare = "".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in bare)
    return plain(bare if len(bare) <= limit else f"{bare[: limit - 1]}…")


def token_labels(track: TrackData, row: int = 0, tokens: Int[np.ndarray, " pos"] | None = None) -> list[str]:
    """One label per position; a masked or undecided position is ░, and padding has no label.

    Args:
        tokens: ids that label the positions, e.g. ``run.tokens[0]``; by default those after the run or, in a
            track without them, those that entered its last step.
    """
    track.require(batch=row)
    if tokens is not None and len(tokens) != track.data.sizes["pos"]:
        raise TrackError(f"tokens has {len(tokens)} ids for {track.data.sizes['pos']} positions; give run.tokens[row].")
    data = track.data.isel(batch=row)
    kept = data["final_id"] if "final_id" in data else data["token_id"].isel(step=-1)
    ids = kept.to_numpy() if tokens is None else tokens
    words, masks, real = track.vocabulary, track.special["mask"], data["is_real"].to_numpy()

    def label(token: int) -> str:
        if token < 0 or token in masks:
            return BLANK
        return token_label(words[token]) if token in words else plain(f"⟨{token}⟩")

    return [label(int(token)) if exists else "" for token, exists in zip(ids, real, strict=True)]


def token_ticks(
    axis: "Axis", labels: Sequence[str], weight: Float[np.ndarray, " pos"] | None = None, limit: int | None = None
) -> None:
    """Label the positions of `axis`; if there are more than `limit`, those with the largest `weight`.

    Chosen labels keep a distance from each other, so that at most `limit` fit along the axis; empty ones are omitted.

    Args:
        limit: largest number of labels; by default as many as fit side by side.
    """
    from matplotlib.axis import XAxis

    named = [place for place, label in enumerate(labels) if label]
    gap = -(-len(labels) // (limit or _room(axis)))
    if gap > 1:
        order = np.zeros(len(labels)) if weight is None else np.nan_to_num(weight)
        kept: list[int] = []
        for place in sorted(named, key=lambda place: (-order[place], place)):
            if all(abs(place - other) >= gap for other in kept):
                kept.append(place)
        named = sorted(kept)
    axis.set_ticks(named, [labels[place] for place in named], fontsize=6, rotation=90 if isinstance(axis, XAxis) else 0)


def _room(axis: "Axis") -> int:
    """How many labels fit along `axis`, 7 points (1/72 inch) each."""
    from matplotlib.axis import XAxis

    place, figure = axis.axes.get_position(), axis.axes.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    inches = place.width * width if isinstance(axis, XAxis) else place.height * height
    return max(1, int(inches * 72 / 7))


@lru_cache(maxsize=1)
def _font() -> frozenset[int]:
    """Code points in the font of the figures."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())
