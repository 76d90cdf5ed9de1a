"""Whether a masked diffusion model would write a given answer: one token per step, the most confident first.

This is ``suffix_greedy_prediction`` of LLaDA's eval_llada.py: the answer starts completely masked, and each pass
decides the masked token of the highest probability. A block-causal model does so block by block. There is one pass for
each token of the longest answer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sinklens.experiments.nll.batches import Batches
from sinklens.experiments.nll.diffusion import block_ends
from sinklens.experiments.nll.hooked_pass import HookedPass, MaskedRows
from sinklens.experiments.nll.pairs import PromptAnswer


def writes(passes: HookedPass, pairs: Sequence[PromptAnswer], batches: Batches) -> list[bool]:
    """Whether greedy decoding gives exactly the answer, for each pair."""
    found, blocks = [True] * len(pairs), dict[tuple[int, int], list[int]]()
    for number, pair in enumerate(pairs):
        ends = block_ends(passes.model, pair)
        for block in zip([0, *ends], ends, strict=False):
            blocks.setdefault(block, []).append(number)
    for (start, stop), same in blocks.items():

        def work(numbers: Sequence[int], start: int = start, stop: int = stop) -> None:
            for number, right in zip(numbers, _block(passes, [pairs[n] for n in numbers], start, stop), strict=True):
                found[number] &= right

        batches.run(same, lambda number: len(pairs[number].prompt) + len(pairs[number].answer), work)
    return found


def _block(passes: HookedPass, pairs: Sequence[PromptAnswer], start: int, stop: int) -> list[bool]:
    """Whether the answer tokens from `start` to `stop` are written after those before them."""
    ids, real = passes.model.reader.padded([[*pair.prompt, *pair.answer[:stop]] for pair in pairs])
    length = ids.shape[1] - stop
    wanted, masked = ids[:, length:], torch.zeros_like(ids[:, length:], dtype=torch.bool)
    masked[:, start:] = True
    assert passes.model.mask_token_id is not None
    answers = wanted.masked_fill(masked, passes.model.mask_token_id)
    for _ in range(stop - start):
        logits = passes.logits(MaskedRows(ids[:, :length], real[:, :length], answers, masked))
        answers, masked = _decided(answers, masked, logits)
    return (answers == wanted).all(dim=1).tolist()


def _decided(answers: Tensor, masked: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The answers with the most confident masked token of each row decided, and what is still masked."""
    confidence, token = logits.softmax(dim=-1).max(dim=-1)
    proposed = answers.masked_scatter(masked, token)
    spread = torch.full(answers.shape, -1.0, device=answers.device).masked_scatter(masked, confidence)
    first = torch.zeros_like(masked).scatter(1, spread.argmax(dim=1, keepdim=True), True)
    return torch.where(first, proposed, answers), masked & ~first
