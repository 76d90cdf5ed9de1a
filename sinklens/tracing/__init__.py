"""Open a denoising run as a block (`trace`), or run one without a block (`generate`)."""

from sinklens.tracing.session import Trace, generate, trace
from sinklens.tracing.steps import VisitedSteps

__all__ = ["Trace", "VisitedSteps", "generate", "trace"]
