"""Figures of sink tracks, one function each; figures of measured numbers are in charts.py.

Functions that draw one panel take ``ax=`` and return it, so figures can be combined; none shows or saves anything.
Positions are labeled by their tokens if the track has them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from sinklens.errors import SettingError, TrackError
from sinklens.sinks.drawing import (
    axes_or_new,
    dark_colors,
    integer_steps,
    layer_and_head,
    model_name,
    number_at,
    sink_map,
    title_of,
)
from sinklens.sinks.labels import BLANK, token_labels, token_ticks, wrapped
from sinklens.sinks.motion import jumps
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MASKED = "#c6dbef"
PATH = "#d94801"
DECIDED = "#636363"


def panels(
    count: int,
    columns: int = 2,
    size: tuple[float | int, float | int] = (5.5, 3.6),
    heights: Sequence[float | int] | None = None,
    sharey: bool = False,
) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` axes, each of `size` inches, in rows of `columns`.

    Args:
        heights: heights of the rows in inches, if they are not all ``size[1]``.
        sharey: whether all axes share one vertical scale.
    """
    from matplotlib import pyplot

    columns = min(columns, count)
    rows = -(-count // columns)
    row_heights = [size[1]] * rows if heights is None else heights
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(size[0] * columns, sum(row_heights)), layout="constrained", squeeze=False,
        sharey=sharey, height_ratios=row_heights,
    )  # fmt: skip
    for ax in axes.ravel()[count:]:
        ax.set_axis_off()
    return figure, list(axes.ravel()[:count])


def most_moving_head(track: SinkTrack, batch: int = 0) -> tuple[int, int]:
    """Layer and head whose sink moves most often: its strongest key changes between two steps and is a sink at both.

    Ties go to the head whose strongest key changes more often, sink or not, and then to the head with higher scores.
    """
    moves, strength = _moves(track, batch)
    part = track.isel(batch=batch)
    sinks = jumps(part, part.detect())["changes"].to_numpy()
    best = np.lexsort((strength.ravel(), moves.ravel(), sinks.ravel()))[-1]
    layer, head = np.unravel_index(best, moves.shape)
    return int(layer), int(head)


def stillest_head(track: SinkTrack, batch: int = 0) -> tuple[int, int]:
    """Layer and head whose strongest key changes least often from step to step; ties go to the stronger sink."""
    moves, strength = _moves(track, batch)
    best = np.lexsort((-strength.ravel(), moves.ravel()))[0]
    layer, head = np.unravel_index(best, moves.shape)
    return int(layer), int(head)


def _moves(track: SinkTrack, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Changes of the strongest key, and its mean score, both [layer, head]."""
    track.require(batch=batch)
    top = track.top(1).isel(batch=batch, rank=0).to_numpy()
    strength = track.scores().isel(batch=batch).max("pos").mean("step").fillna(0).to_numpy()
    return (np.diff(top, axis=0) != 0).sum(axis=0), strength


def has_sink(track: SinkTrack, batch: int = 0) -> Bool[np.ndarray, "step layer head"]:
    """Whether a head has a sink (`SinkTrack.detect`) at a step; if so, its strongest key is a sink."""
    return track.detect().isel(batch=batch).any("pos").to_numpy()


def canvas_map(
    track: SinkTrack,
    batch: int = 0,
    ax: "Axes | None" = None,
    *,
    tokens: Int[np.ndarray, " pos"] | None = None,
    color: str = DECIDED,
    shade: str = MASKED,
) -> "Axes":
    """Which positions are decided when each step begins, with steps from left to right as in `sink_path`.

    Cells of the prompt are white, those of decided positions have `color`, and all others `shade`. Positions are
    labeled by their tokens where there is room.

    Args:
        tokens: ids that label the positions, e.g. ``run.tokens[0]``; by default those that entered the last step.
        color, shade: colors of matplotlib.

    Raises:
        TrackError: no such row, or tokens of another length.
    """
    from matplotlib.colors import to_rgba

    track.require(batch=batch)
    labels = token_labels(track, batch, tokens)
    ax = axes_or_new(ax, (5, 6))
    masked = track.data["masked"].isel(batch=batch).to_numpy().T[..., None]
    cells = np.where(masked, to_rgba(shade), to_rgba(color))
    cells[: track.data.attrs["prompt_length"]] = to_rgba("white")
    ax.imshow(cells, aspect="auto", origin="lower", interpolation="nearest")
    token_ticks(ax.yaxis, labels)
    _step_axis(track, ax)
    ax.set(ylabel="", title="canvas")
    return ax


def sink_path(
    track: SinkTrack,
    layer: int,
    head: int,
    batch: int = 0,
    ax: "Axes | None" = None,
    *,
    color: str = PATH,
    shade: str = MASKED,
) -> "Axes":
    """Position of the strongest key against step: every head faintly, one highlighted (the paper's Fig. 7).

    Marks are filled at steps where the strongest key is a sink and hollow at others. The background shows which
    positions were undecided when the step began. The title gives the number of heads whose strongest key stays at one
    position through all steps.

    Args:
        color: color of the highlighted path, as matplotlib takes it.
        shade: color of the background at undecided positions.
    """
    from matplotlib.colors import to_rgba

    track.require(layer=layer, head=head, batch=batch)
    ax = axes_or_new(ax)
    data = track.data.isel(batch=batch)
    steps = np.arange(track.steps)
    masked = data["masked"].to_numpy()
    background = np.where(masked.T[..., None], to_rgba(shade), (1, 1, 1, 1))
    ax.imshow(background, aspect="auto", origin="lower", interpolation="nearest")
    paths = track.top(1).isel(batch=batch, rank=0).to_numpy().astype(float)
    paths[paths < 0] = np.nan
    still = int((paths == paths[:1]).all(axis=0).sum())
    jitter = np.linspace(-0.3, 0.3, paths[0].size)
    for offset, path in zip(jitter, paths.reshape(len(steps), -1).T, strict=True):
        ax.plot(steps, path + offset, color="0.55", linewidth=0.6, alpha=0.6)
    path, hollow = paths[:, layer, head], ~has_sink(track, batch)[:, layer, head]
    ax.plot(steps, path, "o-", color=color, markersize=4, label=layer_and_head(track, layer, head))
    ax.plot(steps[hollow], path[hollow], "o", color=color, markersize=4, markerfacecolor="white")
    ax.axhline(data.attrs["prompt_length"] - 0.5, color="0.3", linewidth=0.8, linestyle=":")
    ax.set(
        ylabel="position of the strongest key (by column sum)",
        title=f"{model_name(track)}: {still} of {paths[0].size} heads never move",
    )
    _step_axis(track, ax)
    ax.legend(loc="upper right", frameon=True)
    return ax


def _step_axis(track: SinkTrack, ax: "Axes") -> None:
    """Label the horizontal axis with the track's step numbers."""
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(integer_steps())
    numbers = track.data["step"].to_numpy().tolist()
    ax.xaxis.set_major_formatter(lambda place, _: number_at(numbers, place))


def sink_paths(tracks: Sequence[SinkTrack], batch: int = 0) -> "Figure":
    """`sink_path` of several runs side by side, each with the head whose sink moves most (`most_moving_head`).

    Raises:
        TrackError: `tracks` is empty.
    """
    if not tracks:
        raise TrackError("there is no track to draw; give at least one.")
    figure, axes = panels(len(tracks), columns=len(tracks), size=(6, 4.5), sharey=True)
    for track, ax in zip(tracks, axes, strict=True):
        sink_path(track, *most_moving_head(track, batch), batch=batch, ax=ax)
    figure.suptitle(
        "Strongest key of each head, the position that receives most attention: gray, all heads; orange, the head "
        "whose sink moves most\n(filled mark: a sink, hollow: not a sink); blue, undecided or not yet existing when "
        "the step began; dotted, end of prompt",
        fontsize=9,
    )
    return figure


def sink_life(
    track: SinkTrack,
    layer: int,
    head: int,
    pos: int,
    start: int,
    length: int = 1,
    batch: int = 0,
    ax: "Axes | None" = None,
    *,
    around: int = 3,
    tokens: Int[np.ndarray, " pos"] | None = None,
) -> "Axes":
    """The life of one sink, framed, with `around` steps before and after it (the paper's Fig. 6b shows one step).

    Colors follow the square root of the score, so that a weak sink is visible beside strong ones.

    Args:
        pos, start, length: position, first step, and number of steps, as in a row of `motion.lifetimes`.
        around: number of steps shown before and after the life.
        tokens: ids that label the positions; by default those that entered the last step.

    Raises:
        TrackError: the life lies outside the track.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    length_of_track = track.data.sizes["pos"]
    if not (0 <= pos < length_of_track and length >= 1 and 0 <= start <= track.steps - length):
        raise TrackError(
            f"a life at position {pos}, of {length} steps from step {start}, is not within this track of "
            f"{length_of_track} positions and {track.steps} steps; take it from a row of motion.lifetimes."
        )
    first, last = max(0, start - around), min(track.steps, start + length + around)
    ax = sink_map(track, layer, head, batch, ax, steps=slice(first, last), tokens=tokens)
    ax.get_images()[0].set_norm(PowerNorm(0.5, vmin=0))
    frame = Rectangle((pos - 0.5, start - first - 0.5), 1, length, fill=False, edgecolor="#56b4e9", linewidth=2)
    ax.add_patch(frame)
    token = token_labels(track, batch, tokens)[pos]
    lasts = f"only at step {start}" if length == 1 else f"from step {start} to {start + length - 1}"
    ax.set_title(f"{title_of(track, layer, head, batch)}: ‘{token}’ ({pos}) is a sink {lasts}")
    return ax


def grouped_pattern(
    pattern: Float[np.ndarray, "query key"],
    masked: Bool[np.ndarray, " query"],
    labels: Sequence[str],
    ax: "Axes | None" = None,
) -> "Axes":
    """One head's attention pattern, its rows sorted into unmasked and masked queries (the paper's Fig. 6a).

    Args:
        pattern: attention; rows of real (non-padding) queries sum to 1.
        masked: True for queries still masked.
        labels: labels of the positions.
    """
    if not len(pattern) == len(masked) or not pattern.shape[1] == len(labels):
        raise SettingError(
            f"masked needs one entry per query and labels one per key; got {len(masked)} and {len(labels)} for a "
            f"pattern of {pattern.shape[0]} × {pattern.shape[1]}."
        )
    ax = axes_or_new(ax, (9, 6))
    order = np.concatenate([np.flatnonzero(~masked), np.flatnonzero(masked)])
    image = ax.imshow(pattern[order], aspect="auto", cmap=dark_colors(), interpolation="nearest", vmin=0)
    split = int((~masked).sum()) - 0.5
    ax.axhline(split, color="white", linewidth=1.2)
    token_ticks(ax.xaxis, labels, pattern.sum(axis=0))
    token_ticks(ax.yaxis, [labels[place] for place in order])
    ax.set(xlabel="key", ylabel=f"query: unmasked above the line, masked ({BLANK}) below")
    ax.figure.colorbar(image, ax=ax, label=wrapped("attention of the query to the key"))
    return ax
