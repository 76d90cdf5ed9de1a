"""Open a run as a block (`trace`), run one without a block (`generate`), or open one made elsewhere (`replay`)."""

from sinklens.tracing.recordings import (
    RecordedCanvases,
    from_history,
    from_sequences,
    read_canvases,
    recorded_canvases,
    replay,
    write_canvases,
)
from sinklens.tracing.session import Trace, generate, trace
from sinklens.tracing.steps import VisitedSteps

__all__ = [
    "RecordedCanvases",
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
