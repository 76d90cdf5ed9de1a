"""The loaded model: its hook points, single passes, prompts and tokens, fingerprint and self-check.

Names are imported lazily, so reading prompts does not load transformers.
"""

from typing import TYPE_CHECKING

from sinklens.utils.lazy import lazily

if TYPE_CHECKING:
    from sinklens.model.model import Model, borrow, load

__all__ = ["Model", "borrow", "load"]


__getattr__ = lazily(__name__, dict.fromkeys(__all__, "sinklens.model.model"))
