"""Draw the pictures of the README and the docs, all or some groups of them.

    python scripts/pictures.py
    python scripts/pictures.py pages     # what shows a page; needs Chromium

The groups are `pages` (page_pictures.py), `concepts` (doc_pictures.py), `findings` (findings_figures.py) and `training`
(sink_curve.py). A test draws the last three again and compares them with docs/pictures. Not covered are the two
pictures in docs/results, which `sinklens reproduce` drew from generations that are not stored.
"""

import sys

import doc_pictures
import findings_figures
import page_pictures
import sink_curve

GROUPS = {"pages": page_pictures, "concepts": doc_pictures, "findings": findings_figures, "training": sink_curve}

if __name__ == "__main__":
    for group in sys.argv[1:] or GROUPS:
        GROUPS[group].main()
