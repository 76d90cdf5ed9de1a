"""Figures of effects: maps of numbers, panels of estimates, and who wrote an attention score.

Tables have one row per model, measure and entry, with ``estimate``, ``low`` and ``high``, as in charts.py. Functions
for several models return a complete figure with a row of panels per model.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import colours, plain, short, wrapped
from sinklens.views.charts import curves, interval_dots, nothing_to_show
from sinklens.views.figures import panels

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

WRITER_KINDS = ("embed", "head", "mlp", "bias", "rest")
SHOWN = 12  # writers with their own bar
WRITTEN = 40  # largest number of cells whose values are written into a map


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
        bounds: range of the colors; a range with both signs goes from blue through white to red.
        label: label of the color bar; without a label there is no color bar.
    """
    from matplotlib import colormaps

    ax = axes_or_new(ax, (5, 4))
    low, high = bounds or (0.0, float(np.nanmax(values, initial=0.0)) or 1.0)
    colours = colormaps["RdBu_r" if low < 0 else "viridis"].with_extremes(bad="0.85")
    image = ax.imshow(values, aspect="auto", cmap=colours, interpolation="nearest", vmin=low, vmax=high)
    for axis, (name, labels) in ((ax.yaxis, rows), (ax.xaxis, columns)):
        every = range(0, len(labels), -(-len(labels) // 12))
        axis.set_ticks(list(every), [plain(str(labels[place])) for place in every])
        axis.set_label_text(name)
    for (row, column), value in np.ndenumerate(values if values.size <= WRITTEN else values[:0]):
        if not np.isnan(value):
            dark = (value - low) / (high - low) < 0.6 if low >= 0 else abs(value) > 0.6 * high
            number = f"{round(float(value), 2) + 0.0:.2f}"  # avoids -0.00
            ax.text(column, row, number, ha="center", va="center", fontsize=7, color="w" if dark else "k")
    if label:
        ax.figure.colorbar(image, ax=ax).set_label(wrapped(label, 40), fontsize="small")
    return ax


def interval_panels(
    table: "DataFrame",
    labels: Mapping[str, str],
    *,
    along: str,
    by: str,
    series: Mapping[Any, str],
    panel: str | None = None,
    names: Mapping[Any, str] | None = None,
    xlabel: str = "",
) -> "Figure":
    """Estimates with intervals: a row of panels per model, a panel per measure, a color per value of the column `by`.

    With `names`, every value of `along` is a line of dots, and the panels of a column share their scale. Without, the
    values of `along` are numbers and the estimates are curves over them.

    Args:
        table: rows with ``measure``; those of other measures than `labels` are left out, and so are those in which
            `along` is NaN.
        labels: what each measure is, by name.
        series: names of the values of `by`.
        panel: a column with a panel for each of its values.
        names: names of the values of `along`; those without one are shown verbatim.
        xlabel: what the numbers of `along` are.
    """
    table = table[table["measure"].isin(list(labels)) & table[along].notna()]
    split = ["model", "measure", *([] if panel is None else [panel])]
    if table.empty:
        figure, axes = panels(1)
        nothing_to_show(axes[0], xlabel or along, "not known for these keys and models")
        return figure
    groups, columns = list(table.groupby(split, sort=False)), len(table[split[1:]].drop_duplicates())
    figure, axes = panels(len(groups), columns=columns, size=(5.2, 3.0))
    for number, (((model, measure, *value), rows), ax) in enumerate(zip(groups, axes, strict=True)):
        rows, label = rows.assign(model=[series[name] for name in rows[by]]), wrapped(labels[measure], 40)
        if names is None:
            curves(rows.sort_values(along), along, ax)
            ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
            ax.set(xlabel=xlabel, ylabel=label)
        else:
            if number >= columns:
                ax.sharex(axes[number % columns])
            interval_dots(rows, along, ax, names=names, line=0.0)
            ax.set_xlabel(label)
        ax.legend().remove()
        ax.set_title(": ".join([short(model), *map(str, value)]))
    handles, shown = axes[0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize="small")
    return figure


def writer_bars(
    table: "xr.Dataset",
    side: Literal["key", "query"] = "key",
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Bars of the writers with the largest parts of a score above its mean over the other keys; the others share one.

    The table is that of `sinklens.experiments.write_attribution`.

    Args:
        side: writers of the key, or of the query.
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
    ax.set_title(f"who wrote the {side}: {where}", fontsize="medium")
    return ax
