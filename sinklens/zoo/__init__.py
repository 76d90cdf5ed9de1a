"""The tiny checkpoints that ship with sinklens: their tokenizer, their training, their files.

And one whose weights are set by hand, so that its sinks are known: `planted_checkpoint`. Names resolve lazily: the
command line reads the recipes' names without loading PyTorch.
"""

from typing import TYPE_CHECKING, Any

from sinklens.zoo.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from sinklens.zoo.planted import planted_checkpoint, planted_paths, planted_scores, planted_sinks
    from sinklens.zoo.training import train

_HOMES = {
    "planted_checkpoint": "planted",
    "planted_paths": "planted",
    "planted_scores": "planted",
    "planted_sinks": "planted",
    "train": "training",
}

__all__ = ["RECIPES", "Recipe", "planted_checkpoint", "planted_paths", "planted_scores", "planted_sinks", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"sinklens.zoo.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
