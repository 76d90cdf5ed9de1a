"""Pictures: figures of sink tracks (figures.py) and the terminal view of a run (terminal.py)."""

from sinklens.views.figures import most_moving_head, sink_map, sink_path, sink_paths

__all__ = ["most_moving_head", "sink_map", "sink_path", "sink_paths"]
