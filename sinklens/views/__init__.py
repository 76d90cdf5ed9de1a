"""Views of runs: `report` (one HTML file), `attention` (CircuitsVis heads), figures, and the terminal view."""

from sinklens.sinks.drawing import sink_map
from sinklens.sinks.palette import color_map
from sinklens.views.attention import attention
from sinklens.views.charts import (
    accuracy_curves,
    curves,
    interval_dots,
)
from sinklens.views.effects import effect_map, writer_bars
from sinklens.views.feature_html import feature_page
from sinklens.views.figures import (
    most_moving_head,
    panels,
    sink_path,
    sink_paths,
    stillest_head,
)
from sinklens.views.patterns import pattern_at, pattern_map
from sinklens.views.report import report
from sinklens.views.widget import run_widget

__all__ = [
    "accuracy_curves",
    "attention",
    "color_map",
    "curves",
    "effect_map",
    "feature_page",
    "interval_dots",
    "most_moving_head",
    "panels",
    "pattern_at",
    "pattern_map",
    "report",
    "run_widget",
    "sink_map",
    "sink_path",
    "sink_paths",
    "stillest_head",
    "writer_bars",
]
