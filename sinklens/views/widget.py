"""The report of a run as a Jupyter widget: what is clicked on the canvas or in a pattern comes back to Python.

The widget (anywidget, of the extra "notebook") shows the document of `report` in a frame, which may run its own scripts
and nothing else.

Limitation: a pattern whose positions are merged into blocks, to fit the size of the page, has no single query and key,
so a click in it selects nothing.
"""

from typing import TYPE_CHECKING, Any

from sinklens.errors import SettingError
from sinklens.utils.arguments import checked
from sinklens.views.html import asset
from sinklens.views.report import build, material

if TYPE_CHECKING:
    from sinklens.runs import Trace
    from sinklens.runs.result import Generation


@checked
def run_widget(run: "Generation | Trace", *, row: int = 0, budget_mb: float | int = 15.0, height: int = 900) -> Any:
    """The report as a widget, with the last click in `selection`.

        widget = views.run_widget(run)
        widget                                              # in a cell of its own
        widget.selection                                    # {"step": 4, "layer": 1, "head": 2, "query": 17, "key": 3}
        widget.observe(lambda change: print(change.new), "selection")

    A click in a pattern selects its step, layer, head, query and key; one on a token of the canvas the step, the layer
    and head shown (None for a mean), and the key. Positions are columns of the run's canvas. `selection` is empty until
    the first click.

    Args:
        run, row, budget_mb: as in `report`.
        height: of the frame, in pixels.

    Raises:
        SettingError: anywidget is not installed; or as `report`.
        TrackError: as `report`.
    """
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise SettingError(f"a widget needs anywidget ({error}): pip install 'sinklens[notebook]'.") from error

    class RunWidget(anywidget.AnyWidget):
        _esm = asset("widget.js")
        document = traitlets.Unicode().tag(sync=True)
        height = traitlets.Int().tag(sync=True)
        selection = traitlets.Dict().tag(sync=True)

    return RunWidget(document=build(material(run, row), budget_mb), height=height)
