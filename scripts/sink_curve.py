"""Table and figure of the sinks in the course of continued training.

    python scripts/sink_curve.py runs/continued
    python scripts/pictures.py training    # the figure alone, from the stored table

Reads ``measures.jsonl`` of every run in the folder (training/continued.py), and writes docs/results/sink-curve.csv and
docs/pictures/sink-curve.svg. A row of the table is the mean of a measure over the held-out windows, for one run, number
of tokens and share of masked tokens, with a bootstrap interval over windows. Intervals over training runs are another
matter: the figure shows each seed as a line.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas

from sinklens.sinks.palette import colours
from sinklens.utils.estimates import bootstrap
from sinklens.views.figures import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
TABLE, FOLDER = ROOT / "docs" / "results" / "sink-curve.csv", ROOT / "docs" / "pictures"
SHOWN = 0.15  # share of masked tokens in the figure; a causal model reads none
TICKS = (0, 0.03, 0.1, 0.3, 1, 3, 10, 20)  # millions of tokens
PANELS = {
    "first": "attention to the first position, share",
    "first_strongest": "heads whose strongest key is the first position, share",
    "sink_heads": "heads with a sink, share",
    "replaced": "strongest keys that change when a token is replaced (later queries), share",
}


def table_of(folder: Path) -> pandas.DataFrame:
    """One row for each run, number of tokens, share and measure of the runs in `folder`."""
    rows = []
    for file in sorted(folder.glob("*/measures.jsonl")):
        for record in map(json.loads, file.read_text().splitlines()):
            for of_share in record["shares"]:
                names = [name for name in of_share if name not in ("share", "first_by_head")]
                found = bootstrap(np.transpose([of_share[name] for name in names]))
                rows += [
                    {"arm": record["arm"], "seed": record["seed"], "tokens": record["tokens"], "measure": name,
                     "share": of_share["share"], "estimate": value, "low": low, "high": high, "windows": count}
                    for name, value, low, high, count in zip(
                        names, found.value, found.low, found.high, found.n, strict=True
                    )
                ]  # fmt: skip
    return pandas.DataFrame(rows)


def figure_of(table: pandas.DataFrame) -> "Figure":
    """`PANELS` against the number of tokens: a thin line for each seed, a thick one for their mean."""
    figure, axes = panels(len(PANELS), size=(4.6, 3.0))
    arms = sorted(set(table["arm"]), reverse=True)
    for (measure, title), ax in zip(PANELS.items(), axes, strict=True):
        for arm, colour in zip(arms, colours(len(arms)), strict=True):
            rows = table[(table["arm"] == arm) & (table["measure"] == measure) & table["share"].isin([0, SHOWN])]
            lines = rows.pivot_table("estimate", "tokens", "seed")
            ax.plot(lines.index / 1e6, lines, color=colour, linewidth=0.7)
            mean = lines.dropna().mean(axis=1)  # where all seeds were measured
            label = f"{arm}, {SHOWN:.0%} masked" if arm == "masked" else arm
            ax.plot(mean.index / 1e6, mean, "o-", color=colour, linewidth=2, markersize=3, label=label)
        least = table.loc[table["tokens"] > 0, "tokens"].min() / 1e6
        ax.set_xscale("symlog", linthresh=least, linscale=0.3)
        ax.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        ax.minorticks_off()
        ax.set(xlabel="training tokens, millions", xlim=(-least / 8, table["tokens"].max() / 0.9e6), ylim=(0, None))
        ax.set_title(title, fontsize="medium", wrap=True)
    axes[0].legend(fontsize="small")
    return figure


def main() -> None:
    """Draw the stored table."""
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "sink-curve", "svg.fonttype": "none"}):
        figure = figure_of(pandas.read_csv(TABLE))
        figure.savefig(FOLDER / "sink-curve.svg", metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    found = table_of(Path(sys.argv[1]))
    found.round(5).to_csv(TABLE, index=False)
    main()
    print(f"{len(found)} rows in {TABLE.relative_to(ROOT)}")
