"""Exact log-likelihoods of autoregressive models.

Without hooks, the prompt of several answers is computed once: its keys and values are copied to each answer. Under
hooks, a run is forced to write the answers token by token, so interventions act as in `generate`: the sinks of the step
before are those of the token before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklens.errors import SettingError
from sinklens.experiments.nll.batches import Batches
from sinklens.experiments.nll.pairs import PromptAnswer, by_prompt
from sinklens.experiments.nll.result import Likelihood
from sinklens.experiments.nll.shared_prefix import hidden_after
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs import generate


class TokenScores:
    """Log-likelihoods of pairs, filled in batches.

    Attributes:
        losses: −log p of each answer token, by pair.
        greedy: whether the most likely tokens are the answer, by pair.
    """

    def __init__(self, pairs: Sequence[PromptAnswer]) -> None:
        self.losses = [np.full(len(pair.answer), np.nan) for pair in pairs]
        self.greedy = [True] * len(pairs)

    def put(self, number: int, logits: Float[Tensor, "pos vocab"], tokens: Int[Tensor, " pos"]) -> None:
        """Store the tokens of pair `number`, given the logits that predict them."""
        self.losses[number][:] = _losses(logits, tokens)
        self.greedy[number] &= bool((logits.argmax(dim=-1) == tokens).all())

    def result(self, number: int, pair: PromptAnswer) -> Likelihood:
        """The likelihood of a pair."""
        losses = self.losses[number][None]
        ones, blocks = np.ones_like(losses), np.zeros(losses.shape[1], dtype=np.int64)
        return Likelihood.of("likelihood", pair.answer, losses, ones, ones, blocks)


def _losses(logits: Float[Tensor, "token vocab"], tokens: Int[Tensor, " token"]) -> Float[np.ndarray, " token"]:
    """−log p of each token, at least in float32."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(precise, tokens, reduction="none").double().cpu().numpy()


@torch.no_grad()
def score_exactly(model: Model, pairs: Sequence[PromptAnswer], batches: Batches) -> TokenScores:
    """Score the pairs; answers of one prompt share its keys and values."""
    found = TokenScores(pairs)
    shared = sorted(by_prompt(pairs).items(), key=lambda entry: len(entry[0]))

    def positions(entry: tuple[tuple[int, ...], list[int]]) -> int:
        return len(entry[0]) + sum(len(pairs[number].answer) for number in entry[1])

    def work(batch: Sequence[tuple[tuple[int, ...], list[int]]]) -> None:
        _score(model, pairs, batch, found)

    for alone in (True, False):  # a prompt of one token leaves nothing to share
        batches.run([entry for entry in shared if (len(entry[0]) == 1) is alone], positions, work)
    return found


def _score(
    model: Model, pairs: Sequence[PromptAnswer], batch: Sequence[tuple[tuple[int, ...], list[int]]], found: TokenScores
) -> None:
    """Score the answers of some prompts: one pass over the prompts but for their last tokens, and one over the rest."""
    numbers = [number for _, several in batch for number in several]
    source = torch.tensor([row for row, (_, several) in enumerate(batch) for _ in several])
    shared = len(batch[0][0]) > 1
    prompts = model.reader.padded([list(prompt[:-1]) for prompt, _ in batch]) if shared else None
    rest, _ = model.reader.padded([[pairs[n].prompt[-1], *pairs[n].answer[:-1]] for n in numbers], "right")
    for number, row in zip(numbers, hidden_after(model, prompts, source, rest).hidden, strict=True):
        answer = torch.tensor(pairs[number].answer, device=rest.device)
        found.put(number, model.tree.head(row[: len(answer)]), answer)


def score_forced(
    model: Model, pairs: Sequence[PromptAnswer], hooks: Sequence[Any], seed: int, batches: Batches
) -> TokenScores:
    """Score the pairs in runs under `hooks` that are forced to write the answers.

    Raises:
        SettingError: an answer holds an end token before its end, where a run ends.
    """
    found = TokenScores(pairs)
    _refuse_ends(model, pairs)
    for length in sorted({len(pair.answer) for pair in pairs}):
        same = sorted((n for n, pair in enumerate(pairs) if len(pair.answer) == length), key=lambda n: pairs[n].prompt)

        def work(numbers: Sequence[int]) -> None:
            _force(model, pairs, numbers, hooks, seed, found)

        batches.run(same, lambda number: len(pairs[number].prompt) + len(pairs[number].answer), work)
    return found


def _force(
    model: Model,
    pairs: Sequence[PromptAnswer],
    numbers: Sequence[int],
    hooks: Sequence[Any],
    seed: int,
    found: TokenScores,
) -> None:
    answers = torch.tensor([pairs[number].answer for number in numbers], device=model.cfg.device)

    def read(logits: Float[Tensor, "batch 1 vocab"], hook: Point) -> None:
        step = int(hook.step or 0)
        lost, right = _losses(logits[:, 0], answers[:, step]), logits[:, 0].argmax(dim=-1) == answers[:, step]
        for number, loss, greedy in zip(numbers, lost, right.tolist(), strict=True):
            found.losses[number][step] = loss
            found.greedy[number] &= greedy

    def force(candidates: Int[Tensor, "batch 1"], hook: Point) -> Tensor:
        step = int(hook.step or 0)
        return answers[:, step : step + 1].to(candidates)

    generate(
        model, [list(pairs[number].prompt) for number in numbers], seed=seed, record_sinks=False, progress=False,
        gen_length=answers.shape[1],
        hooks=[*hooks, ("denoise.hook_logits", read), ("denoise.hook_candidates", force)],
    )  # fmt: skip


def _refuse_ends(model: Model, pairs: Sequence[PromptAnswer]) -> None:
    for number, pair in enumerate(pairs):
        ends = [place for place, token in enumerate(pair.answer[:-1]) if token in model.eos_token_ids]
        if ends:
            raise SettingError(
                f"answer {number} holds an end token at position {ends[0]}, where a run under hooks ends; pass the "
                f"answer up to it, or leave hooks= out."
            )
