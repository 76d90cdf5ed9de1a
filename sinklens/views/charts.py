"""Figures of measured numbers, one function each: the results of studies over several models.

Tables have one row per model and entry, with ``estimate``, ``low`` and ``high``. Functions that draw one panel take
``ax=`` and return it; none shows or saves anything.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import plain, short
from sinklens.sinks.palette import colours
from sinklens.utils.arguments import checked
from sinklens.views.figures import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]


@checked
def curves(table: "DataFrame", along: str, ax: "Axes | None" = None) -> "Axes":
    """Estimates against the numbers in the column `along`, one line per model, intervals as bands."""
    ax = axes_or_new(ax)
    models = list(dict.fromkeys(table["model"]))
    for model, colour in zip(models, colours(len(models)), strict=True):
        rows = table[table["model"] == model]
        places = rows[along].to_numpy(dtype=float)
        label = short(model) if rows["estimate"].notna().any() else f"{short(model)} (not measured)"
        ax.plot(places, rows["estimate"], "o-", color=colour, label=label, markersize=4)
        ax.fill_between(places, rows["low"], rows["high"], color=colour, alpha=0.2, linewidth=0)
    ax.set(xlabel=plain(along), ylabel="estimate")
    ax.legend(fontsize="small")
    return ax


@checked
def interval_dots(
    table: "DataFrame",
    by: str,
    ax: "Axes | None" = None,
    *,
    names: Mapping[str, str] | None = None,
    line: float | None = None,
) -> "Axes":
    """Estimates as dots with their intervals: one line of the figure per value of the column `by`, a color per model.

    Args:
        names: labels for values of `by`; values without one are shown verbatim.
        line: position of a dashed line, e.g. a threshold.
    """
    ax = axes_or_new(ax)
    models, places = list(dict.fromkeys(table["model"])), list(dict.fromkeys(table[by]))
    step = 0.6 / max(1, len(models))
    for number, (model, colour) in enumerate(zip(models, colours(len(models)), strict=True)):
        rows = table[(table["model"] == model) & table["estimate"].notna()]
        label = short(model) if len(rows) else f"{short(model)} (not measured)"
        height = np.array([places.index(place) for place in rows[by]]) + (number - (len(models) - 1) / 2) * step
        ax.errorbar(rows["estimate"], height, xerr=_errors(rows), fmt="o", color=colour, markersize=4, capsize=2,
                    linewidth=1, label=label)  # fmt: skip
    if line is not None:
        ax.axvline(line, color="0.3", linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(places)), [(names or {}).get(str(place)) or plain(str(place)) for place in places])
    ax.set(ylim=(max(1, len(places)) - 0.5, -0.5), xlabel="estimate")
    if models:
        ax.legend(fontsize="small")
    return ax


def _errors(rows: "DataFrame") -> np.ndarray:
    """Lengths of the intervals below and above the estimates; 0 where there is no interval."""
    low, estimate, high = (rows[name].to_numpy(dtype=float) for name in ("low", "estimate", "high"))
    return np.clip(np.nan_to_num(np.stack([estimate - low, high - estimate])), 0, None)


PICKS = {
    "strongest": ("sinks", "o-"),
    "steady": ("sinks of the unmasked run", "D-."),
    "random": ("random keys", "s--"),
    "random_any": ("random keys of any strength", "P--"),
    "weakest": ("weakest keys", "^:"),
    "same_mass": ("random keys of the same mass", "<:"),
    "same_kind": ("random keys of the same kind", ">:"),
    "nearest": ("nearest keys", "X:"),
}


@checked
def accuracy_curves(table: "DataFrame", ax: "Axes | Sequence[Axes] | None" = None, *, caption: bool = True) -> "Figure":
    """Accuracy against the number of masked keys (K), with intervals: a panel per protocol and model.

    Args:
        table: one row per condition, with ``protocol``, ``model``, ``condition``, ``masked``, ``pick``, ``estimate``,
            ``low`` and ``high``; conditions other than masking (no ``masked``), and
            those under a cache policy (a ``cache``), are omitted.
        ax: axes to draw on, one for each protocol and model; by default those of a new figure.
        caption: whether the panels have their titles: protocol and model.
    """
    from pandas import concat

    table = table[table["masked"].notna()]
    table = table[table["cache"] == ""] if "cache" in table else table
    variants = table["condition"].str.removesuffix(" of the unmasked run").str.partition(", ")[2]  # such as the queries
    groups = list(table.assign(variant=variants).groupby(["protocol", "model"], sort=False))
    figure, axes = panels(max(1, len(groups)), columns=3, size=(5.2, 4.2), ax=ax)
    for ((protocol, model), rows), panel in zip(groups, axes, strict=False):
        counts, unmasked = sorted(rows["masked"].unique()), rows[rows["masked"] == 0]
        masked = rows[rows["pick"].isin(list(PICKS)) & (rows["masked"] > 0)]
        series = dict(list(masked.groupby(["pick", "variant"], sort=False))) or {("strongest", ""): masked}
        for number, ((pick, variant), part) in enumerate(series.items()):
            (label, style), points = PICKS[pick], concat([unmasked, part]).sort_values("masked")
            places = points["masked"].map(counts.index) + 0.02 * number * (
                points["masked"] > 0
            )  # so intervals are apart
            panel.errorbar(
                places, points["estimate"], _errors(points), fmt=style, color=colours(number + 1)[number], capsize=2,
                markersize=4, label=f"{label}, {variant}" if variant else label,
            )  # fmt: skip
        panel.set_xticks(range(len(counts)), [str(int(count)) for count in counts])
        panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16))
        panel.set(xlabel="keys masked per head and step (K)", ylabel="accuracy", ylim=(-0.02, 1.02))
        panel.set_title(f"{protocol}: {short(model)}" if caption else "")
    return figure
