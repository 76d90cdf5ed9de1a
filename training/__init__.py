"""How the models in models/ were made: recipes, data, training and export.

A folder of the repository, not of the wheel: run ``python -m training NAME`` from the root, or ``python -m
training.continued`` for the continuations of SmolLM2-135M, which needs little more than torch.
"""

from typing import TYPE_CHECKING

from sinklens.utils.lazy import lazily

if TYPE_CHECKING:
    from training.export import write_untrained
    from training.loop import train
    from training.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "train", "write_untrained"]

__getattr__ = lazily(
    __name__,
    {"RECIPES": "training.recipes", "Recipe": "training.recipes", "train": "training.loop",
     "write_untrained": "training.export"},
)  # fmt: skip
