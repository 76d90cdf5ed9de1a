"""Draw the pictures of the README and the docs, all or some groups of them.

    python scripts/pictures.py
    python scripts/pictures.py pages     # what shows a page; needs Chromium

The groups are `pages` (page_pictures.py), `concepts` (doc_pictures.py) and `findings` (findings_figures.py). Two other
pictures come from runs that are not stored: `make demo` writes sinks.png, and scripts/sink_curve.py its own.
"""

import sys

import doc_pictures
import findings_figures
import page_pictures

GROUPS = {
    "pages": page_pictures.main,
    "concepts": doc_pictures.main,
    "findings": lambda: list(findings_figures.drawn()),
}

if __name__ == "__main__":
    for group in sys.argv[1:] or GROUPS:
        GROUPS[group]()
