"""Runs: a run as a block (`trace`), without one (`generate`), one made elsewhere (`replay`), and what they share."""

from sinklens.runs.intervention import Intervention
from sinklens.runs.recordings import (
    from_history,
    read_canvases,
    replay,
    write_canvases,
)
from sinklens.runs.result import Answer, Generation
from sinklens.runs.session import Trace, generate, trace

__all__ = [
    "Answer",
    "Generation",
    "Intervention",
    "Trace",
    "from_history",
    "generate",
    "read_canvases",
    "replay",
    "trace",
    "write_canvases",
]
