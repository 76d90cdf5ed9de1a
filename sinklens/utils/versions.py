"""Package versions: those that sinklens needs, and those that every record stores with its result.

Reading a version parses the package's metadata, which takes milliseconds; each process reads it once.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from sinklens.errors import SinklensError, require


@cache
def version_of(name: str) -> str:
    """The installed version; of sinklens in a folder that was copied without an installation, "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        require(name == "sinklens", f"the package {name} is not installed; run pip install {name}.", SinklensError)
        return "not installed"


def versions(*packages: str) -> dict[str, str]:
    """Package -> version, as installed when it was first looked up."""
    return {name: version_of(name) for name in packages}


def check_versions(*packages: str) -> None:
    """Check that the installed versions of `packages` are among those that sinklens declares as its requirements.

    pip replaces an installed package if another package asks for a different version.

    Raises:
        SinklensError: a package has another version.
    """
    from packaging.requirements import Requirement

    if version_of("sinklens") == "not installed":
        return
    needed = {needs.name: needs.specifier for needs in map(Requirement, requires("sinklens") or ())}
    for name in packages:
        installed = version_of(name)
        require(
            needed[name].contains(installed, prereleases=True),
            f"sinklens needs {name} {needed[name]}, but version {installed} is installed; installing another "
            f'package may have replaced it. Run pip install "{name}{needed[name]}", in an environment of its own '
            f"if the other package needs {name} {installed}.",
            SinklensError,
        )
