"""The tiny checkpoints that ship with sinklens: their tokenizer, their training, their files."""

from sinklens.zoo.recipes import RECIPES, Recipe
from sinklens.zoo.training import train

__all__ = ["RECIPES", "Recipe", "train"]
