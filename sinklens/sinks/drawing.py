"""The picture of a sink track, and what all pictures of tracks share; further figures are in `sinklens.views`.

A picture is drawn into ``ax=``, or into a new figure, and is neither shown nor saved. matplotlib is imported when
something is drawn.
"""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from jaxtyping import Int

from sinklens.errors import TrackError, require
from sinklens.sinks.data import TrackData, Unit
from sinklens.sinks.labels import UNITS, short, token_labels, token_ticks, wrapped
from sinklens.sinks.palette import COLOURS, color_map
from sinklens.utils.arguments import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MARKS = "dots: strongest key; dotted: end of prompt"


def axes_or_new(ax: "Axes | None", size: tuple[float | int, float | int] = (8, 4)) -> "Axes":
    """`ax`, or the axes of a new figure of `size` inches.

    Raises:
        SettingError: `ax` is something else.
    """
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    require(
        ax is None or isinstance(ax, Axes),
        f"ax must be axes of matplotlib, such as ax of figure, ax = pyplot.subplots(); got {type(ax).__name__}.",
    )
    return pyplot.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


@checked
def sink_map(
    track: TrackData,
    layer: int | None = None,
    head: int | None = None,
    row: int = 0,
    ax: "Axes | None" = None,
    *,
    unit: Unit = "sum",
    steps: slice = slice(None),
    tokens: Int[np.ndarray, " pos"] | None = None,
    caption: bool = True,
) -> "Axes":
    """Step × position map of sink scores (the paper's Fig. 1), the strongest key of each step marked.

    Args:
        layer, head: indices; None averages over all.
        unit: unit of the scores; "visible" corrects for early keys of a causal model being seen by more queries.
        steps: steps to show.
        tokens: ids that label the positions; by default those that entered the last step.
        caption: whether the figure says what it shows: model, layer, head and marks; a paper has that below it.
    """
    track.require(layer=layer, head=head, batch=row)
    require(
        len(range(track.steps)[steps]),
        f"{steps} selects no step of this track; it has {track.steps} steps, 0 to {track.steps - 1}.",
        TrackError,
    )
    score = track.scores(unit).isel(batch=row, step=steps)
    score = score.mean("layer") if layer is None else score.isel(layer=layer)
    score = score.mean("head") if head is None else score.isel(head=head)
    values = score.to_numpy()
    known, labels = np.nan_to_num(values, nan=0.0), token_labels(track, row, tokens)
    strongest = np.where(known.max(axis=1) > 0, known.argmax(axis=1), np.nan)
    which = f"row {int(track.data['batch'][row])}, " if track.data.sizes["batch"] > 1 else ""
    ax = axes_or_new(ax)
    image = ax.imshow(values, aspect="auto", cmap=color_map(), interpolation="nearest", vmin=0)
    ax.plot(
        strongest, np.arange(len(values)), "o", label="strongest key",
        color=COLOURS[1], markersize=3.5, markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    ax.axvline(track.prompt_length - 0.5, color="0.2", linewidth=0.8, linestyle=":")
    title = f"{model_name(track)}: {which}{layer_and_head(track, layer, head)}" if caption else ""
    xlabel = f"{'token at each position' if track.vocabulary else 'position'}{f' ({MARKS})' * caption}"
    ax.set(ylabel="step", title=title, xlabel=xlabel)
    if track.vocabulary:
        token_ticks(ax.xaxis, labels, known.max(axis=0).astype(np.float64))
    step_ticks(ax.yaxis, score["step"])
    ax.figure.colorbar(image, ax=ax, label=wrapped(UNITS[unit]))
    return ax


def step_ticks(axis: "Axis", steps: Int[xr.DataArray, " step"]) -> None:
    """Label an axis of steps with their numbers; a part of a track keeps the run's."""
    from matplotlib.ticker import MaxNLocator

    numbers = dict(enumerate(steps.to_numpy().tolist()))
    axis.set_major_locator(MaxNLocator(integer=True))
    axis.set_major_formatter(lambda at, _: str(numbers.get(round(at), "")) if abs(at - round(at)) < 1e-6 else "")


def layer_and_head(track: TrackData, layer: int | None, head: int | None) -> str:
    """The layer and head by their numbers in the model; a part of a track keeps these numbers."""
    return ", ".join(
        f"mean over {name}s" if place is None else f"{name} {int(track.data[name][place])}"
        for name, place in (("layer", layer), ("head", head))
    )


def model_name(track: TrackData) -> str:
    """The name of a track's model, without parent folders."""
    return short(str(track.data.attrs.get("model", "")))
