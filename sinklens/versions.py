"""Package versions, which every record stores with its result.

Reading a version parses the package's metadata, which takes milliseconds; each process reads it once.
"""

from functools import cache
from importlib.metadata import version

version_of = cache(version)


def versions(*packages: str) -> dict[str, str]:
    """Package -> version, as installed when it was first looked up."""
    return {name: version_of(name) for name in packages}
