"""What draws a track. This package holds data and measures; `sinklens.views` draws, and is registered here.

`SinkTrack.plot` calls the function that `use` was given; the package registers `sinklens.views.sink_map` when it is
imported, without importing the drawing code before a plot is made.
"""

from collections.abc import Callable
from typing import Any

Plotter = Callable[..., Any]
_registered: list[Plotter] = []


def use(plotter: Plotter) -> None:
    """Draw tracks with `plotter(track, layer=, head=, batch=, ax=)` from now on."""
    _registered[:] = [plotter]


def plotter() -> Plotter:
    """The function that draws a track.

    Raises:
        LookupError: none was registered.
    """
    if not _registered:
        raise LookupError("no plotter is registered; import sinklens, or call sinklens.sinks.plotting.use(function).")
    return _registered[0]
