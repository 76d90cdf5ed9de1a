"""Windows of English text: the rows that the text models are trained on and scored on.

The documents (text.py) are tokenized by a byte-level BPE tokenizer that was trained on those that are not held out, and
joined by end tokens. A *window* is a start token and the following tokens up to the recipe's length, at any place, so a
window can begin in the middle of a sentence and span two documents.

Tokenizer and ids are cached beside the file of documents. Pitfall: delete ``*.tokenizer.json`` and ``*.ids.npy`` after
gathering other text into the same file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sinklens.utils.atomic import atomic_write
from training.recipes import Recipe
from training.text import read_documents
from training.tokenizer import END, MASK, START, wrap_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DOCUMENTS = Path("runs/text/documents.jsonl")


def text_tokenizer(recipe: Recipe, documents: Path = DOCUMENTS) -> "PreTrainedTokenizerFast":
    """The tokenizer of the text models, trained on first use.

    Raises:
        SinklensError: there is no file of documents.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    file = documents.with_suffix(f".{recipe.vocabulary}.tokenizer.json")
    if not file.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=recipe.vocabulary,
            special_tokens=[END, MASK, START],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((d.text for d in read_documents(documents) if not d.held_out), trainer)
        with atomic_write(file) as part:
            tokenizer.save(str(part))
    return wrap_tokenizer(Tokenizer.from_file(str(file)), start=True)


@dataclass(frozen=True)
class TextCorpus:
    """Text as one row of ids, from which windows are drawn.

    Attributes:
        ids: tokens of all documents, each followed by an end token; int32.
        length: tokens of a window, the start token included.
        start_id: the start token.
    """

    ids: Int[Tensor, " token"]
    length: int
    start_id: int

    def batch(
        self, seed: int, step: int, size: int, problems_only: bool = False
    ) -> tuple[int, Int[Tensor, "batch pos"]]:
        """The number of tokens that are never masked and the windows of one step; they depend only on the arguments."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.ids) - self.length, (size, 1), generator=generator)
        windows = self.ids[starts + torch.arange(self.length)].long()
        windows[:, 0] = self.start_id
        return 1, windows


def text_corpus(tokenizer: "PreTrainedTokenizerFast", recipe: Recipe, documents: Path = DOCUMENTS) -> TextCorpus:
    """The training text, tokenized on first use.

    Raises:
        SinklensError: there is no file of documents.
    """
    file = documents.with_suffix(f".{recipe.vocabulary}.ids.npy")
    if not file.exists():
        texts = [document.text for document in read_documents(documents) if not document.held_out]
        with atomic_write(file) as part:
            np.save(part, np.concatenate([document_ids(tokenizer, text) for text in texts]))
    ids = torch.from_numpy(np.load(file))
    assert tokenizer.bos_token_id is not None
    return TextCorpus(ids, recipe.windows, tokenizer.bos_token_id)


def document_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """The tokens of a document and an end token."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)
