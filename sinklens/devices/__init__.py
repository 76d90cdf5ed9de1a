"""Whether sinklens works on the accelerator of this machine, and how fast: ``python -m sinklens.devices.check``.

The check is cut into *parts*, each in a process of its own with a time limit, so that a crash or a hang costs one part.
A part makes *claims*, and what came of each is a `Finding`.
"""

from sinklens.devices.findings import Finding
from sinklens.devices.parts import PARTS, Part

__all__ = ["PARTS", "Finding", "Part"]
