"""Check that sinklens works on this machine's accelerator, and how fast: ``python -m sinklens.devices.check``.

The check consists of *parts*. Each runs in a separate process with a time limit, so that a crash or a hang costs only
one part. A part makes *claims*; the outcome of each is a `Finding`.
"""

from sinklens.devices.findings import Finding
from sinklens.devices.parts import PARTS, Part

__all__ = ["PARTS", "Finding", "Part"]
