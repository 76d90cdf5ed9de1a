"""Bounds of diffusion models: passes over noisy answers.

A block-causal model is evaluated block by block: earlier blocks of the answer are given, tokens of one block are noisy,
and later blocks, which the block would not see, are left out. The bound is the sum over the blocks. If a block begins
with tokens of the prompt, only its answer tokens are noisy. Rows share the blocks before their own (hooked_pass.py).

A noisy answer that is drawn twice (with the same tokens masked and, if the network reads it, the same noise level) is
computed once. All rows of a batch have the same number of tokens after the prompt, or after the shared blocks; only
what precedes these tokens is padded.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinklens.experiments.nll.hooked_pass import HookedPass, blocks_of_text, in_batches, logits_after, prefix_length
from sinklens.experiments.nll.noise import DrawRule, MaskNoise, NoisyDraws, TimedNoise
from sinklens.experiments.nll.result import Likelihood, PromptAnswer
from sinklens.model import Model


class _Row(NamedTuple):
    """One distinct noisy form of a block of an answer.

    Attributes:
        before: tokens of prompt and answer that precede `clean`: the prompt, or the complete blocks that rows share.
        clean: the tokens from there to the end of the block.
        noisy: the same with the noisy tokens.
        counted: the tokens of `clean` whose loss counts.
        time: its time, if the losses depend on it.
        losses: where its losses belong: those of the pair, the draws that have this form, and the columns.
    """

    before: tuple[int, ...]
    clean: tuple[int, ...]
    noisy: list[int]
    counted: list[bool]
    time: Tensor | None
    losses: tuple[np.ndarray, np.ndarray, np.ndarray]

    @property
    def shape(self) -> tuple[bool, int]:
        """What the rows of a batch have in common."""
        return bool(self.before), len(self.clean)


def bounds(
    passes: HookedPass, noise: MaskNoise, pairs: Sequence[PromptAnswer], rule: DrawRule, most: int | None
) -> list[Likelihood]:
    """The bound of each pair, in passes of at most `most` rows."""
    found, rows = [], list[_Row]()
    for pair in pairs:
        ends = block_ends(passes.model, pair)
        spans = list(zip([0, *ends], ends, strict=False))
        blocks = np.repeat(np.arange(len(spans)), [stop - start for start, stop in spans])
        draws = [
            noise.draw(rule, pair.prompt, torch.tensor(pair.answer[start:stop]), block)
            for block, (start, stop) in enumerate(spans)
        ]
        shape = max(len(drawn.weights) for drawn in draws), len(pair.answer)
        losses, shares, weights = np.full(shape, np.nan), np.ones(shape), np.zeros(shape)
        for (start, stop), drawn in zip(spans, draws, strict=True):
            shares[: len(drawn.shares), start:stop] = drawn.shares.numpy()[:, None]
            weights[: len(drawn.shares), start:stop] = drawn.weights.numpy()[:, None]
            rows += _rows(passes, noise, pair, start, stop, drawn, losses)
        found.append((pair.answer, losses, shares, weights, blocks))
    rows.sort(key=lambda row: (row.shape, len(row.before), row.before))

    work = partial(_compute, passes, noise)
    for _, same in groupby(rows, key=lambda row: row.shape):
        most = in_batches(list(same), lambda row: len(row.before) + len(row.clean), work, most)
    return [Likelihood("bound" if rule.exact else "estimate", *one, rule.draws_per_start) for one in found]


def block_ends(model: Model, pair: PromptAnswer) -> list[int]:
    """Where the blocks of an answer end, in its tokens; a single one unless the model is block-causal."""
    blocks, length = blocks_of_text(model), len(pair.answer)
    if blocks is None:
        return [length]
    before = len(pair.prompt) % blocks.length if blocks.start == "token" else 0
    return [*range(blocks.length - before, length, blocks.length), length]


def _rows(
    passes: HookedPass,
    noise: MaskNoise,
    pair: PromptAnswer,
    start: int,
    stop: int,
    draws: NoisyDraws,
    losses: np.ndarray,
) -> Iterator[_Row]:
    """The distinct noisy forms of a block that have losses."""
    text, before = (*pair.prompt, *pair.answer[:stop]), len(pair.prompt)
    if passes.shares_prefixes:
        before = prefix_length(passes.model, before + start)
    same: dict[tuple[object, ...], list[int]] = {}
    times = draws.times if noise.timed else None
    for draw, (tokens, counted) in enumerate(zip(draws.tokens.tolist(), draws.counted.tolist(), strict=True)):
        same.setdefault((*tokens, *counted, None if times is None else float(times[draw])), []).append(draw)
    clean = text[before:]
    lead = len(clean) - (stop - start)
    for first, *others in same.values():
        counted = draws.counted[first]
        if counted.any():
            place = losses, np.array([first, *others])[:, None], start + counted.nonzero()[:, 0].numpy()
            noisy = [*clean[:lead], *draws.tokens[first].tolist()]
            time = None if times is None else times[first]
            yield _Row(text[:before], clean, noisy, [False] * lead + counted.tolist(), time, place)


def _compute(passes: HookedPass, noise: MaskNoise, batch: Sequence[_Row]) -> None:
    """Write the losses of the counted tokens of `batch`."""
    model, device = passes.model, passes.model.cfg.device
    noisy, clean, counted = (
        torch.tensor([getattr(row, name) for row in batch], device=device) for name in ("noisy", "clean", "counted")
    )
    levels = times = None
    if isinstance(noise, TimedNoise) and noise.timed:
        of_rows = torch.stack([row.time for row in batch if row.time is not None]).to(device)
        levels, times = noise.level(of_rows).float(), of_rows.repeat_interleave(counted.sum(dim=1))
    if passes.shares_prefixes:
        logits = logits_after(model, [row.before for row in batch], noisy, counted)
    else:
        ids, real = model.reader.padded([[*row.before, *row.clean] for row in batch])
        length = ids.shape[1] - noisy.shape[1]
        logits = passes.logits(ids[:, :length], real[:, :length], noisy, counted, levels)
    lost = noise.losses(logits, clean[counted], noisy[counted], times).double().cpu().numpy()
    places = np.split(lost, np.cumsum(counted.sum(dim=1).cpu().numpy())[:-1])
    for row, values in zip(batch, places, strict=True):
        losses, draws, columns = row.losses
        losses[draws, columns] = values
