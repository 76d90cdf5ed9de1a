"""The pages of ``sinklens reproduce``: one that opens offline, with its pictures inside, and a report in Markdown.

Pitfall: both show what files and models say, so every text is escaped where it is filled in (`finalize`).
"""

from collections.abc import Mapping
from typing import Any

from sinklens.utils.escaping import in_markdown, spelled
from sinklens.views.html import asset, hashes

PAGES = {"index.html": spelled, "report.md": in_markdown}


def reproduction_pages(shown: Mapping[str, Any]) -> dict[str, str]:
    """Each of `PAGES`, by name; `shown` is what `sinklens.analyses.reproduce` found."""
    from jinja2 import Environment, StrictUndefined

    style = asset("theme.css") + asset("reproduction.css")
    pages, policy = {}, f"default-src 'none'; style-src {hashes([style])}; img-src data:"
    for name, escape in PAGES.items():
        environment = Environment(
            autoescape=name.endswith(".html"), undefined=StrictUndefined, trim_blocks=True,
            finalize=lambda value, escape=escape: escape(value) if type(value) is str else value,
        )  # fmt: skip
        template = environment.from_string(asset(f"reproduction.{name.rpartition('.')[2]}"))
        pages[name] = template.render(shown, style=style, policy=policy)
    return pages
