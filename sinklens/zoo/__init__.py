"""The tiny checkpoints that ship with sinklens: tokenizer, training and export.

`planted_checkpoint` writes one more, with weights set by hand so that its sinks are known. Names are imported lazily,
so the command line can list the recipes without loading PyTorch.
"""

from typing import TYPE_CHECKING

from sinklens.zoo.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from sinklens.zoo.export import write_untrained
    from sinklens.zoo.planted import planted_checkpoint, planted_sinks
    from sinklens.zoo.training import train

_MODULES = {
    "planted_checkpoint": "planted",
    "planted_sinks": "planted",
    "train": "training",
    "write_untrained": "export",
}

__all__ = ["RECIPES", "Recipe", "planted_checkpoint", "planted_sinks", "train", "write_untrained"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(f"sinklens.zoo.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
