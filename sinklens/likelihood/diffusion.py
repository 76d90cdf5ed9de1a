"""Bounds of masked diffusion models: passes over answers with some tokens masked.

A block-causal model is evaluated block by block: earlier blocks of the answer are given, tokens of one block are
masked, and later blocks, which the block would not see, are left out. The bound is the sum over the blocks. If a block
begins with tokens of the prompt, only its answer tokens are masked.

If a mask of an answer is drawn twice, it is computed once. All rows of a batch have answers of equal length, so only
prompts are padded, and position −1 is the last answer token of every row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from sinklens.likelihood.batches import Batches
from sinklens.likelihood.draws import DrawRule, MaskDraws
from sinklens.likelihood.hooked_pass import HookedPass, MaskedRows
from sinklens.likelihood.pairs import PromptAnswer
from sinklens.likelihood.result import Likelihood, ValueKind
from sinklens.model import Model


@dataclass(frozen=True)
class _Part:
    """The draws of one block of an answer.

    Attributes:
        pair: index of the pair.
        number: of the block, from 0.
        start, stop: the block's tokens in the answer.
        draws: their masks.
    """

    pair: int
    number: int
    start: int
    stop: int
    draws: MaskDraws


@dataclass(frozen=True)
class _Row:
    """One distinct mask of a part, and the draws that have it."""

    part: _Part
    masked: tuple[bool, ...]
    draws: tuple[int, ...]


def bounds(passes: HookedPass, pairs: Sequence[PromptAnswer], rule: DrawRule, batches: Batches) -> list[Likelihood]:
    """The bound of each pair."""
    parts = [part for number, pair in enumerate(pairs) for part in _parts(passes.model, number, pair, rule)]
    rows = [row for part in parts for row in _rows(part) if any(row.masked)]
    rows.sort(key=lambda row: (row.part.stop, len(pairs[row.part.pair].prompt), row.part.pair, row.part.number))
    most = {pair: max(len(part.draws.weights) for part in parts if part.pair == pair) for pair in range(len(pairs))}
    losses = [np.full((most[number], len(pair.answer)), np.nan) for number, pair in enumerate(pairs)]
    for same in _by_length(rows):

        def work(batch: Sequence[_Row]) -> None:
            _compute(passes, pairs, batch, losses)

        batches.run(same, lambda row: len(pairs[row.part.pair].prompt) + row.part.stop, work)
    return [
        _result(pair, [part for part in parts if part.pair == number], losses[number], rule)
        for number, pair in enumerate(pairs)
    ]


def block_ends(model: Model, pair: PromptAnswer) -> list[int]:
    """Where the blocks of an answer end, in its tokens; a single one unless the model is block-causal."""
    blocks, length = model.checkpoint.blocks, len(pair.answer)
    if blocks is None:
        return [length]
    before = len(pair.prompt) % blocks.length if blocks.start == "token" else 0
    return [*range(blocks.length - before, length, blocks.length), length]


def _parts(model: Model, number: int, pair: PromptAnswer, rule: DrawRule) -> Iterator[_Part]:
    """The blocks of one answer."""
    ends = block_ends(model, pair)
    for block, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        yield _Part(number, block, start, stop, rule.draw(pair.prompt, stop - start, block))


def _rows(part: _Part) -> Iterator[_Row]:
    """The distinct masks of a part."""
    found: dict[tuple[bool, ...], list[int]] = {}
    for draw, masked in enumerate(part.draws.masked.tolist()):
        found.setdefault(tuple(masked), []).append(draw)
    for masked, draws in found.items():
        yield _Row(part, masked, tuple(draws))


def _by_length(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    """Rows with equally many answer tokens."""
    start = 0
    for place, row in enumerate(rows):
        if row.part.stop != rows[start].part.stop:
            yield rows[start:place]
            start = place
    if rows:
        yield rows[start:]


def _compute(
    passes: HookedPass, pairs: Sequence[PromptAnswer], batch: Sequence[_Row], losses: list[np.ndarray]
) -> None:
    """Write the losses of the masked tokens of `batch` into `losses`."""
    model = passes.model
    assert model.mask_token_id is not None
    stop = batch[0].part.stop
    texts = [(*pair.prompt, *pair.answer[:stop]) for pair in (pairs[row.part.pair] for row in batch)]
    ids, real = model.reader.padded([list(text) for text in texts])
    answers, length = ids[:, -stop:], ids.shape[1] - stop
    masked = torch.tensor([(False,) * row.part.start + row.masked for row in batch], device=ids.device)
    given = MaskedRows(ids[:, :length], real[:, :length], answers.masked_fill(masked, model.mask_token_id), masked)
    lost = cross_entropy(passes.logits(given), answers[masked], reduction="none").double().cpu().numpy()
    places = np.split(lost, np.cumsum([sum(row.masked) for row in batch])[:-1])
    for row, values in zip(batch, places, strict=True):
        columns = row.part.start + np.flatnonzero(row.masked)
        losses[row.part.pair][np.array(row.draws)[:, None], columns] = values


def _result(pair: PromptAnswer, parts: Sequence[_Part], losses: np.ndarray, rule: DrawRule) -> Likelihood:
    shares, weights = np.ones_like(losses), np.zeros_like(losses)
    blocks = np.zeros(len(pair.answer), dtype=np.int64)
    for part in parts:
        there, count = slice(part.start, part.stop), len(part.draws.weights)
        shares[:count, there] = part.draws.shares.numpy()[:, None]
        weights[:count, there] = part.draws.weights.numpy()[:, None]
        blocks[there] = part.number
    kind: ValueKind = "bound" if rule.exact else "estimate"
    return Likelihood.of(kind, pair.answer, losses, shares, weights, blocks, rule.batch)
