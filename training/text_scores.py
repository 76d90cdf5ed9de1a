"""The loss of a text model on documents that it never saw, in nats per token.

A held-out document is cut into consecutive windows of the recipe's length. For a causal model the loss of a window is
its mean next-token cross-entropy. For a masked model it is an unbiased estimate of the bound on it: the number of
masked tokens k is drawn uniformly from 1 to L, k random tokens are masked, and the cross-entropy is averaged over them
(LLaDA, 2502.09992, Eq. 6). A bound is at least the true loss, so compare only models of one kind.

Windows of a document resemble each other, and documents of a source too. The interval is therefore a bootstrap over
documents; it says nothing about other sources.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import SinklensError
from sinklens.model import load
from sinklens.utils.atomic import atomic_write
from training.recipes import Recipe
from training.text import read_documents
from training.text_windows import DOCUMENTS, document_ids, text_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sinklens.model import Model

RESAMPLES = 2_000


@dataclass(frozen=True)
class HeldOut:
    """Windows of held-out documents.

    Attributes:
        ids: tokens, start token first.
        document: the document of each window.
        source: the source of each document, by document.
    """

    ids: Int[Tensor, "window pos"]
    document: Sequence[str]
    source: dict[str, str]


@dataclass(frozen=True)
class TextScore:
    """Mean loss over windows.

    Attributes:
        nats: per token.
        low: lower end of the 95 % interval, from a bootstrap over documents.
        high: its upper end.
        windows: number of windows.
        documents: number of documents.
    """

    nats: float
    low: float
    high: float
    windows: int
    documents: int

    def __str__(self) -> str:
        counts = f"{self.windows} windows of {self.documents} documents"
        return f"{self.nats:.3f} [{self.low:.3f}, {self.high:.3f}] nats per token, {counts}"


def held_out(
    recipe: Recipe,
    documents: Path = DOCUMENTS,
    per_document: int = 4,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
) -> HeldOut:
    """The first `per_document` windows of every held-out document; remainders shorter than a window are left out.

    Args:
        tokenizer: by default the one that belongs to the file of documents. That of a checkpoint that was trained on
            other documents has other ids.

    Raises:
        SinklensError: there is no file of documents, or none of its documents is held out and long enough.
    """
    tokenizer = tokenizer or text_tokenizer(recipe, documents)
    windows, names, sources = [], [], {}
    length, start = recipe.windows, torch.tensor(tokenizer("").input_ids, dtype=torch.long)
    for document in read_documents(documents):
        if not document.held_out:
            continue
        ids = torch.from_numpy(document_ids(tokenizer, document.text)).long()
        if len(ids) < length:
            continue
        for part in ids.unfold(0, length - len(start), length - len(start))[:per_document]:
            windows.append(torch.cat([start, part]))
            names.append(f"{document.source}/{document.name}")
            sources[names[-1]] = document.source
    if not windows:
        raise SinklensError(f"{documents} has no held-out document of {recipe.windows} tokens; gather the text again.")
    return HeldOut(torch.stack(windows), names, sources)


def score_checkpoint(recipe: Recipe, checkpoint: Path) -> TextScore:
    """The score of a checkpoint of `recipe` on held-out documents.

    Raises:
        SinklensError: see `held_out`.
    """
    rows = held_out(recipe)
    return score(window_losses(load(checkpoint), rows.ids), rows.document)


@torch.no_grad()
def window_losses(
    model: "Model", ids: Int[Tensor, "window pos"], seed: int = 0, batch: int = 32
) -> Float[Tensor, " window"]:
    """The loss of each window in nats per token: exact for a causal model, estimated for a masked one."""
    return torch.cat(list(_losses(model, ids, torch.Generator().manual_seed(seed), batch)))


def _losses(
    model: "Model", ids: Int[Tensor, "window pos"], generator: torch.Generator, batch: int
) -> Iterator[Float[Tensor, " batch"]]:
    for part in ids.split(batch):
        if model.mask_token_id is None:
            logits, targets = model(part).float()[:, :-1], part[:, 1:]
            yield F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
            continue
        masked = random_masks(part, generator)
        logits = model(part.masked_fill(masked, model.mask_token_id)).float()
        losses = F.cross_entropy(logits.transpose(1, 2), part, reduction="none")
        yield (losses * masked).sum(dim=1) / masked.sum(dim=1)


def random_masks(ids: Int[Tensor, "batch pos"], generator: torch.Generator) -> Tensor:
    """k random positions of each row, k uniform from 1 to the row's length without the start token, which stays."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    counts = torch.randint(1, length + 1, (rows, 1), generator=generator)
    ranks = torch.rand(rows, length, generator=generator).argsort(dim=1).argsort(dim=1)
    return F.pad(ranks < counts, (1, 0), value=False)


def score(losses: Float[Tensor, " window"], document: Sequence[str], seed: int = 0) -> TextScore:
    """The mean over windows and its interval over documents; NaN for the interval of one document."""
    from scipy.stats import bootstrap

    names, where = np.unique(np.array(document), return_inverse=True)
    sums = np.bincount(where, weights=losses.double().numpy())
    counts = np.bincount(where)
    low = high = float("nan")
    if len(names) > 1:
        low, high = bootstrap(
            (sums, counts), _mean_loss, paired=True, n_resamples=RESAMPLES, method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    return TextScore(losses.mean().item(), float(low), float(high), len(losses), len(names))


def _mean_loss(sums: np.ndarray, counts: np.ndarray, axis: int) -> np.ndarray:
    return np.asarray(sums.sum(axis=axis) / counts.sum(axis=axis))


def write_windows(
    file: Path, recipe: Recipe, documents: Path = DOCUMENTS, tokenizer: "PreTrainedTokenizerFast | None" = None
) -> int:
    """Write the first window of every held-out document as JSON Lines of token ids, and return their number.

    The ids are those of `tokenizer` (see `held_out`); a model with another one reads other tokens.

    The documents are in random order, always the same, so the first lines are a sample of all. Each line has
    ``prompt``, ``document`` and ``source``; the study ``texts`` reads it.

    Raises:
        SinklensError: see `held_out`.
    """
    rows = held_out(recipe, documents, 1, tokenizer)
    lines = [
        json.dumps({"prompt": ids, "document": name, "source": rows.source[name]})
        for ids, name in zip(rows.ids.tolist(), rows.document, strict=True)
    ]
    random.Random(0).shuffle(lines)
    with atomic_write(file) as partial:
        partial.write_text("\n".join(lines) + "\n")
    return len(lines)


if __name__ == "__main__":
    from transformers import PreTrainedTokenizerFast

    from sinklens.model.files import find_checkpoint
    from training.recipes import RECIPES

    file, name, length = *sys.argv[1:], *("tiny-text", "128")[len(sys.argv) - 2 :]
    checkpoint = find_checkpoint(name)
    reader = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    number = write_windows(Path(file), replace(RECIPES["tiny-text"], windows=int(length)), tokenizer=reader)
    print(f"{number} windows in {file}, in tokens of {checkpoint}")
