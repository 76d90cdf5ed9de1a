"""The lab's page: the components of the report, joined with the lab's own scripts and styles.

The page loads two files from the server that sent it, and a third when attention heads are drawn. All text from models
reaches it as JSON and is set as text.

Pitfall: the scripts share one scope, so two of them must not declare the same name.
"""

import importlib.resources
from functools import cache
from html import escape

from sinklens.views import html

SCRIPTS = (
    "api.js", "runs.js", "fields.js", "menu.js", "lab.js", "form.js", "chips.js", "point.js", "trial.js",
    "differences.js", "compare.js", "color.js", "lens.js", "output.js", "export.js", "history.js",
    "main.js",
)  # fmt: skip


@cache
def document(token: str = "") -> str:
    """The HTML document of ``GET /``; in a frame, which gets no cookie, it holds the token."""
    return html.fill(_own("lab.html"), {"token": escape(token), **html.fragments()})


def entry(trouble: str) -> str:
    """The document with the form that asks for the token."""
    return html.fill(_own("enter.html"), {"trouble": escape(trouble)})


ENTERED = """<!doctype html><title>sinklens lab</title><meta http-equiv="refresh" content="0; url=./">"""
"""Leads to the page after the form of another site's page: the cookie is not sent to where that page leads directly."""


@cache
def files() -> dict[str, tuple[str, str]]:
    """Media type and text of each file below ``/static/``, by name."""
    script = html.bundle([*map(html.asset, html.COMPONENTS), *map(_own, SCRIPTS)])
    return {
        "lab.js": ("text/javascript", script),
        "lab.css": ("text/css", html.REPORT.style() + _own("lab.css")),
        "circuitsvis.js": ("text/javascript", html.circuitsvis()),
    }


@cache
def frame() -> str:
    """The document in which CircuitsVis draws; its policy allows only the scripts it needs, by their hashes."""
    return html.HEADS.document(data="")


def _own(name: str) -> str:
    return (importlib.resources.files("sinklens.live") / "static" / name).read_text(encoding="utf-8")
