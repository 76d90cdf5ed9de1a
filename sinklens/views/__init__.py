"""Views of runs: `report` (one HTML file), `attention` (CircuitsVis heads), figures, and the terminal view."""

from sinklens.sinks.drawing import sink_map
from sinklens.views.attention import attention
from sinklens.views.charts import (
    accuracy_by_speed,
    accuracy_curves,
    curves,
    interval_dots,
    layer_head_map,
)
from sinklens.views.effects import effect_map, writer_bars
from sinklens.views.feature_html import feature_page
from sinklens.views.figures import (
    canvas_map,
    grouped_pattern,
    most_moving_head,
    panels,
    sink_path,
    sink_paths,
    stillest_head,
)
from sinklens.views.patterns import pattern_at
from sinklens.views.report import report

__all__ = [
    "accuracy_by_speed",
    "accuracy_curves",
    "attention",
    "canvas_map",
    "curves",
    "effect_map",
    "feature_page",
    "grouped_pattern",
    "interval_dots",
    "layer_head_map",
    "most_moving_head",
    "panels",
    "pattern_at",
    "report",
    "sink_map",
    "sink_path",
    "sink_paths",
    "stillest_head",
    "writer_bars",
]
