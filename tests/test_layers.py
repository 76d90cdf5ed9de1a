"""The floors of the house: a file imports from its own floor or a lower one only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = [
    ("errors", "memory", "writing", "versions"),
    ("hooks", "checkpoints"),
    ("sampling", "sinks", "tasks"),
    ("views", "selfcheck", "model", "progress", "flags"),
    ("generation", "denoising", "steps", "tracing", "interventions"),
    ("zoo", "evaluation"),
    ("analyses", "devices"),
    ("cli",),
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
APART = {("sampling", "sinks"), ("sinks", "sampling")}  # on one floor, and yet they never meet
DOORS = {("sinks", "views")}  # SinkTrack.plot, the one way from a track to a picture


def imports(file):
    """First part below sinklens of every import that runs; imports for type checkers do not count."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "sinklens" else [f"sinklens.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "sinklens" and len(parts) > 1 and parts[1] in FLOOR:
                yield parts[1]


FILES = sorted([*ROOT.glob("hooks/*.py"), *ROOT.glob("analyses/*.py"), *ROOT.glob("sinklens/**/*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_imports_from_a_higher_floor(file):
    parts = file.relative_to(ROOT).parts
    here = parts[0] if parts[0] in ("hooks", "analyses") else parts[1].removesuffix(".py")
    if here == "__init__":
        return
    assert here in FLOOR, f"{here} has no floor yet; say where it belongs"
    for there in imports(file):
        if (here, there) in DOORS:
            continue
        assert FLOOR[there] <= FLOOR[here], f"{here} imports from the higher floor of {there}"
        assert (here, there) not in APART
