"""Execute the tutorials: write each tutorials/*.py as a notebook next to its source.

    python scripts/make_notebooks.py            notebooks whose source cells changed
    python scripts/make_notebooks.py --all      all, e.g. after the package changed
    python scripts/make_notebooks.py 02 03      those whose names begin with these

Edit only the sources, which are in jupytext's percent format. Each runs from top to bottom in a fresh kernel of this
Python, in an empty folder, without access to the Hub, and its notebook is written only if no cell failed. Whatever
differs between machines or runs is removed: times, random cell ids, addresses, paths.

Caveat: a cell that prints a measured time changes the notebook with each run.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "tutorials"
LIMIT = 3_000_000  # bytes per notebook; a view of attention heads takes 600,000
SECONDS = 600  # time limit of one cell, also on a busy machine
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
}
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
CELL_FILE = re.compile(r"\S*ipykernel_\d+[/\\]\d+\.py")


def read_source(source: Path) -> NotebookNode:
    """Read a source as a notebook without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def is_current(source: Path) -> bool:
    """Whether the notebook next to `source` has the same cells, all executed."""
    target = source.with_suffix(".ipynb")
    if not target.is_file():
        return False
    written, wanted = nbformat.read(target, as_version=4), read_source(source)
    same = [(cell.cell_type, cell.source) for cell in written.cells] == [(c.cell_type, c.source) for c in wanted.cells]
    return same and all(cell.execution_count for cell in written.cells if cell.cell_type == "code")


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in a fresh kernel of this Python, with a working directory in `folder`.

    Raises:
        CellExecutionError: a cell failed.
    """
    kernels = KernelSpecManager(kernel_dirs=[])  # ignore installed kernels, which may use another Python
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / ".ipython")}
    quiet["PYTHONWARNINGS"] = "ignore:IProgress not found"  # from tqdm, if ipywidgets are not installed
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | quiet
    work = folder / "work"
    work.mkdir()
    client = NotebookClient(
        notebook, km=manager, timeout=SECONDS, record_timing=False, coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"], resources={"metadata": {"path": str(work)}},
    )  # fmt: skip
    client.owns_km = True  # ends the kernel with the notebook
    client.execute(env=environment)


def cleaned(text: str, folders: dict[str, str]) -> str:
    """`text` without addresses, and with each of this machine's `folders` replaced by its value."""
    text = ADDRESS.sub("", text)
    if "ipykernel_" in text:  # the regex is slow on a page of half a million characters without a space
        text = CELL_FILE.sub("cell", text)
    for folder, replacement in folders.items():
        text = text.replace(folder, replacement)
    return text


def clean(value: Any, folders: dict[str, str]) -> Any:
    """Apply `cleaned` to every text in an output; images stay unchanged."""
    if isinstance(value, str):
        return cleaned(value, folders)
    if isinstance(value, list):
        return [clean(entry, folders) for entry in value]
    if isinstance(value, dict):
        for name in value:
            value[name] = value[name] if name.startswith("image/") else clean(value[name], folders)
    return value


def make(source: Path) -> Path:
    """Execute `source` and write its notebook; nothing is written if a cell fails or the result is too large."""
    notebook = read_source(source)
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        execute(notebook, Path(folder))
        work = {str(Path(folder) / "work"), str(Path(folder).resolve() / "work")}
        places = {f"{place}/": "" for place in work} | dict.fromkeys(work, ".")
        places |= {f"{ROOT}/": "", f"{Path.home()}/": "~/"}
        for cell in notebook.cells:
            cell.metadata = nbformat.from_dict({})
            if cell.cell_type == "code":
                cell.outputs = clean(cell.outputs, places)
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel added its version
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=4) + "\n"
    if len(text.encode()) > LIMIT:
        sys.exit(
            f"{source.stem} is {len(text.encode()):,} bytes, above the limit of {LIMIT:,}: show fewer or smaller views"
        )
    target = source.with_suffix(".ipynb")
    part = target.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)
    return target


def main(arguments: list[str]) -> int:
    """Return 0 if every selected notebook exists and is current."""
    parser = argparse.ArgumentParser(description="Execute the tutorials and write their notebooks.")
    parser.add_argument("names", nargs="*", help="prefixes of tutorial names; by default all tutorials")
    parser.add_argument("--all", action="store_true", help="also tutorials whose cells did not change")
    options = parser.parse_args(arguments)
    sources = [path for path in sorted(TUTORIALS.glob("*.py")) if path.name.startswith(tuple(options.names) or "")]
    if not sources:
        parser.error(f"no tutorial in {TUTORIALS} has a name that begins with {' or '.join(options.names)}")
    failed = 0
    for source in sources:
        if not options.all and is_current(source):
            print(f"{source.stem}: current")
            continue
        begun = time.perf_counter()
        try:
            target = make(source)
        except CellExecutionError as error:
            failed += 1
            print(f"{source.stem}: a cell failed, so no notebook was written\n{error}", file=sys.stderr)
            continue
        print(f"{source.stem}: {target.stat().st_size / 1e6:.2f} MB, {time.perf_counter() - begun:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
