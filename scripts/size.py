"""Print how large the project is: statements by folder, exported names, words of documentation.

A statement is a node ``ast.stmt`` that is neither an import nor a docstring, so longer lines save nothing. `--depth 2`
splits the folders further. An exported name is an entry of the ``__all__`` of sinklens or one of its rooms, the
packages of sinklens/, hooks/ and analyses/. Words are those that `wc -w` counts in docs/**/*.md.

Limitation: a lambda or a comprehension counts as part of its statement, so code can be moved into expressions unseen.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sinklens", "hooks", "analyses", "training", "tests", "benchmarks", "scripts", "tutorials")
PACKAGES = FOLDERS[:3]


def statements(tree: ast.AST) -> int:
    """The number of statements in a module other than imports and docstrings."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) and not _is_text(node) for node in found)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def exported(tree: ast.Module) -> list[str]:
    """The names in a module's ``__all__``."""
    found = (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None)
    values = [node.value for node in found if "__all__" in ast.unparse(node).partition("=")[0]]
    return [name for value in values for name in ast.literal_eval(value)]


def measure(depth: int) -> tuple[Counter[str], dict[str, list[str]]]:
    """Statements by folder of at most `depth` parts, and exported names by package."""
    sizes: Counter[str] = Counter()
    names = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree, path = ast.parse(file.read_text()), file.relative_to(ROOT)
            sizes["/".join(path.parts[: min(depth, len(path.parts) - 1)])] += statements(tree)
            if folder in PACKAGES and file.name == "__init__.py":
                names[path.parent.as_posix()] = exported(tree)
    return sizes, names


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=1, help="parts of the folders' paths (default: 1)")
    sizes, names = measure(parser.parse_args().depth)
    for folder, number in sorted(sizes.items()):
        print(f"{number:7,} statements  {folder}/")
    library = sum(number for folder, number in sizes.items() if folder.split("/")[0] in ("sinklens", "hooks"))
    print(f"{library:7,} statements  sinklens/ + hooks/")
    for package, listed in sorted(names.items()):
        print(f"{len(listed):7,} names       {package}/")
    print(f"{sum(map(len, names.values())):7,} names       in all")
    print(f"{sum(len(page.read_text().split()) for page in (ROOT / 'docs').rglob('*.md')):7,} words       docs/")


if __name__ == "__main__":
    main()
