"""Exact log-likelihoods of autoregressive models.

Without hooks, the prompt of several answers is computed once: its keys and values are copied to each answer. Under
hooks, a run is forced to write the answers token by token, so interventions act as in `generate`: the sinks of the step
before are those of the token before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklens.errors import SettingError
from sinklens.experiments.nll.hooked_pass import Ids, hidden_after, in_batches
from sinklens.experiments.nll.result import Likelihood, PromptAnswer
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs import generate


def _scored(
    logits: Float[Tensor, "token vocab"], tokens: Int[Tensor, " token"]
) -> tuple[Float[np.ndarray, " token"], Bool[Tensor, " token"]]:
    """−log p of each token, at least in float32, and whether it is the most likely one."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    losses = cross_entropy(precise, tokens, reduction="none").double().cpu().numpy()
    return losses, logits.argmax(dim=-1) == tokens


def _result(pair: PromptAnswer, losses: Float[np.ndarray, " pos"], greedy: bool) -> Likelihood:
    ones, blocks = np.ones((1, len(losses))), np.zeros(len(losses), dtype=np.int64)
    return Likelihood("likelihood", pair.answer, losses[None], ones, ones, blocks, greedy=greedy)


@torch.no_grad()
def score_exactly(model: Model, pairs: Sequence[PromptAnswer], most: int | None) -> list[Likelihood]:
    """Score the pairs, at most `most` prompts in a pass; answers of one prompt share its keys and values."""
    found, prompts = dict[int, Likelihood](), dict[Ids, list[int]]()
    for number, pair in enumerate(pairs):
        prompts.setdefault(pair.prompt, []).append(number)

    def work(batch: Sequence[Ids]) -> None:
        numbers = [number for prompt in batch for number in prompts[prompt]]
        source = torch.tensor([row for row, prompt in enumerate(batch) for _ in prompts[prompt]])
        rest, _ = model.reader.padded([[pairs[n].prompt[-1], *pairs[n].answer[:-1]] for n in numbers], "right")
        hidden = hidden_after(model, [prompt[:-1] for prompt in batch], source, rest).hidden
        for number, row in zip(numbers, hidden, strict=True):
            answer = torch.tensor(pairs[number].answer, device=rest.device)
            losses, right = _scored(model.tree.head(row[: len(answer)]), answer)
            found[number] = _result(pairs[number], losses, bool(right.all()))

    ordered = sorted(prompts, key=len)
    for alone in (True, False):  # a prompt of one token leaves nothing to share
        most = in_batches(
            [prompt for prompt in ordered if (len(prompt) == 1) is alone],
            lambda prompt: len(prompt) + sum(len(pairs[number].answer) for number in prompts[prompt]), work, most,
        )  # fmt: skip
    return [found[number] for number in range(len(pairs))]


def score_forced(
    model: Model, pairs: Sequence[PromptAnswer], hooks: Sequence[Any], seed: int, most: int | None
) -> list[Likelihood]:
    """Score the pairs, at most `most` at a time, by runs under `hooks` that are forced to write the answers.

    Raises:
        SettingError: an answer holds an end token before its end, where a run ends.
    """
    found = dict[int, Likelihood]()
    for number, pair in enumerate(pairs):
        if ends := [place for place, token in enumerate(pair.answer[:-1]) if token in model.eos_token_ids]:
            raise SettingError(
                f"answer {number} holds an end token at position {ends[0]}, where a run under hooks ends; pass the "
                f"answer up to it, or leave hooks= out."
            )

    def work(numbers: Sequence[int]) -> None:
        losses, right = _forced(model, [pairs[number] for number in numbers], hooks, seed)
        for number, lost, greedy in zip(numbers, losses, right, strict=True):
            found[number] = _result(pairs[number], lost, bool(greedy.all()))

    for length in sorted({len(pair.answer) for pair in pairs}):
        same = sorted((n for n, pair in enumerate(pairs) if len(pair.answer) == length), key=lambda n: pairs[n].prompt)
        most = in_batches(same, lambda number: len(pairs[number].prompt) + len(pairs[number].answer), work, most)
    return [found[number] for number in range(len(pairs))]


def _forced(
    model: Model, pairs: Sequence[PromptAnswer], hooks: Sequence[Any], seed: int
) -> tuple[Float[np.ndarray, "row pos"], Bool[Tensor, "row pos"]]:
    """`_scored` of the answers, which have one length, in a run that writes them."""
    answers = torch.tensor([pair.answer for pair in pairs], device=model.cfg.device)
    steps: list[tuple[np.ndarray, Tensor]] = []

    def read(logits: Float[Tensor, "batch 1 vocab"], hook: Point) -> None:
        steps.append(_scored(logits[:, 0], answers[:, int(hook.step or 0)]))

    def force(candidates: Int[Tensor, "batch 1"], hook: Point) -> Tensor:
        return answers[:, int(hook.step or 0), None].to(candidates)

    generate(
        model, [list(pair.prompt) for pair in pairs], seed=seed, record_sinks=False, progress=False,
        gen_length=answers.shape[1],
        hooks=[*hooks, ("denoise.hook_logits", read), ("denoise.hook_candidates", force)],
    )  # fmt: skip
    losses, right = zip(*steps, strict=True)
    return np.stack(losses, axis=1), torch.stack(right, dim=1)
