"""Figures of effects: maps of numbers, and who wrote an attention score."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import plain, wrapped
from sinklens.sinks.palette import color_map, colours
from sinklens.utils.arguments import Words, checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WRITER_KINDS = ("embed", "head", "mlp", "bias", "rest")
SHOWN = 12  # writers with their own bar
WRITTEN = 40  # largest number of cells whose values are written into a map


@checked
def effect_map(
    values: Float[np.ndarray, "row column"],
    ax: "Axes | None" = None,
    *,
    rows: tuple[str, Sequence[Any]],
    columns: tuple[str, Sequence[Any]],
    bounds: tuple[float, float] | None = None,
    label: str = "",
) -> "Axes":
    """A map of numbers; missing ones are gray, and small maps also show the numbers as text.

    Args:
        rows, columns: name of the axis, and the labels along it.
        bounds: range of the colors; a range with both signs goes from blue through white to orange.
        label: label of the color bar; without a label there is no color bar.
    """
    ax = axes_or_new(ax, (5, 4))
    low, high = bounds or (0.0, float(np.nanmax(values, initial=0.0)) or 1.0)
    image = ax.imshow(
        values,
        aspect="auto",
        cmap=color_map("diverging" if low < 0 else "sequential"),
        interpolation="nearest",
        vmin=low,
        vmax=high,
    )
    for axis, (name, labels) in ((ax.yaxis, rows), (ax.xaxis, columns)):
        every = range(0, len(labels), -(-len(labels) // 12))
        axis.set_ticks(list(every), [plain(str(labels[place])) for place in every])
        axis.set_label_text(name)
    for (row, column), value in np.ndenumerate(values if values.size <= WRITTEN else values[:0]):
        if not np.isnan(value):
            dark = np.dot(image.to_rgba(value)[:3], (0.3, 0.6, 0.1)) < 0.5  # how light it is, from 0 to 1
            number = f"{round(float(value), 2) + 0.0:.2f}"  # avoids -0.00
            ax.text(column, row, number, ha="center", va="center", fontsize=7, color="w" if dark else "k")
    if label:
        ax.figure.colorbar(image, ax=ax).set_label(wrapped(label, 40), fontsize="small")
    return ax


@checked
def writer_bars(
    table: Annotated[xr.Dataset, Words("a table of sinklens.experiments.write_attribution")],
    side: Literal["key", "query"] = "key",
    *,
    ax: "Axes | None" = None,
    caption: bool = True,
) -> "Axes":
    """Bars of the writers with the largest parts of a score above its mean over the other keys; the others share one.

    The table is that of `sinklens.experiments.write_attribution`.

    Args:
        side: writers of the key, or of the query.
        caption: whether the figure has its title.
    """
    parts = table[f"from_{side}_excess"]
    order = np.argsort(-np.abs(parts.to_numpy()))
    kept, others = parts[order[:SHOWN]], parts[order[SHOWN:]]
    names, values = [*kept["writer"].values, f"{others.size} others"], [*kept.values, float(others.sum())]
    colour = dict(zip(WRITER_KINDS, colours(len(WRITER_KINDS)), strict=True))
    shades = [*(colour[kind] for kind in kept["kind"].values), "0.7"]
    shown = len(values) if others.size else len(values) - 1
    ax = axes_or_new(ax, (5.0, 0.6 + 0.26 * shown))
    ax.barh(range(shown), values[:shown], color=shades[:shown])
    ax.set_yticks(range(shown), names[:shown])
    ax.invert_yaxis()
    ax.axvline(0, color="0.4", linewidth=0.8)
    place = {name: table.attrs[name] for name in ("layer", "head", "step", "query", "key")}
    asked = "mean over queries" if place["query"] < 0 else f"query {place['query']}"
    ax.set_xlabel("part of the score above the other keys'")
    where = f"head {place['layer']}.{place['head']}, step {place['step']}, key {place['key']}, {asked}"
    ax.set_title(f"who wrote the {side}: {where}" if caption else "", fontsize="medium")
    return ax
