"""Figures that only studies draw: estimates of several measures, histograms of scores, and empty panels.

Tables have one row per model, measure and entry, with ``estimate``, ``low`` and ``high``, as in views/charts.py.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import UNITS, plain, short, wrapped
from sinklens.sinks.palette import colours
from sinklens.views.charts import curves, interval_dots
from sinklens.views.figures import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]


def score_histogram(
    edges: np.ndarray,
    shares: Mapping[str, np.ndarray],
    unit: str,
    ax: "Axes | None" = None,
    *,
    caption: bool = True,
) -> "Axes":
    """Histogram of scores (the paper's Figs. 3 and 9), one line per model, with a logarithmic vertical axis.

    Args:
        edges: bin edges, one more than each of `shares`.
        shares: model name -> share of positions per bin.
        unit: unit of the scores.
        caption: whether the panel has its title.
    """
    ax = axes_or_new(ax)
    for (name, of_model), colour in zip(shares.items(), colours(len(shares)), strict=True):
        ax.stairs(of_model, edges, label=short(name), color=colour)
    ax.legend(fontsize="small")
    ax.set(xlabel=f"{UNITS[unit]}; last bin: all above", ylabel="share of positions", yscale="log")
    ax.set_title(f"unit: {unit}" if caption else "")
    return ax


def nothing_to_show(ax: "Axes", name: str, why: str) -> "Axes":
    """An empty panel that says why it is empty."""
    ax.set(xticks=[], yticks=[], title=short(name))
    ax.text(0.5, 0.5, plain(why), ha="center", va="center", wrap=True, transform=ax.transAxes)
    return ax


def one_panel(
    draw: "Callable[[Axes], Axes]", size: tuple[float | int, float | int] = (7, 3.6), **labels: Any
) -> "Figure":
    """A figure of the one panel that `draw` draws on, with the labels that ``Axes.set`` takes."""
    figure, (ax,) = panels(1, size=size)
    draw(ax).set(**labels)
    return figure


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
    caption: bool = True,
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
        caption: whether the panels have their titles: model and panel.
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
        ax.set_title(": ".join([short(model), *map(str, value)]) if caption else "")
    handles, shown = axes[0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), fontsize="small")
    return figure
