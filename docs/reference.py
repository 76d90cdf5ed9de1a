"""Read the API reference from the sources, without importing them.

The sources are in three folders, two of which have other names once installed. A temporary folder therefore gets
links that lay them out as setuptools would, and mkdocstrings reads there. Docstrings are in Google's format, with two
conventions of this project: several names may share an entry (``layers, heads: numbers``), and examples have no
heading. `Conventions` rewrites both into standard Google format.

Each page of docs/api begins with a table of its names and the first lines of their docstrings: the members that its
mkdocstrings directives (``::: sinklens.sinks`` with ``members``) list, all public functions and classes of a module
without listed members, or the single object named.

Limitation: `mkdocs serve` creates the links once; a new file at the top of sinklens/ needs a restart.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENTRY = re.compile(r"^( +)([*\w]+(?:, [*\w]+)+): (.*(?:\n\1 +.*)*)", flags=re.MULTILINE)
SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +.*\n?|\n(?=\1 ))*)", flags=re.MULTILINE)
