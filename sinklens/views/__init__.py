"""Views of runs: `report` (one HTML file), `attention` (CircuitsVis heads), figures, and the terminal view."""

from sinklens.sinks.drawing import sink_map
from sinklens.views.attention import attention
from sinklens.views.charts import (
    accuracy_by_speed,
    accuracy_curves,
    curves,
    frequency_bars,
    interval_dots,
    layer_head_map,
    score_histogram,
    share_bars,
    threshold_curve,
)
from sinklens.views.effects import effect_map
from sinklens.views.feature_html import feature_page
from sinklens.views.figures import (
    canvas_map,
    group_profiles,
    grouped_pattern,
    most_moving_head,
    panels,
    sink_life,
    sink_path,
    sink_paths,
    stillest_head,
)
from sinklens.views.patterns import pattern_at
from sinklens.views.report import report
from sinklens.views.writers import writer_bars

__all__ = [
    "accuracy_by_speed",
    "accuracy_curves",
    "attention",
    "canvas_map",
    "curves",
    "effect_map",
    "feature_page",
    "frequency_bars",
    "group_profiles",
    "grouped_pattern",
    "interval_dots",
    "layer_head_map",
    "most_moving_head",
    "panels",
    "pattern_at",
    "report",
    "score_histogram",
    "share_bars",
    "sink_life",
    "sink_map",
    "sink_path",
    "sink_paths",
    "stillest_head",
    "threshold_curve",
    "writer_bars",
]
