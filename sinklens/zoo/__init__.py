"""The tiny checkpoints that ship with sinklens: their tokenizer, their training, their files."""

from sinklens.zoo.training import RECIPES, Recipe, train

__all__ = ["RECIPES", "Recipe", "train"]
