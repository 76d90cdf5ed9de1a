"""Figures of the effects of interventions, one function each: maps over layers, heads and steps, and curves.

Tables have one row per model, measure and entry, with ``estimate``, ``low`` and ``high``, as in charts.py. Every
function returns a complete figure: a row of panels per model, or a panel per measure with a curve per model.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import plain, short, wrapped
from sinklens.views.charts import curves, interval_dots, nothing_to_show
from sinklens.views.figures import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

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


def head_maps(table: "DataFrame", ways: Mapping[str, str], label: str) -> "Figure":
    """Layer × head maps of one measure: a row of panels with its own scale per model, a panel per intervention."""
    return _maps(table, "way", ways, ("layer", "head"), label)


def step_maps(table: "DataFrame", ways: Mapping[str, str], label: str) -> "Figure":
    """Layer × step maps of one measure, mean over heads, as `head_maps`."""
    return _maps(table, "way", ways, ("layer", "step"), f"{label}, mean over heads")


def patch_maps(table: "DataFrame", groups: Mapping[str, str]) -> "Figure":
    """Layer × step maps of the share of a fact's effect that patching restores, a panel per group of positions."""
    label = "share of the gap between clean and corrupted prompt that the patch restores"
    figure = _maps(table, "group", groups, ("layer", "step"), label, (-1.0, 1.0))
    figure.suptitle(
        "Layer −1 is the embedding; gray: all differing positions of the answer are already decided", fontsize=9
    )
    return figure


def _maps(
    table: "DataFrame", by: str, names: Mapping[str, str], axes_of: tuple[str, str], label: str,
    bounds: tuple[float, float] | None = None,
) -> "Figure":  # fmt: skip
    models = list(dict.fromkeys(table["model"]))
    figure, axes = panels(len(models) * len(names), columns=len(names), size=(4.4, 3.2))
    shown = ((model, name) for model in models for name in names)
    for (model, name), ax in zip(shown, axes, strict=True):
        rows = table[table["model"] == model]
        top, part = max([0.0, *rows["estimate"].dropna()]) or 1.0, rows[rows[by] == name]
        grid = part.pivot(index=axes_of[0], columns=axes_of[1], values="estimate").dropna(axis="columns", how="all")
        title = f"{short(model)}: {names[name]}"
        if not grid.size:
            nothing_to_show(ax, model, "not measured")
            continue
        last = name == list(names)[-1]
        effect_map(
            grid.to_numpy(dtype=float), ax, rows=(axes_of[0], list(grid.index)),
            columns=(axes_of[1], list(grid.columns)), bounds=bounds or (0.0, top), label=label if last else "",
        ).set_title(title)  # fmt: skip
    return figure


def doubling_curves(table: "DataFrame", along: str, meanings: Mapping[str, str], xlabel: str) -> "Figure":
    """A panel per measure: estimates against numbers that double, one line per model; infinity is drawn at the end."""
    measures = [name for name in meanings if name in set(table["measure"])]
    figure, axes = panels(len(measures), columns=3, size=(4.4, 3.4))
    for measure, ax in zip(measures, axes, strict=True):
        _doubling(table[table["measure"] == measure], along, ax)
        ax.set(xlabel=xlabel, ylabel=wrapped(meanings[measure], 34))
    return figure


def kinds_of_keys(
    table: "DataFrame", along: str, by: str, kinds: Mapping[str, str], meanings: Mapping[str, str], xlabel: str
) -> "Figure":
    """As `doubling_curves`, with a row of panels per model and a curve per value of the column `by`."""
    models = list(dict.fromkeys(table["model"]))
    measures = [name for name in meanings if name in set(table["measure"])]
    figure, axes = panels(len(models) * len(measures), columns=len(measures), size=(4.4, 3.4))
    shown = ((model, measure) for model in models for measure in measures)
    for (model, measure), ax in zip(shown, axes, strict=True):
        part = table[(table["model"] == model) & (table["measure"] == measure)]
        _doubling(part.assign(model=[kinds[kind] for kind in part[by]]), along, ax)
        ax.set(xlabel=xlabel, ylabel=wrapped(meanings[measure], 34), title=short(model))
    return figure


def _doubling(table: "DataFrame", along: str, ax: "Axes") -> None:
    numbers = sorted({float(number) for number in table[along]})
    finite = [number for number in numbers if np.isfinite(number)]
    end = 2 * max(finite, default=1.0)
    curves(table.assign(**{along: [min(float(number), end) for number in table[along]]}), along, ax)
    ax.set_xscale("log", base=2)
    ax.set_xticks([min(number, end) for number in numbers], [f"{n:g}" if np.isfinite(n) else "all" for n in numbers])
    ax.minorticks_off()
    ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)


def confidence_changes(
    table: "DataFrame", steps: "DataFrame", meanings: Mapping[str, str], keys: Mapping[str, str]
) -> "Figure":
    """How confidence changes where the masked keys were attended to and elsewhere: overall, and by step.

    Args:
        table: rows with ``measure`` and ``pick``.
        steps: the first two measures by ``step``, their names ending in ``_step``.
        meanings: meanings of the measures.
        keys: names of the picks; the first two are shown by step.
    """
    models = [model for model, rows in table.groupby("model", sort=False) if rows["estimate"].notna().any()]
    if not models:
        figure, axes = panels(1)
        nothing_to_show(axes[0], str(table["model"].iloc[0]), "one position is decided at a time: nothing to compare")
        return figure
    figure, axes = panels(3 * len(models), columns=3, size=(5.8, 3.6))
    halves = {"change_attended_step": "attended more to the masked keys", "change_rest_step": "attended less"}
    for number, model in enumerate(models):
        overall, *by_step = axes[3 * number : 3 * number + 3]
        rows = table[(table["model"] == model) & (table["measure"] != "correlation")]
        names = {name: wrapped(text, 32) for name, text in meanings.items()}
        interval_dots(
            rows.assign(model=[keys[pick] for pick in rows["pick"]]), "measure", overall, names=names, line=0.0
        )
        overall.set(xlabel="change of the likeliest token's probability", title=short(model))
        overall.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(keys), fontsize="x-small")
        for pick, ax in zip(keys, by_step, strict=False):
            part = steps[(steps["model"] == model) & (steps["pick"] == pick)]
            curves(part.assign(model=[halves[name] for name in part["measure"]]), "step", ax)
            ax.axhline(0, color="0.3", linewidth=0.8, linestyle="--")
            ax.set(xlabel="step", ylabel="change of the likeliest\ntoken's probability", title=f"{keys[pick]} masked")
    return figure


def costs_by_order(table: "DataFrame", orders: Mapping[str, str], keys: Mapping[str, str], label: str) -> "Figure":
    """Cost of masking under each order of unmasking: a panel per model and number of keys."""
    table = table[table["measure"] == "cost"]
    places = list(dict.fromkeys(zip(table["model"], table["top_k"], strict=True)))
    figure, axes = panels(len(places), columns=len({number for _, number in places}), size=(5.2, 2.8))
    for (model, number), ax in zip(places, axes, strict=True):
        rows = table[(table["model"] == model) & (table["top_k"] == number)]
        _by_pick(rows, "order", ax, orders, keys)
        keys_per_head = f"{number:.0f} {'key' if number == 1 else 'keys'} per head"
        ax.set(xlabel=wrapped(label, 40), title=f"{short(model)}: {keys_per_head}")
    _legend_below(figure, axes[0])
    return figure


def _by_pick(rows: "DataFrame", along: str, ax: "Axes", names: Mapping[Any, str], picks: Mapping[str, str]) -> None:
    """Costs along a column, a color per pick; without a legend, which the figure draws."""
    interval_dots(rows.assign(model=[picks[pick] for pick in rows["pick"]]), along, ax, names=names, line=0.0)
    ax.legend().remove()


def _legend_below(figure: "Figure", ax: "Axes") -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")


def costs_by_part(
    table: "DataFrame",
    shares: "DataFrame",
    parts: Mapping[Any, str],
    picks: Mapping[str, str],
    meanings: Mapping[str, str],
) -> "Figure":
    """Cost of masking a key, by where it is masked: a row of panels per model, word problems lost and KL.

    Args:
        table: rows with ``part`` and ``pick``.
        shares: shares of heads and steps, by ``part``.
        parts, picks, meanings: names of the parts, picks and measures.
    """
    models = list(dict.fromkeys(table["model"]))
    figure, axes = panels(2 * len(models), columns=2, size=(5.6, 2.6))
    shown = ((model, measure) for model in models for measure in ("cost", "kl"))
    for (model, measure), ax in zip(shown, axes, strict=True):
        rows = table[(table["model"] == model) & (table["measure"] == measure)]
        share = shares[shares["model"] == model].set_index("part")["estimate"]
        names = {
            part: f"{name}\n({share[part]:.0%} of them)" if part != "all" else name for part, name in parts.items()
        }
        _by_pick(rows, "part", ax, names, picks)
        ax.set(xlabel=wrapped(meanings[measure], 40), title=short(model))
    for column in (axes[::2], axes[1::2]):  # one scale for all models
        ends = [ax.get_xlim() for ax in column]
        for ax in column:
            ax.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
    _legend_below(figure, axes[0])
    return figure


def start_curves(table: "DataFrame") -> "Figure":
    """Share of answers that become the clean prompt's when the number is patched from a step on: a curve per layer."""
    models = list(dict.fromkeys(table["model"]))
    figure, axes = panels(len(models), size=(5.5, 3.8), sharey=True)
    for model, ax in zip(models, axes, strict=True):
        rows = table[table["model"] == model]
        names = ["embedding" if layer < 0 else f"layer {layer:.0f}" for layer in rows["layer"]]
        curves(rows.assign(model=names), "start", ax)
        ax.set(xlabel="share of steps before the number is patched", title=short(model))
        ax.set_ylabel("answers that become\nthe clean prompt's")
    return figure


def costs_by_cell(
    table: "DataFrame", panel: str, along: str, by: str, names: Mapping[Any, str], series: Mapping[str, str], label: str
) -> "Figure":
    """Costs of a table with three axes: a row per model, a panel per value of `panel`, a color per value of `by`.

    Args:
        names: names of the values of `along`.
        series: names of the values of `by`.
    """
    places = list(dict.fromkeys(zip(table["model"], table[panel], strict=True)))
    figure, axes = panels(len(places), columns=table[panel].nunique(), size=(5.0, 3.0))
    for (model, value), ax in zip(places, axes, strict=True):
        rows = table[(table["model"] == model) & (table[panel] == value)]
        interval_dots(rows.assign(model=[series[name] for name in rows[by]]), along, ax, names=names, line=0.0)
        ax.legend().remove()
        ax.set(xlabel=wrapped(label, 40), title=f"{short(model)}: {value}")
    _legend_below(figure, axes[0])
    return figure


def costs_by_mass(table: "DataFrame", by: str, names: Mapping[Any, str], label: str) -> "Figure":
    """Costs against the attention removed: a panel per model, a line with intervals per value of the column `by`.

    Args:
        table: rows with ``estimate``, ``low``, ``high`` and ``removed``, the share of attention; rows where it is NaN
            are left out.
        names: names of the values of `by`; those without a row are left out.
        label: what the cost is.
    """
    table = table[table["removed"].notna()]
    models = list(dict.fromkeys(table["model"]))
    if not models:
        figure, axes = panels(1)
        nothing_to_show(axes[0], "attention removed", "not known for these keys and models")
        return figure
    figure, axes = panels(len(models), size=(5.5, 3.8))
    for model, ax in zip(models, axes, strict=True):
        for value, name in names.items():
            rows = table[(table["model"] == model) & (table[by] == value)].sort_values("removed")
            if len(rows):
                size = [rows["estimate"] - rows["low"], rows["high"] - rows["estimate"]]
                ax.errorbar(100 * rows["removed"], rows["estimate"], yerr=size, marker="o", capsize=3, label=name)
        ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        ax.set(xlabel="attention removed, %", ylabel=wrapped(label, 34), title=short(model))
    _legend_below(figure, axes[0])
    return figure
