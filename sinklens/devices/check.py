"""Check in under ten minutes that sinklens works on this machine's accelerator.

    python -m sinklens.devices.check [--out FILE] [--device D] [--minutes N] [--conformance FOLDER] [-m PARTS] …

Runs pytest, with any of its arguments, on the tests beside this file and with their pytest.ini. The exit status is 1 if
a test about correctness failed. Without an accelerator the tests run on the CPU, at small sizes, and report what they
could not check.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run the tests and return the exit status."""
    missing = [name for name, module in (("pytest", "pytest"), ("pytest-xdist", "xdist")) if find_spec(module) is None]
    if missing:
        print(f"The check needs {' and '.join(missing)}: pip install 'sinklens[check]'.", file=sys.stderr)
        return 2
    import pytest

    return int(pytest.main([str(Path(__file__).parent), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
