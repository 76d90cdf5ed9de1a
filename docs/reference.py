"""Read the API reference from the sources, without importing them.

The sources are in three folders, two of which have other names once installed. A temporary folder therefore gets
links that lay them out as setuptools would, and mkdocstrings reads there. Docstrings are in Google's format, with two
conventions of this project: several names may share an entry (``layers, heads: numbers``), and examples have no
heading. `Conventions` rewrites both into standard Google format.

The page of the commands ends with the help of each. Each page of docs/api begins with a table of its names and the
first lines of their docstrings: the members that its mkdocstrings directives (``::: sinklens.sinks`` with
``members``) list, all public functions and classes of a module without listed members, or the single object named.

Limitation: `mkdocs serve` creates the links once; a new file at the top of sinklens/ needs a restart.
"""

import importlib.util
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import yaml
from mkdocs.plugins import event_priority

from sinklens.cli.app import build

ROOT = Path(__file__).resolve().parents[1]
ENTRY = re.compile(r"^( +)([*\w]+(?:, [*\w]+)+): (.*(?:\n\1 +.*)*)", flags=re.MULTILINE)
SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n?|\n(?=\1 ))*)", flags=re.MULTILINE)
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", flags=re.MULTILINE)
SHAPES = {"{": "dict", "[": "list", "(": "tuple"}
DIV = '<div class="names" markdown>'  # on a narrow screen, docs/assets/sinklens.css sets the cells below each other
CODE = re.compile(r"<pre.*?</pre>|<code.*?</code>", flags=re.DOTALL)
BREAK = re.compile(
    r"""(?: (?<=[^\W_]{2}) _ (?=[^\W_]{2})
          | (?<=[\w\])}"'])  (?: [/(=] | (?<!\d)[.,:] | [.,:](?!\d) )  (?=[\w{\["'])  # outside numbers
        ) (?![^<>]*>)  # outside tags""",
    flags=re.VERBOSE,
)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", flags=re.MULTILINE)
_scratch: list[tempfile.TemporaryDirectory[str]] = []


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Make mkdocstrings read the links."""
    _scratch.append(tempfile.TemporaryDirectory())
    _link_tree(Path(_scratch[-1].name))
    config.plugins["mkdocstrings"].config.handlers.setdefault("python", {})["paths"] = [_scratch[-1].name]
    return config


def on_page_content(html: str, **kwargs: Any) -> str:
    """Let code in text break after a dot, a slash, an underscore and the like, and nowhere else within a word."""
    return CODE.sub(lambda code: code[0] if code[0].startswith("<pre") else BREAK.sub(r"\g<0><wbr>", code[0]), html)


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Insert the table of names below the introduction of a page of the reference, or every command's help."""
    if page.file.src_uri == "commands.md":
        return f"{markdown}\n{_commands()}"
    first = DIRECTIVE.search(markdown) if page.file.src_uri.startswith("api/") else None
    if first is None:
        return markdown
    lines = [f"| [`{name.removeprefix('sinklens.')}`][{name}] | {what} |" for name, what in _rows(markdown)]
    table = "\n".join([DIV, "", "| name | what it is |", "|---|---|", *lines, "", "</div>"])
    return f"{markdown[: first.start()]}{table}\n\n{markdown[first.start() :]}"


def _commands() -> str:
    """The help of every command, below a heading each."""
    text = build().generate_docs()
    return text[text.index("\n## sinklens ") :]


def _rows(text: str) -> Iterator[tuple[str, str]]:
    """Full names and the first lines of their docstrings, in the page's order."""
    for target, options in DIRECTIVE.findall(text):
        members = (yaml.safe_load(options) or {}).get("options", {}).get("members") if options else None
        found = _object(target)
        if members is None and found.is_module:
            members = [name for name, one in found.members.items() if _is_public(name, one)]
        names = [f"{target}.{name}" for name in members] if members else [target]
        yield from ((name, summary(_object(name))) for name in names)


@cache
def _package() -> Any:
    return griffe.load("sinklens", search_paths=[_scratch[-1].name], resolve_aliases=True, try_relative_path=False)


def _object(path: str) -> Any:
    found = _package() if path == "sinklens" else _package()[path.removeprefix("sinklens.")]
    return found.final_target if found.is_alias else found


def _is_public(name: str, one: Any) -> bool:
    return not name.startswith("_") and not one.is_alias and (one.is_function or one.is_class)


def summary(one: Any) -> str:
    """The first line of an object's docstring as a Markdown cell; for a constant without one, its value or type."""
    if one.docstring is not None:
        return one.docstring.value.strip().splitlines()[0].replace("``", "`").replace("|", "\\|")
    value = " ".join(str(one.value).split())
    shown = value if len(value) <= 100 else str(one.annotation or SHAPES.get(value[0], "…"))
    return "`" + shown.replace("|", "\\|") + "`"


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
