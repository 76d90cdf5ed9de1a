"""Type-check sinklens as it is installed, with hooks/ and analyses/ inside the package, and what imports it.

mypy cannot check the three folders in place: by path they would be three packages, two with the wrong name. Instead, a
temporary folder contains a `sinklens/` of links, including `hooks` and `analyses`, and mypy checks that package;
beside it are links to training/ and benchmarks/, without the scripts of benchmarks/papers/, which the tests run.

Pitfall: mypy silently skips a folder that it does not find (a missing `__init__.py`, a new top-level folder), so the
number of files that it reports has to equal the number of existing files.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sinklens", "hooks", "analyses")
BESIDE = ("training", "benchmarks")
CHECKED = re.compile(r"(?:no issues found in|checked) (\d+) source files?")


def link_tree(into: Path) -> None:
    """Create `into`/sinklens out of links, with the layout that setuptools would install."""
    package = into / "sinklens"
    package.mkdir()
    for entry in (ROOT / "sinklens").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for folder in FOLDERS[1:]:
        (package / folder).symlink_to(ROOT / folder)


def run_mypy(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run mypy on the package in `tree`; its cache stays in the repository."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--no-namespace-packages"]
    command += [word for package in ("sinklens", *BESIDE) for word in ("--package", package)]
    environment = {**os.environ, "MYPYPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def as_in_repository(text: str) -> str:
    """mypy's messages with paths as in the repository."""
    return re.sub(r"^sinklens/(hooks|analyses)/", r"\1/", text, flags=re.MULTILINE)


def main() -> int:
    """Return 0 if mypy finds no errors and checked every file."""
    expected = sum(1 for folder in FOLDERS for _ in (ROOT / folder).rglob("*.py"))
    expected += sum(1 for folder in BESIDE for _ in (ROOT / folder).glob("*.py"))
    with tempfile.TemporaryDirectory() as scratch:
        link_tree(Path(scratch))
        for folder in BESIDE:
            (Path(scratch) / folder).symlink_to(ROOT / folder)
        result = run_mypy(Path(scratch))
    print(as_in_repository(result.stdout), end="")
    print(result.stderr, end="", file=sys.stderr)
    counted = CHECKED.search(result.stdout)
    seen = int(counted.group(1)) if counted else 0
    if seen != expected:
        print(f"mypy checked {seen} of {expected} files in {', '.join(FOLDERS + BESIDE)}: is an __init__.py missing?")
        return 1
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
