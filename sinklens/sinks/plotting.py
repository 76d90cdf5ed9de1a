"""The plotter of a track. This package holds data and measures; `sinklens.views` draws them, and is registered here.

`SinkTrack.plot` calls the function that was passed to `use`. On import, sinklens registers `sinklens.views.sink_map`
without importing the drawing code, which is loaded with the first plot.
"""

from collections.abc import Callable
from typing import Any

Plotter = Callable[..., Any]
_registered: list[Plotter] = []


def use(plotter: Plotter) -> None:
    """Register `plotter(track, layer=, head=, batch=, ax=)` as the function that draws tracks."""
    _registered[:] = [plotter]


def plotter() -> Plotter:
    """The function that draws a track.

    Raises:
        LookupError: no plotter is registered.
    """
    if not _registered:
        raise LookupError("no plotter is registered; import sinklens, or call sinklens.sinks.plotting.use(function).")
    return _registered[0]
