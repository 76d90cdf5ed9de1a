"""Every tutorial runs as a script, and has an executed notebook with the same cells."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat import NotebookNode

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
SOURCES = sorted(TUTORIALS.glob("*.py"))
MAKE = "make it with: python scripts/make_notebooks.py"
SECONDS = 900  # a tutorial takes one or two minutes of two cores, and a test machine may be busy
MACHINE_PATH = re.compile(r"(?<![\w.~/])/(?:home|root|Users|private|tmp|var|opt|mnt|work|usr)/\w")
SLOW = ("03_ablate_them", "04_heads_and_patches", "07_your_own", "08_to_the_cluster")  # most of a minute each; their
# notebooks are compared in every run
every_tutorial = pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Kind and text of every cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    """Every output of every cell."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(output: NotebookNode) -> list[str]:
    """The text parts of an output."""
    data = output.get("data", {})
    return [output.get("text", ""), *(value for kind, value in data.items() if kind.startswith("text/"))]


@pytest.mark.parametrize(
    "source", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in SOURCES]
)
def test_a_tutorial_runs_as_a_script(source, tmp_path):
    isolated = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(source)], cwd=tmp_path, env={**os.environ, **isolated}, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{source.name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)


@every_tutorial
def test_the_notebook_is_its_source_executed_in_order_without_errors(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert cells(notebook) == cells(jupytext.read(source, fmt="py:percent")), f"{source.stem} has changed; {MAKE}"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert [output.evalue for output in outputs(notebook) if output.output_type == "error"] == []
    shown = [text for output in outputs(notebook) for text in texts(output)]
    assert [text for text in shown if MACHINE_PATH.search(text) or " at 0x" in text] == []
    assert all(cell.id == f"cell-{number}" and not cell.metadata for number, cell in enumerate(notebook.cells))
