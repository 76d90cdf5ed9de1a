"""The versions that a result was made with, which every record keeps.

Reading a package's version parses its metadata, milliseconds each; a process looks once.
"""

from functools import cache
from importlib.metadata import version

version_of = cache(version)


def versions(*packages: str) -> dict[str, str]:
    """Package -> version, as installed when it was first asked for."""
    return {name: version_of(name) for name in packages}
