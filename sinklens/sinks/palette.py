"""The colors of all pictures and pages: one sequential ramp, one diverging ramp, and one list for categories.

A ramp has one hue on each side and its lightness changes all the way, so that it can be read without color and with any
color blindness. Pages get the same colors as `script` (views/html.py); the grays and the accents of their text are in
page/theme.css.
"""

import json
from typing import TYPE_CHECKING, Literal

from sinklens.utils.arguments import checked

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, color-blind safe
RAMPS: dict[str, tuple[str, ...]] = {
    "sequential": ("#f4f6f8", "#d5e2ee", "#a3c3df", "#6399c7", "#2f6ba8", "#154678", "#0a2547"),
    "dark": ("#20262d", "#1f3a57", "#255a8a", "#3c82bb", "#6fabdb", "#aed2ef", "#eaf5fd"),  # sequential, on a dark page
}
RAMPS["diverging"] = (
    *RAMPS["sequential"][:0:-1], RAMPS["sequential"][0],
    "#f8dbcb", "#f6af86", "#de7938", "#aa4e0a", "#743100", "#3e1c00",  # orange, as light as the blue on the other side
)  # fmt: skip


def colours(count: int) -> list[str]:
    """Colors of `count` models; they repeat after six."""
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


@checked
def color_map(kind: Literal["sequential", "diverging"] = "sequential") -> "Colormap":
    """The color map of all pictures of one kind, for ``cmap=`` of matplotlib; missing values are gray.

    Args:
        kind: "sequential", from pale to dark blue; or "diverging", from blue through white to orange.
    """
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(f"sinklens {kind}", RAMPS[kind]).with_extremes(bad="0.8")


def script() -> str:
    """The ramps as a statement of JavaScript."""
    return f"const RAMPS = {json.dumps(RAMPS)};\n"
