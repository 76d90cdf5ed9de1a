"""Self-contained HTML documents: styles, scripts and numbers in one file, nothing from a server.

A document is a template of ``page/`` with its parts filled in. Numbers are embedded as inert script elements: JSON with
every ``<`` escaped, and deflated bytes in base64. Its Content-Security-Policy lists the allowed scripts and styles by
their hashes and forbids all fetching, so model text that became markup by mistake could not do anything.

Pitfall: a frame inside a document is subject to the document's policy as well as its own, so the outer policy has to
allow what the frame runs (`PageFiles.allowed`).
"""

import base64
import hashlib
import importlib.resources
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sinklens.errors import SinklensError, require
from sinklens.sinks import palette
from sinklens.utils.escaping import spelled

if TYPE_CHECKING:
    from sinklens.sinks.track import SinkTrack

NOT_YET, MASKED = "", "░"


@dataclass(frozen=True)
class PageFiles:
    """Files of ``page/`` that make a document with CircuitsVis's script, in order.

    Attributes:
        template: name of the HTML file, without extension.
        styles, scripts: files inserted into the template.
        frame: a document shown in a frame of this one.
    """

    template: str
    styles: Sequence[str]
    scripts: Sequence[str]
    frame: "PageFiles | None" = None

    def style(self) -> str:
        """The content of its style element."""
        return "\n".join(asset(name) for name in self.styles)

    def script(self) -> str:
        """The content of its script element."""
        return bundle(asset(name) for name in self.scripts)

    def allowed(self) -> tuple[list[str], list[str]]:
        """The scripts and the styles allowed in it and in its frame, as text."""
        inner: tuple[list[str], list[str]] = ([], []) if self.frame is None else self.frame.allowed()
        return [self.script(), circuitsvis(), *inner[0]], [self.style(), *inner[1]]

    def document(self, **blocks: str) -> str:
        """The complete document; `blocks` fill the template's other placeholders."""
        scripts, styles = self.allowed()
        policy = (
            f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}; "
            f"img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
        filled = {"style": self.style(), "script": self.script(), "policy": policy, **fragments(), **blocks}
        return fill(asset(f"{self.template}.html"), filled)


HEADS = PageFiles("heads", ["theme.css", "heads.css"], ["chunks.js", "heads.js"])
COMPONENTS = ("chunks.js", "dom.js", "run.js", "controls.js", "tokens.js", "figures.js", "attention.js")
REPORT = PageFiles("report", ["theme.css", "report.css"], [*COMPONENTS, "report.js", "start.js"], frame=HEADS)


def bundle(scripts: Iterable[str]) -> str:
    """One script from several, with a scope of its own and the colors of all pictures."""
    return '(() => {\n"use strict";\n' + "\n".join([palette.script(), *scripts]) + "})();"


def fill(template: str, blocks: Mapping[str, str]) -> str:
    """`template` with each ``{{name}}`` replaced by its block, once: a placeholder inside a block stays as it is."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: blocks[place[1]], template)


def fragments() -> dict[str, str]:
    """The parts of a page that show a run: its controls, its figures, and its attention."""
    return {name: asset(f"{name}.html") for name in ("controls", "figures", "attention")}


def json_block(name: str, value: Any) -> str:
    """`value` as inert JSON inside a page; no text in it can end the block."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")  # json escapes all but ASCII
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def chunk(name: str, content: bytes) -> str:
    """Bytes inside a page, deflated and in base64."""
    text = base64.b64encode(zlib.compress(content, 6)).decode()
    return f'<script type="application/octet-stream" id="chunk-{name}">{text}</script>\n'


@cache
def circuitsvis() -> str:
    """CircuitsVis's script, from its Python package.

    Raises:
        SinklensError: the installed package does not contain it.
    """
    file = importlib.resources.files("circuitsvis") / "dist" / "cdn" / "iife.js"
    require(
        file.is_file(),
        "the installed circuitsvis package has no dist/cdn/iife.js, the script that draws attention heads; "
        "reinstall circuitsvis 1.43.",
        SinklensError,
    )
    return file.read_text(encoding="utf-8").split("\n//# sourceMappingURL")[0]  # the source map is not in the page


@cache
def circuitsvis_chunk() -> str:
    """CircuitsVis's script inside a page."""
    return chunk("circuitsvis", circuitsvis().encode())


def visible(text: str) -> str:
    """`text` with invisible characters made visible; a newline is ⏎, a single space ␣.

    >>> visible("a\\n\\u202e")
    'a⏎\\\\u202e'
    """
    if text in ("", " "):
        return "␣" if text else "∅"
    return spelled(text.replace("\n", "⏎").replace("\t", "⇥"))


def token_text(token: int, word: str | None, masks: Collection[int | None]) -> str:
    """The text a page shows for a token: ░ for the mask, ⟨id⟩ if its text is not known."""
    if token < 0 or token in masks:
        return NOT_YET if token < 0 else MASKED
    return f"⟨{token}⟩" if word is None else visible(word)


def token_texts(track: "SinkTrack") -> Callable[[int], str]:
    """Token id → `token_text` in a track."""
    words, masks = track.vocabulary, set(track.special["mask"])
    return lambda token: token_text(token, words.get(token), masks)


def asset(name: str) -> str:
    """A file of ``page/``."""
    return (importlib.resources.files("sinklens.views") / "page" / name).read_text(encoding="utf-8")


def hashes(texts: Sequence[str]) -> str:
    """The sources of a policy that allow these scripts or styles."""
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
