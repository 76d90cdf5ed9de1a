"""The loaded model: its hook points, single passes, prompts and tokens, fingerprint and self-check.

Names are imported lazily, so reading prompts does not load transformers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinklens.model.model import Model, borrow, load

__all__ = ["Model", "borrow", "load"]


def __getattr__(name: str) -> object:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("sinklens.model.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
