"""Open a denoising run as a block (`trace`), or run one without a block (`generate`); `replay` opens one made elsewhere."""

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
from sinklens.tracing.steps import Steps

__all__ = [
    "RecordedCanvases",
    "Steps",
    "Trace",
    "from_history",
    "from_sequences",
    "generate",
    "read_canvases",
    "recorded_canvases",
    "replay",
    "trace",
    "write_canvases",
]
