"""Read the API reference from the sources, without importing them.

The sources are in three folders, two of which have other names once installed. A temporary folder therefore gets
links that lay them out as setuptools would, and mkdocstrings reads there. Docstrings are in Google's format, with two
conventions of this project: several names may share an entry (``layers, heads: numbers``), and examples have no
heading. `Conventions` rewrites both into standard Google format.

Limitation: `mkdocs serve` creates the links once; a new file at the top of sinklens/ needs a restart.
"""

import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parents[1]
ENTRY = re.compile(r"^( +)([*\w]+(?:, [*\w]+)+): (.*(?:\n\1 +.*)*)", flags=re.MULTILINE)
SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n?|\n(?=\1 ))*)", flags=re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", flags=re.MULTILINE)
_scratch: list[tempfile.TemporaryDirectory[str]] = []


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Make mkdocstrings read the links."""
    _scratch.append(tempfile.TemporaryDirectory())
    _link_tree(Path(_scratch[-1].name))
    config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})["paths"] = [_scratch[-1].name]
    return config


def on_shutdown() -> None:
    """Remove the links."""
    while _scratch:
        _scratch.pop().cleanup()


def _link_tree(into: Path) -> None:
    """Lay the package out in `into`, as the type check does."""
    spec = importlib.util.spec_from_file_location("check_types", ROOT / "scripts" / "check_types.py")
    assert spec is not None, "the file is part of the repository"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.link_tree(into)


class Conventions(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        """Rewrite the docstring of one object; an alias shows its target's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """A docstring with one entry per name and fenced examples.

    >>> plain("Args:\\n    a, b: numbers\\n        of things.\\n")
    'Args:\\n    a: numbers\\n        of things.\\n    b: numbers\\n        of things.\\n'
    """
    text = SECTION.sub(lambda section: ENTRY.sub(_apart, section.group()), text)
    return EXAMPLE.sub(lambda example: f"```pycon\n{example.group()}\n```", text)


def _apart(entry: re.Match[str]) -> str:
    indent, names, meaning = entry.groups()
    return "\n".join(f"{indent}{name}: {meaning}" for name in names.split(", "))
