"""The hook points of a model: their names, the tree they form, and how they connect to the computation.

To support a new architecture, add a record to `ARCHITECTURES`. Names resolve lazily: importing this package is quick,
and transformer_lens and transformers are imported when a tree is first used.
"""

from typing import TYPE_CHECKING

from sinklens.hooks.architectures import Architecture, architecture_of
from sinklens.hooks.names import aliases, resolve, select, table
from sinklens.utils.lazy import lazily

if TYPE_CHECKING:
    from sinklens.hooks.points import Point, Watch
    from sinklens.hooks.tree import HookTree

_LAZY = {
    "HookTree": "sinklens.hooks.tree",
    "Point": "sinklens.hooks.points",
    "Watch": "sinklens.hooks.points",
}

__all__ = [
    "Architecture",
    "HookTree",
    "Point",
    "Watch",
    "aliases",
    "architecture_of",
    "resolve",
    "select",
    "table",
]


__getattr__ = lazily(__name__, _LAZY)
