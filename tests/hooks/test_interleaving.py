"""Only one module uses nnsight's internals, and importing it does not break other imports."""

import ast
import subprocess
import sys

import pytest
from contracts import FILES, HOME, ROOT, uses


def test_no_other_file_uses_nnsights_internals():
    found = {str(file.relative_to(ROOT)): uses(file.read_text()) for file in FILES if file != HOME}
    assert {file: names for file, names in found.items() if names} == {}
    assert len(found) > 200


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from nnsight.intervention.interleaver import Mediator", {"Mediator"}),
        ("from nnsight import NNsight, save", set()),
        ("from nnsight import intervention", {"intervention"}),
        ("def f():\n    import nnsight.tracing.util", {"nnsight.tracing.util"}),
        ("if TYPE_CHECKING:\n    from nnsight.intervention.tracer import InterleavingTracer", {"InterleavingTracer"}),
        ("model._edits", {"_edits"}),
        ("getattr(model, '_child_map')", {"_child_map"}),
        ("class A:\n    def _batch_size(self): ...", {"_batch_size"}),
        ("point.watch.handover.running", set()),
    ],
)
def test_the_scan_finds_each_kind_of_use(text, found):
    assert uses(text) == found


def test_the_module_uses_nnsights_internals_and_only_errors_and_turns_from_sinklens():
    assert {"Mediator", "_edits", "mount"} <= uses(HOME.read_text())
    imported = {node.module for node in ast.walk(ast.parse(HOME.read_text())) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module.startswith("sinklens")} == {
        "sinklens.errors",
        "sinklens.hooks.turn",
    }


SAVES = "import nnsight; assert vars(object)['save'].__func__ is nnsight.save, 'nnsight has lost its save'"


USES = "import beartype, anyio, anyio.streams.file; anyio.run(anyio.sleep, 0)"


@pytest.mark.extended
@pytest.mark.parametrize(
    "order",
    [
        ["import nnsight", "import sinklens.hooks.interleaving", USES, SAVES],
        [USES, "import sinklens.hooks.interleaving", SAVES],
        ["import sinklens", "sinklens.load('tiny-llada')", USES, SAVES],
    ],
)
def test_libraries_that_save_would_break_work_before_and_after_sinklens_and_nnsight_keeps_its_save(order):
    done = subprocess.run([sys.executable, "-c", "\n".join(order)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    ("use", "error"),
    [("import beartype", "unhashable type"), ("from anyio.abc import SocketAttribute", "missing its type annotation")],
)
def test_without_sinklens_importing_nnsight_first_breaks_them(use, error):
    """The reason for the order of imports in interleaving.py; when this test fails, remove that workaround."""
    done = subprocess.run([sys.executable, "-c", f"import nnsight\n{use}"], capture_output=True, text=True, check=False)
    assert error in done.stderr
