"""Prompts as token ids: what is taken, and how it becomes one batch.

A *prompt* is text, several texts, token ids of one row or of several, or what a tokenizer returned. `PromptReader.read`
gives its ids and which of them are *real*, not padding, each where it was. `PromptReader.encode` moves the real tokens
of every row to the right end, because a run appends its answer there.

How it could fail silently: ids alone cannot say which of them are padding. An array with rows that begin with the
padding token, as `Model.to_tokens` gives it for several texts, is refused without its attention mask.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import PromptError, nearest


class Encoded(NamedTuple):
    """A prompt as a batch of token ids, and a prompt itself.

    Attributes:
        ids: token ids, padding included.
        real: False on padding.
    """

    ids: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]


Prompt: TypeAlias = (
    str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor | np.ndarray
    | Mapping[str, Any] | Encoded
)  # fmt: skip
ALLOWED = (
    "a prompt is a text, a list of texts, token ids ([pos], [batch, pos] or lists of any lengths), or what a tokenizer "
    "returns, a dict with input_ids"
)
MARKS = "attention_mask is 1 on real tokens and 0 on padding, of the shape of the ids"
UNUSED = ("token_type_ids", "special_tokens_mask", "offset_mapping", "length")  # of a tokenizer's output


@dataclass(frozen=True)
class PromptReader:
    """What reading a prompt needs to know of a model.

    Attributes:
        name: of the model, for messages.
        tokenizer: None where there is none.
        size: of the vocabulary.
        pad: the token that pads.
        device: where ids go.
    """

    name: str
    tokenizer: Any
    size: int
    pad: int
    device: torch.device

    def encode(self, prompt: Prompt, chat_template: bool | str = False, prepend_bos: bool | None = None) -> Encoded:
        """Ids left-padded to one length, and which are real.

        Raises:
            PromptError: empty, neither text nor token ids, out of the vocabulary, padded without an attention mask, or
                text without a tokenizer.
        """
        given = self.read(prompt, chat_template, prepend_bos)
        if _unmarked(prompt):
            self._refuse_padding(given.ids.flip(1), "end", lone=given.ids.shape[1] + 1)
        starts = given.real[:, 0].long() + (given.real.long().diff(dim=1) == 1).sum(dim=1)
        if not bool((starts == 1).all()):
            raise PromptError(
                f"attention_mask has a row in which the real tokens are not one stretch "
                f"({given.real[starts != 1][0].long().tolist()}); padding is before or behind them."
            )
        if bool(given.real[:, -1].all()):
            return given
        return self.left_padded([row[keep].tolist() for row, keep in zip(given.ids, given.real, strict=True)])

    def read(
        self,
        prompt: Prompt,
        chat_template: bool | str = False,
        prepend_bos: bool | None = None,
        mask: Any = None,
    ) -> Encoded:
        """Ids and which are real, padded where the prompt is; rows of different lengths are left-padded.

        Args:
            prompt: text or ids.
            chat_template: of text: put it as one user turn through the tokenizer's template, or through this one.
            prepend_bos: of text: with a start token, or without.
            mask: attention mask of ids that come without one.

        Raises:
            PromptError: as `encode`.
        """
        texts = _texts(prompt)
        if mask is not None:
            if texts is not None or isinstance(prompt, Mapping | Encoded):
                raise PromptError("attention_mask= is for token ids; text and a tokenizer's output bring their own.")
            prompt = {"input_ids": prompt, "attention_mask": mask}
        if texts is not None:
            return self.left_padded([self._row(text, chat_template, prepend_bos) for text in texts])
        if chat_template is not False or prepend_bos:
            asked = "prepend_bos=True" if prepend_bos else f"chat_template={chat_template!r}"
            raise PromptError(f"{asked} is for text, and token ids are taken as they are; leave it out, or give text.")
        ids = prompt
        if isinstance(prompt, Encoded):
            ids, mask = prompt
        elif isinstance(prompt, Mapping):
            _check_keys(prompt)
            ids, mask = prompt["input_ids"], prompt.get("attention_mask")
        found = self._ids(ids)
        if _unmarked(prompt):
            self._refuse_padding(found.ids, "begin", lone=2)
        return found if mask is None else Encoded(found.ids, found.real & marks(mask, found.real))

    def id_rows(self, given: Any) -> list[list[int]]:
        """Rows of token ids as they are; -1, a position that does not exist yet, may be among them.

        Raises:
            PromptError: not token ids, or out of the vocabulary.
        """
        rows = _array(given).tolist() if isinstance(given, Tensor | np.ndarray) else _rows(given)
        low, high = min(min(row) for row in rows), max(max(row) for row in rows)
        self._check_range(max(low, 0) if low == -1 else low, high)
        return rows

    def left_padded(self, rows: Sequence[list[int]]) -> Encoded:
        """Rows of token ids as one batch."""
        for row in rows:
            self._check_range(min(row), max(row))
        length = max(len(row) for row in rows)
        ids = torch.tensor([[self.pad] * (length - len(row)) + row for row in rows])
        real = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
        return Encoded(ids.to(self.device), real.to(self.device))

    def _ids(self, given: Any) -> Encoded:
        """Token ids that were given as such."""
        if not isinstance(given, Tensor | np.ndarray):
            return self.left_padded(_rows(given))
        ids = _array(given).to(self.device)
        self._check_range(int(ids.min()), int(ids.max()))
        return Encoded(ids, torch.ones_like(ids, dtype=torch.bool))

    def _check_range(self, low: int, high: int) -> None:
        if low < 0 or high >= self.size:
            raise PromptError(
                f"token ids run from {low} to {high}; this model's vocabulary is 0 to {self.size - 1}. "
                f"Was another tokenizer used?"
            )

    def _refuse_padding(self, ids: Int[Tensor, "batch pos"], side: str, lone: int) -> None:
        """Refuse rows that look padded: they begin with unequally many padding tokens, or all with `lone` or more."""
        if self.tokenizer is None:
            return  # what pads is not known
        runs = (ids == self.pad).long().cumprod(dim=1).sum(dim=1)
        if bool((runs != runs[0]).any()) or int(runs[0]) >= lone:
            raise PromptError(
                f"rows of these ids {side} with {int(runs.min())} to {int(runs.max())} tokens {self.pad}, which pads; "
                f"ids alone do not say whether that is padding. Give a dict with input_ids and attention_mask, "
                f"as the tokenizer returns it, or the texts themselves."
            )

    def _row(self, text: str, chat_template: bool | str, prepend_bos: bool | None) -> list[int]:
        """Token ids of one text."""
        if self.tokenizer is None:
            raise PromptError(
                f"{self.name} came without a tokenizer, so it takes token ids [batch, pos], not text; "
                f"or load it with sinklens.load(..., tokenizer=...)."
            )
        if not text:
            raise PromptError("the prompt is empty; give at least one character.")
        if chat_template is False:
            ids = self._with_start(text, prepend_bos)
        elif prepend_bos is not None:
            raise PromptError("a chat template decides on the start token; leave prepend_bos out.")
        else:
            ids = self._in_template(text, chat_template)
        if not ids:
            raise PromptError(f"the tokenizer of {self.name} makes no token of {text!r}; give other text.")
        return ids

    def _with_start(self, text: str, prepend_bos: bool | None) -> list[int]:
        """Token ids of `text`; the start token is there as asked, else as the tokenizer has it, and never twice."""
        ids, start = list(self.tokenizer(text).input_ids), self.tokenizer.bos_token_id
        if start is None:
            if prepend_bos:
                raise PromptError(f"the tokenizer of {self.name} has no start token; leave prepend_bos=True out.")
            return ids
        added = ids[:1] == [start] and len(ids) > len(self.tokenizer(text, add_special_tokens=False).input_ids)
        if added and (prepend_bos is False or ids[1:2] == [start]):
            return ids[1:]
        return [start, *ids] if prepend_bos and ids[:1] != [start] else ids

    def _in_template(self, text: str, chat_template: bool | str) -> list[int]:
        """Token ids of `text` as one user turn."""
        template = self.tokenizer.chat_template if chat_template is True else chat_template
        if template is None and chat_template is True:
            raise PromptError(f"chat_template=True, but the tokenizer of {self.name} has none; give one as a string.")
        if not isinstance(chat_template, bool | str) or (isinstance(template, str) and "{{" not in template):
            raise PromptError(
                f"chat_template is True, False, or a template as a string with {{{{ messages }}}} in it; "
                f"got {chat_template!r}."
            )
        turns = [{"role": "user", "content": text}]
        made = self.tokenizer.apply_chat_template(
            turns, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(made["input_ids"])


def marks(mask: Any, real: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """An attention mask as booleans.

    Args:
        mask: 1 or True on real tokens, 0 or False on padding; a tensor, an array, or lists.
        real: of the ids that it belongs to. Rows of lists are as long as its rows.

    Raises:
        PromptError: another shape, or other numbers, as in a mask that is added to scores.
    """
    lists = isinstance(mask, list | tuple) and all(isinstance(row, list | tuple) for row in mask)
    if lists and [len(row) for row in mask] == real.sum(dim=1).tolist():
        mask = [[0] * (real.shape[1] - len(row)) + list(row) for row in mask]
    try:
        found = torch.atleast_2d(torch.as_tensor(mask))
    except (TypeError, ValueError, RuntimeError):
        raise PromptError(f"{MARKS}, {list(real.shape)}; got {mask!r:.60} ({type(mask).__name__}).") from None
    if found.shape != real.shape:
        raise PromptError(f"{MARKS}, {list(real.shape)}; got {list(found.shape)}.")
    if not bool(((found == 0) | (found == 1)).all()):
        raise PromptError(f"{MARKS}; it holds numbers from {found.min().item()} to {found.max().item()}.")
    if not bool(found.any(dim=1).all()):
        raise PromptError(f"{MARKS}; a row of it has no real token.")
    return found.to(real.device).bool()


def _unmarked(prompt: Any) -> bool:
    """Whether ids come as an array, which may be padded, without an attention mask."""
    if isinstance(prompt, Mapping) and prompt.get("attention_mask") is None:
        prompt = prompt.get("input_ids")
    return isinstance(prompt, Tensor | np.ndarray)


def _texts(prompt: Any) -> list[str] | None:
    """The texts of a prompt; None where it is something else."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, Sequence) and len(prompt) and all(isinstance(text, str) for text in prompt):
        return list(prompt)
    return None


def _check_keys(prompt: Mapping[str, Any]) -> None:
    known = ("input_ids", "attention_mask", *UNUSED)
    for key in prompt:
        if key not in known:
            raise PromptError(
                f"a prompt that is a dict holds input_ids and attention_mask; got {key!r}.{nearest(str(key), known)}"
            )
    if "input_ids" not in prompt:
        raise PromptError(f"a prompt that is a dict holds input_ids; got {', '.join(prompt) or 'an empty one'}.")


def _rows(given: Any) -> list[list[int]]:
    """Rows of token ids given as lists.

    Raises:
        PromptError: they are not.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise PromptError(f"{ALLOWED}; got {given!r:.60} ({type(given).__name__}).")
    if not len(given):
        raise PromptError("the list of prompts is empty; give at least one.")
    one = _row_of(given)
    rows = [_row_of(entry) for entry in given] if one is None else [one]
    if any(row == [] for row in rows):
        raise PromptError(f"row {rows.index([])} of the token ids is empty; give at least one token.")
    if any(row is None for row in rows):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in given}))
        turns = " For chat turns give the text of the turn and chat_template=True." if kinds == "dict" else ""
        raise PromptError(f"{ALLOWED}; got a list of {kinds}.{turns}")
    return [row for row in rows if row is not None]


def _row_of(given: Any) -> list[int] | None:
    """One row of token ids; None if it is not."""
    if isinstance(given, Tensor | np.ndarray):
        ids = given if isinstance(given, Tensor) else _from_numpy(given)
        return ids.tolist() if ids.ndim == 1 and _is_integer(ids.dtype) else None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        return None
    row = [token_id(entry) for entry in given]
    return None if None in row else [token for token in row if token is not None]


def token_id(given: Any) -> int | None:
    """One token id; None if it is not, as True is not."""
    if isinstance(given, bool | np.bool_) or getattr(given, "ndim", 0) > 0:  # a tensor of one value is a row
        return None
    if isinstance(given, Tensor) and not _is_integer(given.dtype):
        return None
    try:
        return operator.index(given)
    except (TypeError, RuntimeError):
        return None


def _array(given: Tensor | np.ndarray) -> Int[Tensor, "batch pos"]:
    """Token ids given as an array, one row or several.

    Raises:
        PromptError: no whole numbers, no token, or more axes.
    """
    ids = given if isinstance(given, Tensor) else _from_numpy(given)
    if not _is_integer(ids.dtype) or ids.ndim not in (1, 2) or ids.numel() == 0:
        raise PromptError(
            f"token ids are a non-empty integer tensor [pos] or [batch, pos]; "
            f"got {ids.dtype} of shape {list(ids.shape)}."
        )
    return torch.atleast_2d(ids.long())


def _from_numpy(given: np.ndarray) -> Tensor:
    if given.dtype.kind in "iu":
        return torch.from_numpy(given.astype(np.int64))
    if given.dtype.kind in "bf":
        return torch.from_numpy(given)
    raise PromptError(f"{ALLOWED}; got an array of {given.dtype}.")


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
