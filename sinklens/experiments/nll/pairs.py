"""Prompts and answers as token ids.

A text pair is tokenized together and then divided, as in lm-evaluation-harness: spaces at the end of the prompt belong
to the answer. The prompt gets as many tokens as it has alone; the others are the answer's.

Pitfall: if prompt and answer share a token, the division falls before or after it, and the prompt differs from the one
that a run would get.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sinklens.errors import PromptError
from sinklens.model import Model


class PromptAnswer(NamedTuple):
    """Token ids of a prompt and its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def divided(prompt: str, answer: str, encode: Callable[[str], list[int]]) -> PromptAnswer:
    """The pair of two texts, tokenized together by `encode`; the prompt is not empty."""
    spaces = len(prompt) - len(prompt.rstrip())
    if spaces:
        prompt, answer = prompt[:-spaces], prompt[-spaces:] + answer
    before = encode(prompt)
    return PromptAnswer(tuple(before), tuple(encode(prompt + answer)[len(before) :]))


def pairs_of(model: Model, prompt: Any, answer: Any, chat_template: bool | str) -> list[PromptAnswer]:
    """The pairs of a prompt and an answer, of lists of both, or of one prompt and several answers.

    Raises:
        PromptError: one is empty, invalid or too long, contains the mask token, or the lists differ in length.
    """
    answers = list(answer) if is_several(answer) else [answer]
    prompts = list(prompt) if is_several(prompt) else [prompt] * len(answers)
    if len(prompts) != len(answers):
        raise PromptError(
            f"got {len(prompts)} prompts and {len(answers)} answers; give one answer for each prompt, or one prompt."
        )
    found = [_pair(model, *texts, chat_template) for texts in zip(prompts, answers, strict=True)]
    for number, pair in enumerate(found):
        check_pair(model, pair, number)
    return found


def is_several(given: Any) -> bool:
    """Whether `given` is a list of texts or of rows of ids, rather than one text or one row."""
    if isinstance(given, Tensor | np.ndarray):
        return given.ndim > 1
    return not isinstance(given, str) and len(given) > 0 and not isinstance(given[0], int | np.integer)


def _pair(model: Model, prompt: Any, answer: Any, chat_template: bool | str) -> PromptAnswer:
    if isinstance(prompt, str) and isinstance(answer, str) and chat_template is False and prompt.strip():
        return divided(prompt, answer, lambda text: _ids(model, text))
    before = _ids(model, prompt, chat_template) if len(prompt) else []
    return PromptAnswer(tuple(before), tuple(_ids(model, answer, prepend_bos=False)))


def _ids(model: Model, given: Any, chat_template: bool | str = False, prepend_bos: bool | None = None) -> list[int]:
    """Ids of one text, or of one row of ids."""
    if not isinstance(given, str):
        chat_template, prepend_bos = False, None
    elif chat_template is not False:
        prepend_bos = None
    return model.reader.read(given, chat_template, prepend_bos).ids[0].tolist() if len(given) else []


def check_pair(model: Model, pair: PromptAnswer, number: int) -> None:
    """Refuse a pair that has no likelihood.

    Raises:
        PromptError: see `pairs_of`.
    """
    if not pair.answer:
        raise PromptError(f"answer {number} is empty; a likelihood needs at least one token after the prompt.")
    if model.causal and not pair.prompt:
        raise PromptError(
            f"prompt {number} is empty, and {model.name} is autoregressive: its first token needs one before it. Pass "
            f"a start token as the prompt."
        )
    if model.mask_token_id is not None and model.mask_token_id in (*pair.prompt, *pair.answer):
        raise PromptError(
            f"pair {number} contains the mask token ({model.mask_token_id}); pass the text without masks, which a "
            f"likelihood draws itself."
        )
    length = len(pair.prompt) + len(pair.answer)
    if length > longest(model):
        raise PromptError(
            f"pair {number} has {length} tokens, and {model.name} takes at most {longest(model)}. Shorten the prompt."
        )


def longest(model: Model) -> int:
    """The most tokens that a pair may have; an autoregressive model does not read the last one."""
    return model.cfg.n_ctx + model.causal


def by_prompt(pairs: Sequence[PromptAnswer]) -> dict[tuple[int, ...], list[int]]:
    """Indices of the pairs of each prompt, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, pair in enumerate(pairs):
        found.setdefault(pair.prompt, []).append(number)
    return found
