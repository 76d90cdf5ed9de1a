"""Draw the four figures of docs/findings.md from the stored results in docs/results.

    python scripts/findings_figures.py

Each function returns its figure and the stored rows that it shows. Seeds 2 and 3 are stored without comparisons within
templates.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas

from sinklens.sinks.palette import colours
from sinklens.views.figures import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FOLDER = ROOT / "docs" / "results", ROOT / "docs" / "pictures"
DIFFUSION = ("tiny-llada", "tiny-dream", "tiny-mmada")
SEEDS = {"": "seed 1", "-seed-2": "seed 2", "-seed-3": "seed 3"}
CRUDE, PLACE, WITHIN = "all places", "same step and place", "… and template"
MATCHED = {"nothing": CRUDE, "step, position": PLACE, "step, position, group": WITHIN, "step, place": PLACE,
           "step, place, group": WITHIN}  # fmt: skip
RATIOS: dict[str, tuple[str, dict[str, str]]] = {
    "sinks on masks ÷ on other tokens": ("token_types-matched", {"by": "kind", "set": "mask"}),
    "sinks on digits ÷ on other tokens": ("token_types-matched", {"by": "kind", "set": "digit"}),
    "landings on just-decided ÷ on other answer tokens": ("events-landings", {"others": "all"}),
}
HEADS, TINY_HEADS = {"smollm2-135m-masked": 270}, 24
COMPARABLE = 0.2  # ratios that compare fewer of the sinks or landings are left out


def read(folder: str, file: str) -> pandas.DataFrame:
    """A stored table; empty if the folder has none."""
    path = RESULTS / folder / f"{file}.csv"
    return pandas.read_csv(path) if path.is_file() else pandas.DataFrame()


def chosen(table: pandas.DataFrame, where: Mapping[str, str]) -> pandas.DataFrame:
    """The rows with these values."""
    for column, value in where.items():
        table = table[table[column] == value]
    return table


def forest_rows() -> pandas.DataFrame:
    """Every ratio of `RATIOS` by model, seed and what is matched, from the runs with groups where there are any."""
    rows: list[dict[str, object]] = []
    for claim, (file, where) in RATIOS.items():
        for model in DIFFUSION:
            for ending, seed in SEEDS.items():
                table = read(ending.strip("-") or "groups", file)
                if table.empty:
                    continue
                found = chosen(table, {"model": model + ending, "measure": "ratio", **where})
                found = found[found["matched"].isin(MATCHED) & (found["matched_share"] >= COMPARABLE)]
                rows += [
                    {"claim": claim, "model": model, "seed": seed, "matched": MATCHED[row.matched],
                     "estimate": row.estimate, "low": row.low, "high": row.high, "prompts": row.prompts}
                    for row in found.itertuples()
                ]  # fmt: skip
    return pandas.DataFrame(rows).drop_duplicates()


def forest() -> "tuple[Figure, pandas.DataFrame]":
    """Claim × seed: crude, at the same step and place, and there within the template."""
    table = forest_rows()
    figure, axes = panels(len(RATIOS), columns=len(RATIOS), size=(4.3, 4.4))
    lines = [f"{model}, {seed}" for model in DIFFUSION for seed in SEEDS.values()]
    names = table["model"] + ", " + table["seed"]
    lines = [line for line in lines if line in set(names)]
    for claim, ax in zip(RATIOS, axes, strict=True):
        for number, (matched, colour) in enumerate(zip((CRUDE, PLACE, WITHIN), colours(3), strict=True)):
            rows = table[(table["claim"] == claim) & (table["matched"] == matched)]
            heights = [lines.index(name) + (number - 1) * 0.22 for name in names[rows.index]]
            intervals(ax, rows, heights, colour, matched)
        ax.set_xscale("log")
        ax.set_xlim(0.02, 200)
        ax.axvline(1, color="0.3", linewidth=0.8, linestyle="--")
        ax.set_yticks(range(len(lines)), lines if ax is axes[0] else [""] * len(lines))
        ax.set_ylim(len(lines) - 0.5, -0.5)
        ax.set_title(claim, fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    return figure, table


def intervals(ax: "Axes", rows: pandas.DataFrame, heights: list[float], colour: str, label: str) -> None:
    """Estimates with their intervals, on horizontal lines."""
    errors = [(rows["estimate"] - rows["low"]).clip(lower=0), (rows["high"] - rows["estimate"]).clip(lower=0)]
    ax.errorbar(rows["estimate"], heights, xerr=errors, fmt="o", color=colour, markersize=4, capsize=2, linewidth=1,
                label=label)  # fmt: skip


def pair() -> "tuple[Figure, pandas.DataFrame]":
    """A base model, its causal continuation and its masked one: against the share of masked tokens, and by layer."""
    from sinklens.analyses.pair import BY_LAYER, panels_of

    table, by_layer = read(".", "pair-texts"), [read(".", f"pair-{name}") for name in BY_LAYER]
    return panels_of(table, by_layer), pandas.concat([table, *by_layer])


def mass() -> "tuple[Figure, pandas.DataFrame]":
    """Points lost against attention removed, for each kind of key, with its control of as much attention."""
    costs = chosen(read("groups", "content-costs"), {"measure": "cost"})
    removed = read("groups", "content-removed")[["model", "kind", "part", "change", "estimate"]]
    keys = ["model", "kind", "part", "change"]
    table = costs.merge(removed.rename(columns={"estimate": "removed"}), on=keys, validate="one_to_one")
    table = table[table["part"].isin(["sink", "other"]) & (table["kind"] != "any")]
    figure, axes = panels(len(DIFFUSION), columns=len(DIFFUSION), size=(4, 3.4))
    for model, ax in zip(DIFFUSION, axes, strict=True):
        cells = table[table["model"] == model].groupby(["kind", "part"], sort=False)
        for ((kind, part), rows), colour in zip(cells, colours(len(cells)), strict=True):
            name = f"{'digits' if kind == 'digit' else 'other tokens'}, {'sinks' if part == 'sink' else 'no sinks'}"
            costs_of(ax, rows.set_index("change"), colour, name)
        ax.set(xlim=(0, 4.2), ylim=(-14, 90), xlabel="attention removed, %", title=model)
    axes[0].set_ylabel("word problems lost, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small",
                  title="strongest keys masked (filled); as much attention to other keys masked (hollow)",
                  title_fontsize="small")  # fmt: skip
    return figure, table


def costs_of(ax: "Axes", rows: pandas.DataFrame, colour: str, name: str) -> None:
    """The cost of one cell's mask and, hollow, of its control."""
    for change, filled in (("mask", True), ("mask_mass", False)):
        row = rows.loc[change]
        error = [[100 * (row["estimate"] - row["low"])], [100 * (row["high"] - row["estimate"])]]
        ax.errorbar(100 * row["removed"], 100 * row["estimate"], yerr=error, fmt="o", color=colour, capsize=2,
                    linewidth=1, markersize=5, markerfacecolor=colour if filled else "white",
                    label=name if filled else None)  # fmt: skip


def swaps() -> "tuple[Figure, pandas.DataFrame]":
    """Heads with a sink at a place, before and after its token is replaced."""
    from sinklens.views.charts import interval_dots

    table = chosen(read("groups", "swaps-swaps"), {"measure": "change"}).reset_index(drop=True)
    figure, (ax,) = panels(1, size=(7, 3.6))
    numbers = ["estimate", "low", "high"]
    heads = table["model"].map(HEADS).fillna(TINY_HEADS)
    interval_dots(table.assign(**table[numbers].mul(100 / heads, axis=0)), "swap", ax, line=0.0)
    ax.legend(fontsize="small", loc="lower left")
    ax.set_xlabel("change of the number of heads with a sink at that place, % of all heads")
    return figure, table


FIGURES: "dict[str, Callable[[], tuple[Figure, pandas.DataFrame]]]" = {
    "findings-forest": forest, "findings-mass": mass, "findings-pair": pair, "findings-swaps": swaps,
}  # fmt: skip


def main() -> None:
    """Draw and save all figures."""
    import matplotlib.pyplot as plt

    for name, draw in FIGURES.items():
        with plt.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            figure, _ = draw()
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)


if __name__ == "__main__":
    main()
