"""What sinklens uses of the inside of other libraries, and what a contract test says when it has changed."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "hooks" / "interleaving.py"
FILES = sorted([*ROOT.glob("hooks/**/*.py"), *ROOT.glob("analyses/**/*.py"), *ROOT.glob("sinklens/**/*.py")])
PUBLIC = {"NNsight", "save", "Envoy", "LanguageModel", "TransformersModel"}
INSIDE = {  # nnsight's classes and attributes, but for those that others use as well; imports are found by their module
    "Mediator", "Interleaver", "Batcher", "InterleavingTracer", "Controller", "interleaver", "interleave",
    "interleaving", "mediator", "mediators", "observers", "occurrence", "pending", "parked", "batch_group",
    "counts_at_start",
    "_edits", "_child_map", "_module", "_children", "_batch", "_batch_size", "_batcher_class", "lcls",
}  # fmt: skip


def uses(text: str) -> set[str]:
    """What a source uses of nnsight's inside: imports below ``nnsight.``, and attributes and methods of its names."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nnsight":
            found |= {alias.name for alias in node.names} - (PUBLIC if node.module == "nnsight" else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("nnsight.")}
        elif isinstance(node, ast.Attribute) and node.attr in INSIDE:
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and node.name in INSIDE:
            found.add(node.name)
        elif isinstance(node, ast.Constant) and node.value in INSIDE:  # getattr(model, "_module")
            found.add(node.value)
    return found


@contextmanager
def relied_on(library: str, what: str) -> Iterator[None]:
    """Fail with a sentence that names `library`, its version and `what` no longer holds, whatever goes wrong inside."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 — each kind of failure means the same
        pytest.fail(f"{library} {version(library)}: {what} no longer holds ({type(error).__name__}: {error}).")
