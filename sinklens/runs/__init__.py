"""Runs: a run as a block (`trace`), without one (`generate`), one made elsewhere (`replay`), and what they share."""

from sinklens.runs.intervention import Intervention, RunContext
from sinklens.runs.recordings import (
    RecordedCanvases,
    from_history,
    from_sequences,
    read_canvases,
    recorded_canvases,
    replay,
    write_canvases,
)
from sinklens.runs.result import Answer, Generation
from sinklens.runs.session import Trace, generate, trace
from sinklens.runs.steps import VisitedSteps

__all__ = [
    "Answer",
    "Generation",
    "Intervention",
    "RecordedCanvases",
    "RunContext",
    "Trace",
    "VisitedSteps",
    "from_history",
    "from_sequences",
    "generate",
    "read_canvases",
    "recorded_canvases",
    "replay",
    "trace",
    "write_canvases",
]
