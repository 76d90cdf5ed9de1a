"""A figure of who wrote an attention score, from the table of `sinklens.experiments.write_attribution`."""

from typing import TYPE_CHECKING, Literal

import numpy as np

from sinklens.errors import SettingError
from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import colours

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes

WRITER_KINDS = ("embed", "head", "mlp", "bias", "rest")


def writer_bars(
    table: "xr.Dataset",
    side: Literal["key", "query"] = "key",
    *,
    excess: bool = True,
    top: int = 12,
    ax: "Axes | None" = None,
) -> "Axes":
    """Bars of the writers with the largest parts of a score, largest at the top; the other writers are one bar.

    Args:
        side: writers of the key, or of the query.
        excess: split the score minus its mean over the other keys, instead of the score.
        top: number of writers with their own bar.

    Raises:
        SettingError: `side` is not "key" or "query", or `top` is below 1.
    """
    if side not in ("key", "query") or top < 1:
        raise SettingError(f"side must be 'key' or 'query' and top at least 1; got {side!r} and {top}.")
    parts = table[f"from_{side}{'_excess' if excess else ''}"]
    order = np.argsort(-np.abs(parts.to_numpy()))
    kept, others = parts[order[:top]], parts[order[top:]]
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
    ax.set_xlabel("part of the score above the other keys'" if excess else "part of the score")
    where = f"head {place['layer']}.{place['head']}, step {place['step']}, key {place['key']}, {asked}"
    ax.set_title(f"who wrote the {side}: {where}", fontsize="medium")
    return ax
