"""How the tiny checkpoints were made: recipes, data, training and export.

A folder of the repository, not of the wheel: run ``python -m training NAME`` from the root.
"""

from training.export import write_untrained
from training.loop import train
from training.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "train", "write_untrained"]
