"""The rows that a tiny checkpoint is trained on, and the batch of every step.

A row is a prompt followed by an answer, padded to `ANSWER_LENGTH` with end tokens. Rows are grouped by kind and by
prompt length. A batch comes from one group, drawn with probability proportional to its size, so batches need no
padding.

Pitfall: batches from a small group contain many repeated rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from sinklens.tasks import tiny_code, word_problems
from training import pictures, skills
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ANSWER_LENGTH = 24


@dataclass(frozen=True)
class Corpus:
    """Training rows in groups of equal shape.

    Attributes:
        groups: (kind of row, prompt length) -> ids of prompt and answer, [row, pos] int16.
    """

    groups: dict[tuple[str, int], Int[Tensor, "row pos"]]

    def batch(
        self, seed: int, step: int, size: int, problems_only: bool = False
    ) -> tuple[int, Int[Tensor, "batch pos"]]:
        """The prompt length and rows of one step; they depend only on the arguments.

        Args:
            problems_only: draw only from the problems, as if there were no other rows.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        keys = sorted(key for key in self.groups if key[0] == "problem" or not problems_only)
        weights = torch.tensor([float(len(self.groups[key])) for key in keys])
        key = keys[int(torch.multinomial(weights, 1, generator=generator))]
        rows = torch.randint(len(self.groups[key]), (size,), generator=generator)
        return key[1], self.groups[key][rows].long()


def build_corpus(tokenizer: "PreTrainedTokenizerFast", recipe: Recipe) -> Corpus:
    """Tokenize the recipe's problems, functions and exercises and, in both directions, its pictures.

    Data that no step of the recipe draws from is left out.

    Raises:
        ValueError: an answer is too long.
    """
    recipe = recipe.until(recipe.steps)
    problems = word_problems.training(recipe.seed, recipe.problems)
    groups = _group(tokenizer, "problem", [(p.prompt, " " + p.answer) for p in problems])
    if recipe.pictures:
        captioned = pictures.training(recipe.seed, recipe.pictures)
        groups |= _group(tokenizer, "draw", [picture.to_draw for picture in captioned])
        groups |= _group(tokenizer, "describe", [picture.to_describe for picture in captioned])
    if recipe.code:
        functions = tiny_code.training(recipe.seed, recipe.code)
        groups |= _group(tokenizer, "code", [(function.prompt, function.solution) for function in functions])
    if recipe.skills:
        for skill in skills.SKILLS:
            exercises = skills.training(skill, recipe.seed, recipe.skills)
            groups |= _group(tokenizer, skill, [(made.prompt, f" {made.answer}") for made in exercises])
    return Corpus(groups)


def _group(
    tokenizer: "PreTrainedTokenizerFast", kind: str, texts: Iterable[tuple[str, str]]
) -> dict[tuple[str, int], Int[Tensor, "row pos"]]:
    groups: dict[tuple[str, int], list[list[int]]] = {}
    prompt_texts, answer_texts = zip(*texts, strict=True)
    prompts = tokenizer(list(prompt_texts)).input_ids
    answers = tokenizer(list(answer_texts), add_special_tokens=False).input_ids
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) >= ANSWER_LENGTH:
            raise ValueError(
                f"an answer of {len(answer)} tokens leaves no room for the end token within {ANSWER_LENGTH} tokens."
            )
        padding = [tokenizer.eos_token_id] * (ANSWER_LENGTH - len(answer))
        groups.setdefault((kind, len(prompt)), []).append(prompt + answer + padding)
    return {key: torch.tensor(rows, dtype=torch.int16) for key, rows in groups.items()}
