"""Write the table of names at the top of each docs/api page, so that the pages are readable without building the site.

The names come from the page's mkdocstrings directives (``::: sinklens.sinks`` with its ``members``): the listed
members, all public functions and classes of a module without listed members, or the single object named. Each
name links to its entry below the table; next to it is the first line of its docstring, read from the sources without
importing them. `make docs` runs this before the build; tests/test_docs.py compares the result.

Limitation: a name that no directive mentions does not appear in any table.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import yaml
from check_types import ROOT, link_tree

PAGES = ROOT / "docs" / "api"
BEGIN, END = "<!-- names: written by scripts/api_tables.py -->", "<!-- end of names -->"
DIV = '<div class="names" markdown>'  # on a narrow screen, docs/assets/sinklens.css sets the cells below each other
SHAPES = {"{": "dict", "[": "list", "(": "tuple"}
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", flags=re.MULTILINE)


def load() -> Any:
    """Load the package with griffe."""
    with tempfile.TemporaryDirectory() as scratch:
        link_tree(Path(scratch))
        return griffe.load("sinklens", search_paths=[scratch], resolve_aliases=True, try_relative_path=False)


def with_table(text: str, package: Any) -> str:
    """A page's text with its table inserted below the heading and the introduction."""
    bare = re.sub(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", "", text, flags=re.DOTALL)
    first = DIRECTIVE.search(bare)
    if first is None:
        return bare
    lines = [f"| [`{name.removeprefix('sinklens.')}`][{name}] | {what} |" for name, what in _rows(bare, package)]
    table = "\n".join([BEGIN, "", DIV, "", "| name | what it is |", "|---|---|", *lines, "", "</div>", "", END])
    return f"{bare[: first.start()]}{table}\n\n{bare[first.start() :]}"


def _rows(text: str, package: Any) -> Iterator[tuple[str, str]]:
    """Full names and the first lines of their docstrings, in the page's order."""
    for target, options in DIRECTIVE.findall(text):
        members = (yaml.safe_load(options) or {}).get("options", {}).get("members") if options else None
        found = _object(package, target)
        if members is None and found.is_module:
            members = [name for name, one in found.members.items() if _is_public(name, one)]
        names = [target] if not members else [f"{target}.{name}" for name in members]
        yield from ((name, summary(_object(package, name))) for name in names)


def _object(package: Any, path: str) -> Any:
    found = package if path == "sinklens" else package[path.removeprefix("sinklens.")]
    return found.final_target if found.is_alias else found


def _is_public(name: str, one: Any) -> bool:
    return not name.startswith("_") and not one.is_alias and (one.is_function or one.is_class)


def summary(one: Any) -> str:
    """The first line of an object's docstring as a Markdown cell; for a constant without one, its value or type."""
    if one.docstring is not None:
        line = one.docstring.value.strip().splitlines()[0]
        return line.replace("``", "`").replace("|", "\\|")
    value = " ".join(str(one.value).split())
    shown = value if len(value) <= 100 else str(one.annotation or SHAPES.get(value[0], "…"))
    return "`" + shown.replace("|", "\\|") + "`"


def main() -> int:
    """Rewrite the pages and print those that changed."""
    package = load()
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        if (written := with_table(text, package)) != text:
            page.write_text(written)
            print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
