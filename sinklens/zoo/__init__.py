"""The tiny checkpoints that ship with sinklens: their tokenizer, their training, their files.

And one whose weights are set by hand, so that its sinks are known: `planted_checkpoint`.
"""

from sinklens.zoo.planted import planted_checkpoint, planted_paths, planted_scores, planted_sinks
from sinklens.zoo.recipes import RECIPES, Recipe
from sinklens.zoo.training import train

__all__ = ["RECIPES", "Recipe", "planted_checkpoint", "planted_paths", "planted_scores", "planted_sinks", "train"]
