"""HTML documents that hold all they need: styles, scripts and numbers from one file, nothing from a server.

A document is a template of ``page/`` with its parts put in. Numbers lie in it as inert script elements: JSON with every
``<`` escaped, and bytes that are deflated and written in base64. Its Content-Security-Policy names the scripts and
styles that may run by the hash of each, and forbids to fetch anything: text of a model that got to be markup by mistake
could do nothing.

One way this fails: a frame inside a document is held to the document's policy as well as to its own, so the outer one
has to allow what the inner one runs (`Parts.allowed`).
"""

import base64
import hashlib
import importlib.resources
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sinklens.errors import SinklensError

if TYPE_CHECKING:
    from sinklens.sinks.track import SinkTrack

NOT_YET, MASKED = "", "░"


@dataclass(frozen=True)
class Parts:
    """Files of ``page/`` that make a document, in order.

    Attributes:
        template: name of its HTML file, without the ending.
        styles, scripts: files put into it.
        library: whether it starts CircuitsVis's script.
        frame: a document shown in a frame of this one.
    """

    template: str
    styles: Sequence[str]
    scripts: Sequence[str]
    library: bool = True
    frame: "Parts | None" = None

    def style(self) -> str:
        """The text of its style element."""
        return "\n".join(_asset(name) for name in self.styles)

    def script(self) -> str:
        """The text of its script element."""
        return '(() => {\n"use strict";\n' + "\n".join(_asset(name) for name in self.scripts) + "})();"

    def allowed(self) -> tuple[list[str], list[str]]:
        """Texts of the scripts and of the styles that may be used in it and in its frame."""
        inner: tuple[list[str], list[str]] = ([], []) if self.frame is None else self.frame.allowed()
        library = [circuitsvis()] if self.library else []
        return [self.script(), *library, *inner[0]], [self.style(), *inner[1]]

    def document(self, **blocks: str) -> str:
        """The whole document; `blocks` fill the template's other places."""
        scripts, styles = self.allowed()
        policy = (
            f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
            f"img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
        filled = {"style": self.style(), "script": self.script(), "policy": policy, **blocks}
        return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], _asset(f"{self.template}.html"))


HEADS = Parts("heads", ["heads.css"], ["chunks.js", "heads.js"])
REPORT = Parts(
    "report", ["report.css"], ["chunks.js", "report.js", "figures.js", "attention.js", "start.js"], frame=HEADS
)


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
    """CircuitsVis's script, which lies in its Python package.

    Raises:
        SinklensError: the installed package does not hold it.
    """
    file = importlib.resources.files("circuitsvis") / "dist" / "cdn" / "iife.js"
    if not file.is_file():
        raise SinklensError(
            "the installed circuitsvis package has no dist/cdn/iife.js, the script that draws attention heads; "
            "install circuitsvis 1.43 again."
        )
    return file.read_text(encoding="utf-8").split("\n//# sourceMappingURL")[0]  # the map it names is not in the page


@cache
def circuitsvis_chunk() -> str:
    """CircuitsVis's script inside a page."""
    return chunk("circuitsvis", circuitsvis().encode())


def visible(text: str) -> str:
    """`text` with all that would not show itself spelled out; a newline is ⏎, a lone blank ␣.

    >>> visible("a\\n\\u202e")
    'a⏎\\\\u202e'
    """
    if text in ("", " "):
        return "␣" if text else "∅"
    return spelled(text.replace("\n", "⏎").replace("\t", "⇥"))


def spelled(text: str, keep: str = "") -> str:
    """`text` with control and direction characters as escapes, but those of `keep` as they are."""
    return "".join(letter if letter.isprintable() or letter in keep else _escape(ord(letter)) for letter in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def token_texts(track: "SinkTrack") -> Callable[[int], str]:
    """Token id → the text a page shows for it: ░ for the mask, ⟨id⟩ without a tokenizer."""
    words, masks = track.vocabulary, set(track.special["mask"])

    def text(token: int) -> str:
        if token < 0:
            return NOT_YET
        if token in masks:
            return MASKED
        return visible(words[token]) if token in words else f"⟨{token}⟩"

    return text


def _asset(name: str) -> str:
    return (importlib.resources.files("sinklens.views") / "page" / name).read_text(encoding="utf-8")


def _hashes(texts: Sequence[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
