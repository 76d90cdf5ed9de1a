"""Figures of sink tracks, one function each; figures of measured numbers are in charts.py.

Functions that draw one panel take ``ax=`` and return it, so figures can be combined; none shows or saves anything.
Positions are labeled by their tokens if the track has them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from jaxtyping import Bool

from sinklens.errors import TrackError, require
from sinklens.sinks.drawing import (
    axes_or_new,
    layer_and_head,
    model_name,
    step_ticks,
)
from sinklens.sinks.labels import plain, wrapped
from sinklens.sinks.motion import jumps
from sinklens.sinks.palette import COLOURS, RAMPS
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Count, checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

MASKED, PATH = RAMPS["sequential"][1], COLOURS[1]


@checked
def panels(
    count: Count,
    columns: Count = 2,
    size: tuple[float | int, float | int] = (5.5, 3.6),
    sharey: bool = False,
    ax: "Axes | Sequence[Axes] | None" = None,
) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` axes, each of `size` inches, in rows of `columns`.

    Args:
        sharey: whether all axes share one vertical scale.
        ax: axes to take instead, `count` of them.

    Raises:
        SettingError: `ax` is something else, or another number of them.
    """
    from matplotlib import pyplot

    if ax is not None:
        given = [axes_or_new(one) for one in np.ravel(np.asarray(ax, dtype=object))]
        require(len(given) == count, f"ax has {len(given)} axes for {count} panels; give one for each, in a list.")
        return cast("Figure", given[0].figure), given
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained", squeeze=False, sharey=sharey
    )
    for spare in axes.ravel()[count:]:
        spare.set_axis_off()
    return figure, list(axes.ravel()[:count])


@checked
def most_moving_head(track: SinkTrack, row: int = 0) -> tuple[int, int]:
    """Layer and head whose sink moves most often: its strongest key changes between two steps and is a sink at both.

    Ties go to the head whose strongest key changes more often, sink or not, and then to the head with higher scores.
    """
    moves, strength = _moves(track, row)
    part = track.isel(batch=row)
    sinks = jumps(part, part.detect())["changes"].to_numpy()
    layer, head = np.unravel_index(np.lexsort((strength.ravel(), moves.ravel(), sinks.ravel()))[-1], moves.shape)
    return int(layer), int(head)


@checked
def stillest_head(track: SinkTrack, row: int = 0) -> tuple[int, int]:
    """Layer and head whose strongest key changes least often from step to step; ties go to the stronger sink."""
    moves, strength = _moves(track, row)
    layer, head = np.unravel_index(np.lexsort((-strength.ravel(), moves.ravel()))[0], moves.shape)
    return int(layer), int(head)


def _moves(track: SinkTrack, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Changes of the strongest key, and its mean score, both [layer, head]."""
    track.require(batch=row)
    top = track.top(1).isel(batch=row, rank=0).to_numpy()
    strength = track.scores().isel(batch=row).max("pos").mean("step").fillna(0).to_numpy()
    return (np.diff(top, axis=0) != 0).sum(axis=0), strength


def has_sink(track: SinkTrack, row: int = 0) -> Bool[np.ndarray, "step layer head"]:
    """Whether a head has a sink (`SinkTrack.detect`) at a step; if so, its strongest key is a sink."""
    return track.detect().isel(batch=row).any("pos").to_numpy()


@checked
def sink_path(
    track: SinkTrack,
    layer: int,
    head: int,
    row: int = 0,
    ax: "Axes | None" = None,
    *,
    color: "ColorType" = PATH,
    shade: "ColorType" = MASKED,
    caption: bool = True,
) -> "Axes":
    """Position of the strongest key against step: every head faintly, one highlighted (the paper's Fig. 7).

    Marks are filled at steps where the strongest key is a sink and hollow at others. The background shows which
    positions were undecided when the step began. The title gives the number of heads whose strongest key stays at one
    position through all steps.

    Args:
        color: color of the highlighted path, as matplotlib takes it.
        shade: color of the background at undecided positions.
        caption: whether the figure has its title.
    """
    from matplotlib.colors import to_rgba

    track.require(layer=layer, head=head, batch=row)
    ax = axes_or_new(ax)
    data = track.data.isel(batch=row)
    steps = np.arange(track.steps)
    background = np.where(data["masked"].to_numpy().T[..., None], to_rgba(shade), (1, 1, 1, 1))
    ax.imshow(background, aspect="auto", origin="lower", interpolation="nearest")
    paths = track.top(1).isel(batch=row, rank=0).to_numpy().astype(float)
    paths[paths < 0] = np.nan
    still = int((paths == paths[:1]).all(axis=0).sum())
    for offset, path in zip(np.linspace(-0.3, 0.3, paths[0].size), paths.reshape(len(steps), -1).T, strict=True):
        ax.plot(steps, path + offset, color="0.55", linewidth=0.6, alpha=0.6)
    path, hollow = paths[:, layer, head], ~has_sink(track, row)[:, layer, head]
    ax.plot(steps, path, "o-", color=color, markersize=4, label=layer_and_head(track, layer, head))
    ax.plot(steps[hollow], path[hollow], "o", color=color, markersize=4, markerfacecolor="white")
    ax.axhline(data.attrs["prompt_length"] - 0.5, color="0.3", linewidth=0.8, linestyle=":")
    ax.set(
        xlabel="step",
        ylabel="position of the strongest key (by column sum)",
        title=f"{model_name(track)}: {still} of {paths[0].size} heads never move" if caption else "",
    )
    step_ticks(ax.xaxis, track.data["step"])
    ax.legend(loc="upper right", frameon=True)
    return ax


@checked
def sink_paths(
    tracks: SinkTrack | Sequence[SinkTrack] | Mapping[str, SinkTrack],
    row: int = 0,
    ax: "Axes | Sequence[Axes] | None" = None,
    *,
    caption: bool = True,
) -> "Figure":
    """`sink_path` of several runs side by side, each with the head whose sink moves most (`most_moving_head`).

    Args:
        tracks: one or several, or title -> track.
        ax: axes to draw on, one for each track; by default those of a new figure.
        caption: whether the figure explains itself; without it, only titles that were passed are shown.

    Raises:
        TrackError: `tracks` is empty.
    """
    listed = [tracks] if isinstance(tracks, SinkTrack) else tracks  # a track iterates over its variables
    named = list(listed.items()) if isinstance(listed, Mapping) else [("", track) for track in listed]
    require(named, "there is no track to draw; give at least one.", TrackError)
    figure, axes = panels(len(named), columns=len(named), size=(6, 4.5), sharey=True, ax=ax)
    for (title, track), panel in zip(named, axes, strict=True):
        sink_path(track, *most_moving_head(track, row), row=row, ax=panel, caption=caption)
        if title:
            panel.set_title(f"{plain(title)}\n{panel.get_title()}".rstrip())
    if caption and ax is None:
        says = (
            "Strongest key of each head, the position that receives most attention: gray, all heads; orange, the head "
            "whose sink moves most (filled mark: a sink, hollow: not a sink); blue, undecided or not yet existing when "
            "the step began; dotted, end of prompt"
        )
        figure.suptitle(wrapped(says, 67 * len(named)), fontsize=9)
    return figure
