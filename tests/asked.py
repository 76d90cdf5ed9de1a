"""What many tests ask a model."""

from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(3)]
TWO, PROMPT = PROMPTS[:2], PROMPTS[0]
WORDS = ["one two three four five six", "seven eight nine"]
"""Prompts of the word tokenizer, of different length."""
