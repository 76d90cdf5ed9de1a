"""Bounds of diffusion models: passes over noisy answers.

A block-causal model is evaluated block by block: earlier blocks of the answer are given, tokens of one block are noisy,
and later blocks, which the block would not see, are left out. The bound is the sum over the blocks. If a block begins
with tokens of the prompt, only its answer tokens are noisy. Rows share the blocks before their own (shared_prefix.py).

If a noisy answer is drawn twice, at the same noise level if the network reads it, it is computed once. The rows of a
batch have as many tokens from the prompt's end, or from where sharing ends; only what precedes them is padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Bool, Float

from sinklens.experiments.nll.batches import Batches
from sinklens.experiments.nll.draws import DrawRule
from sinklens.experiments.nll.hooked_pass import HookedPass, MaskedRows, blocks_of_text
from sinklens.experiments.nll.noise import CountedTokens, Noise, NoisyDraws
from sinklens.experiments.nll.pairs import PromptAnswer
from sinklens.experiments.nll.result import Likelihood, ValueKind
from sinklens.experiments.nll.shared_prefix import logits_after, prefix_length, shares_prefixes
from sinklens.model import Model


@dataclass(frozen=True)
class _Part:
    """The draws of one block of an answer.

    Attributes:
        pair: index of the pair.
        number: of the block, from 0.
        start, stop: the block's tokens in the answer.
        draws: their noisy forms.
    """

    pair: int
    number: int
    start: int
    stop: int
    draws: NoisyDraws


@dataclass(frozen=True)
class _Row:
    """One distinct noisy form of a part, and the draws that have it.

    Attributes:
        before: tokens of prompt and answer that precede `clean`: the prompt, or the complete blocks that rows share.
        clean: the tokens from there to the end of the part.
    """

    part: _Part
    draws: tuple[int, ...]
    before: tuple[int, ...]
    clean: tuple[int, ...]

    @property
    def noisy(self) -> list[int]:
        """`clean`, with the noisy tokens of the part."""
        tokens = self.part.draws.tokens[self.draws[0]].tolist()
        return [*self.clean[: len(self.clean) - len(tokens)], *tokens]

    @property
    def counted(self) -> list[bool]:
        """The tokens of `clean` whose loss counts."""
        counted = self.part.draws.counted[self.draws[0]].tolist()
        return [False] * (len(self.clean) - len(counted)) + counted

    @property
    def shape(self) -> tuple[bool, int]:
        """What the rows of a batch have in common."""
        return bool(self.before), len(self.clean)


def bounds(
    passes: HookedPass, noise: Noise, pairs: Sequence[PromptAnswer], rule: DrawRule, batches: Batches
) -> list[Likelihood]:
    """The bound of each pair."""
    parts = [part for number, pair in enumerate(pairs) for part in _parts(passes.model, noise, number, pair, rule)]
    rows = [row for part in parts for row in _rows(passes, noise, pairs[part.pair], part) if any(row.counted)]
    rows.sort(key=lambda row: (row.shape, len(row.before), row.before, row.part.pair, row.part.number))
    most = {pair: max(len(part.draws.weights) for part in parts if part.pair == pair) for pair in range(len(pairs))}
    losses = [np.full((most[number], len(pair.answer)), np.nan) for number, pair in enumerate(pairs)]
    for _, same in groupby(rows, key=lambda row: row.shape):

        def work(batch: Sequence[_Row]) -> None:
            _compute(passes, noise, batch, losses)

        batches.run(list(same), lambda row: len(row.before) + len(row.clean), work)
    return [
        _result(pair, [part for part in parts if part.pair == number], losses[number], rule)
        for number, pair in enumerate(pairs)
    ]


def block_ends(model: Model, pair: PromptAnswer) -> list[int]:
    """Where the blocks of an answer end, in its tokens; a single one unless the model is block-causal."""
    blocks, length = blocks_of_text(model), len(pair.answer)
    if blocks is None:
        return [length]
    before = len(pair.prompt) % blocks.length if blocks.start == "token" else 0
    return [*range(blocks.length - before, length, blocks.length), length]


def _parts(model: Model, noise: Noise, number: int, pair: PromptAnswer, rule: DrawRule) -> Iterator[_Part]:
    """The blocks of one answer."""
    ends = block_ends(model, pair)
    for block, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        draws = noise.draw(rule, pair.prompt, torch.tensor(pair.answer[start:stop]), block)
        yield _Part(number, block, start, stop, draws)


def _rows(passes: HookedPass, noise: Noise, pair: PromptAnswer, part: _Part) -> Iterator[_Row]:
    """The distinct noisy forms of a part."""
    text, before = (*pair.prompt, *pair.answer[: part.stop]), len(pair.prompt)
    if shares_prefixes(passes):
        before = prefix_length(passes.model, before + part.start)
    found: dict[tuple[object, ...], list[int]] = {}
    times = noise.read(part.draws)
    for draw, tokens in enumerate(part.draws.tokens.tolist()):
        found.setdefault((*tokens, None if times is None else float(times[draw])), []).append(draw)
    for draws in found.values():
        yield _Row(part, tuple(draws), text[:before], text[before:])


def _compute(passes: HookedPass, noise: Noise, batch: Sequence[_Row], losses: list[np.ndarray]) -> None:
    """Write the losses of the counted tokens of `batch` into `losses`."""
    model = passes.model
    noisy, clean = (
        torch.tensor(ids, device=model.cfg.device)
        for ids in ([row.noisy for row in batch], [row.clean for row in batch])
    )
    counted = torch.tensor([row.counted for row in batch], device=noisy.device)
    levels, times = _times(noise, batch, counted)
    if shares_prefixes(passes):
        logits = logits_after(model, [row.before for row in batch], noisy, counted)
    else:
        ids, real = model.reader.padded([[*row.before, *row.clean] for row in batch])
        length = ids.shape[1] - noisy.shape[1]
        logits = passes.logits(MaskedRows(ids[:, :length], real[:, :length], noisy, counted, levels))
    lost = noise.losses(logits, CountedTokens(clean[counted], noisy[counted], times)).double().cpu().numpy()
    places = np.split(lost, np.cumsum(counted.sum(dim=1).cpu().numpy())[:-1])
    for row, values in zip(batch, places, strict=True):
        columns = row.part.stop - len(row.clean) + np.flatnonzero(row.counted)
        losses[row.part.pair][np.array(row.draws)[:, None], columns] = values


def _times(
    noise: Noise, batch: Sequence[_Row], counted: Bool[torch.Tensor, "row pos"]
) -> tuple[Float[torch.Tensor, " row"] | None, Float[torch.Tensor, " token"] | None]:
    """What the network reads of each row's time, and the time of each counted token."""
    read = [noise.read(row.part.draws) for row in batch]
    found = [times[row.draws[0]] for times, row in zip(read, batch, strict=True) if times is not None]
    if not found:
        return None, None
    times = torch.stack(found).to(counted.device)
    return noise.level(times).float(), times.repeat_interleave(counted.sum(dim=1))


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
