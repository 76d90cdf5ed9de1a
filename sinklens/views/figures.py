"""Figures of sink tracks, one function each.

Every function takes ``ax=`` and gives it back, so figures can be put together; none shows or saves anything.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

MASKED = "#c6dbef"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, colour-blind safe
UNITS = {
    "sum": "attention received, column sum (uniform = 1)",
    "percent": "attention received, % of all",
    "fraction": "attention received, share of all",
    "visible": "mean attention of the queries that see the key",
}


def _axes(ax: "Axes | None", size: tuple[float, float] = (8, 4)) -> "Axes":
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=size, layout="constrained")[1]


def panels(count: int, columns: int = 2, size: tuple[float, float] = (5.5, 3.6)) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` axes in rows of `columns`."""
    from matplotlib import pyplot

    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained", squeeze=False
    )
    for ax in axes.ravel()[count:]:
        ax.set_axis_off()
    return figure, list(axes.ravel()[:count])


def score_histogram(edges: np.ndarray, shares: Mapping[str, np.ndarray], unit: str, ax: "Axes | None" = None) -> "Axes":
    """Histogram of scores (the paper's Figs. 3 and 9), one line per model, on a logarithmic share.

    Args:
        edges: of the bins, one more than each of `shares`.
        shares: model name -> share of positions per bin.
        unit: of the scores.
    """
    ax = _axes(ax)
    for (name, share), colour in zip(shares.items(), _colours(len(shares)), strict=True):
        ax.stairs(share, edges, label=_short(name), color=colour)
    ax.set(xlabel=UNITS[unit], ylabel="share of positions", yscale="log", title=f"unit: {unit}")
    ax.legend(fontsize="small")
    return ax


def threshold_curve(table: "DataFrame", unit: str, factor: float = 1.0, ax: "Axes | None" = None) -> "Axes":
    """Share of positions that are no sink against ε (the paper's Fig. 10), with intervals.

    Args:
        table: rows with model, epsilon, mean, low and high.
        unit: of ε.
        factor: on the table's ε.
    """
    ax = _axes(ax)
    models = list(dict.fromkeys(table["model"]))
    for model, colour in zip(models, _colours(len(models)), strict=True):
        rows = table[table["model"] == model]
        epsilon = rows["epsilon"].to_numpy() * factor
        ax.plot(epsilon, rows["mean"], "o-", color=colour, label=_short(model), markersize=4)
        ax.fill_between(epsilon, rows["low"], rows["high"], color=colour, alpha=0.2, linewidth=0)
    ax.set(xlabel=f"threshold ε above the mean of the others ({unit})", ylabel="share of positions that are no sink")
    ax.set_title(f"unit: {unit}")
    ax.legend(fontsize="small")
    return ax


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _short(name: str) -> str:
    """A model's name without the folders before it."""
    return name.rstrip("/").rpartition("/")[2]


def sink_map(
    track: SinkTrack, layer: int | None = None, head: int | None = None, batch: int = 0, ax: "Axes | None" = None
) -> "Axes":
    """Step × position map of sink scores (the paper's Fig. 1), the strongest key of each step marked.

    Args:
        layer, head: which; None averages over all.
    """
    track.require(layer=layer, head=head, batch=batch)
    score = track.scores().isel(batch=batch)
    score = score.mean("layer") if layer is None else score.isel(layer=layer)
    score = score.mean("head") if head is None else score.isel(head=head)
    values = score.to_numpy()
    ax = _axes(ax)
    image = ax.imshow(values, aspect="auto", cmap="magma", interpolation="nearest", vmin=0)
    strongest = np.where(np.nanmax(values, axis=1) > 0, np.nanargmax(values, axis=1), np.nan)
    ax.plot(strongest, np.arange(len(values)), ".", color="white", markersize=4, label="strongest key")
    ax.axvline(track.data.attrs["prompt_length"] - 0.5, color="white", linewidth=0.8, linestyle=":")
    ax.set(xlabel="position (dotted: end of prompt)", ylabel="denoising step", title=_title(track, layer, head, batch))
    ax.legend(loc="lower left", fontsize="small", labelcolor="white", facecolor="0.3")
    ax.figure.colorbar(image, ax=ax, label="attention received (uniform = 1)")
    return ax


def most_moving_head(track: SinkTrack, batch: int = 0) -> tuple[int, int]:
    """Layer and head whose strongest key changes most often from step to step; ties go to the stronger sink."""
    top = track.top(1).isel(batch=batch, rank=0).to_numpy()
    moves = (np.diff(top, axis=0) != 0).sum(axis=0)
    strength = track.scores().isel(batch=batch).max("pos").mean("step").to_numpy()
    best = np.lexsort((strength.ravel(), moves.ravel()))[-1]
    layer, head = np.unravel_index(best, moves.shape)
    return int(layer), int(head)


def sink_path(track: SinkTrack, layer: int, head: int, batch: int = 0, ax: "Axes | None" = None) -> "Axes":
    """Position of the strongest key against step: every head faintly, one drawn out (the paper's Fig. 7).

    The background tells which positions were undecided when the step began. The title tells how many heads have their
    strongest key at one position through all steps.
    """
    from matplotlib.colors import to_rgba

    track.require(layer=layer, head=head, batch=batch)
    ax = _axes(ax)
    data = track.data.isel(batch=batch)
    steps = np.arange(track.steps)
    masked = data["masked"].to_numpy()
    shade = np.where(masked.T[..., None], to_rgba(MASKED), (1, 1, 1, 1))
    ax.imshow(shade, aspect="auto", origin="lower", interpolation="nearest")
    every = track.top(1).isel(batch=batch, rank=0).to_numpy().astype(float)
    every[every < 0] = np.nan
    still = int((every == every[:1]).all(axis=0).sum())
    jitter = np.linspace(-0.3, 0.3, every[0].size)
    for offset, path in zip(jitter, every.reshape(len(steps), -1).T, strict=True):
        ax.plot(steps, path + offset, color="0.55", linewidth=0.6, alpha=0.6)
    ax.plot(steps, every[:, layer, head], "o-", color="#d94801", markersize=4, label=f"layer {layer}, head {head}")
    ax.axhline(data.attrs["prompt_length"] - 0.5, color="0.3", linewidth=0.8, linestyle=":")
    ax.set(
        xlabel="step",
        ylabel="position of the strongest key",
        title=f"{_name(track)}: {still} of {every[0].size} heads stay where they began",
    )
    ax.locator_params(axis="x", integer=True)
    ax.legend(loc="upper right", frameon=True)
    return ax


def sink_paths(tracks: Sequence[SinkTrack], batch: int = 0) -> "Figure":
    """`sink_path` of several runs side by side, each with the head whose sink moves most."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(tracks), figsize=(6 * len(tracks), 4.5), layout="constrained", squeeze=False, sharey=True
    )
    for track, ax in zip(tracks, axes[0], strict=True):
        sink_path(track, *most_moving_head(track, batch), batch=batch, ax=ax)
    figure.suptitle(
        "Where each head's strongest key is: grey, all heads; orange, the head that moves most; blue, not decided yet "
        "when the step began; dotted, end of prompt",
        fontsize=9,
    )
    return figure


def _title(track: SinkTrack, layer: int | None, head: int | None, batch: int) -> str:
    rows = [f"row {batch}"] if track.data.sizes["batch"] > 1 else []
    which = [
        "mean over layers" if layer is None else f"layer {layer}",
        "mean over heads" if head is None else f"head {head}",
    ]
    return f"{_name(track)}: {', '.join(rows + which)}"


def _name(track: SinkTrack) -> str:
    return _short(str(track.data.attrs.get("model", "")))
