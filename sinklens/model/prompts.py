"""Prompts as token ids: which inputs are accepted, and how they become one batch.

A *prompt* is text, several texts, one or more rows of token ids, or a tokenizer's output. `PromptReader.read` returns
its ids and which of them are *real* (not padding), with the padding left in place. `PromptReader.encode` shifts the
real tokens of every row to the right end, where a run appends its answer.

Silent failure: ids alone do not show which of them are padding. An array whose rows begin with the padding token is
rejected unless it comes with an attention mask, or carries its padding as the ids of `Model.to_tokens` do. Rows that
end with that token may simply end there; a pass over them gives a warning.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinklens.errors import PromptError, PromptWarning, nearest, require, warn_caller
from sinklens.hooks.padded import PaddedIds
from sinklens.model.templates import render
from sinklens.utils.arguments import Unread
from sinklens.utils.integers import as_integer

TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
"""The files of a checkpoint that may hold a chat template; the first one counts."""


class Encoded(NamedTuple):
    """A prompt as a batch of token ids; accepted wherever a prompt is.

    Attributes:
        ids: token ids, including padding.
        real: False on padding.
    """

    ids: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]


SinglePrompt: TypeAlias = str | Sequence[int] | Tensor | np.ndarray  # one row: a text or its token ids
Prompt: TypeAlias = Annotated[SinglePrompt | Sequence[SinglePrompt] | Mapping[str, Any] | Encoded, Unread]
ALLOWED = (
    "a prompt is a text, a list of texts, token ids ([pos], [batch, pos] or lists of any lengths), or a tokenizer's "
    "output, a dict with input_ids"
)
MARKS = "attention_mask is 1 on real tokens and 0 on padding, and has the shape of the ids"
UNUSED = (  # ignored keys of the output of a tokenizer or processor
    "token_type_ids", "mm_token_type_ids", "special_tokens_mask", "offset_mapping", "length",
)  # fmt: skip


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for one model.

    Attributes:
        name: name of the model, for messages.
        tokenizer: None if the model has none.
        size: size of the vocabulary.
        pad: id of the padding token.
        device: device of the returned ids.
        refused: token ids that prompts must not contain, and what they stand for.
        unconditional: whether a row may have no tokens, for a model that also generates without a prompt.
    """

    name: str
    tokenizer: Any
    size: int
    pad: int
    device: torch.device
    refused: Mapping[int, str] = field(default_factory=dict)
    unconditional: bool = False

    def encode(self, prompt: Prompt, chat_template: bool | str = False, prepend_bos: bool | None = None) -> Encoded:
        """Ids left-padded to equal length, and which are real.

        Raises:
            PromptError: the prompt is empty, neither text nor token ids, outside the vocabulary, padded without an
                attention mask, or text without a tokenizer.
        """
        if isinstance(prompt, Encoded) and not prompt.ids.shape[1] and len(prompt.ids):
            return Encoded(prompt.ids.to(self.device), prompt.real.to(self.device))  # made without tokens on purpose
        given = self.read(prompt, chat_template, prepend_bos)
        if _unmarked(prompt):
            self._refuse_padding(given.ids.flip(1), "end", lone=given.ids.shape[1] + 1)
        for token, what in self.refused.items():
            if places := ((given.ids == token) & given.real).nonzero().tolist():
                raise PromptError(
                    f"prompt {places[0][0]} contains the {what} token ({token}) at position {places[0][1]}, but "
                    f"sinklens reads text only; pass a prompt without {what}s."
                )
        starts = given.real[:, :1].long().sum(dim=1) + (given.real.long().diff(dim=1) == 1).sum(dim=1)
        scattered = (starts > 1) | ((starts == 0) & (not self.unconditional))
        if bool(scattered.any()):
            raise PromptError(
                f"attention_mask has a row whose real tokens are not contiguous "
                f"({given.real[scattered][0].long().tolist()}); padding must be before or after them."
            )
        if bool(given.real[:, -1:].all()):
            return given
        return self.padded([row[keep].tolist() for row, keep in zip(given.ids, given.real, strict=True)])

    def read(
        self,
        prompt: Prompt,
        chat_template: bool | str = False,
        prepend_bos: bool | None = None,
        mask: Any = None,
        side: str = "left",
    ) -> Encoded:
        """Ids and which are real, with the prompt's padding in place.

        Args:
            prompt: text or ids.
            chat_template: for text: format it as one user turn with the tokenizer's template, or with this one.
            prepend_bos: for text: with or without a start token.
            mask: attention mask for ids that come without one.
            side: where texts or rows of different lengths are padded, "left" or "right".

        Raises:
            PromptError: as in `encode`.
        """
        texts = _texts(prompt)
        if mask is not None:
            require(
                texts is None and not isinstance(prompt, Mapping | Encoded),
                "attention_mask= is only for token ids; text and a tokenizer's output already have one.",
                PromptError,
            )
            prompt = {"input_ids": prompt, "attention_mask": mask}
        if texts is not None:
            return self.padded([self._row(text, chat_template, prepend_bos) for text in texts], side)
        if chat_template is not False or prepend_bos:
            setting = "prepend_bos=True" if prepend_bos else f"chat_template={chat_template!r}"
            raise PromptError(f"{setting} is only for text; token ids are used unchanged. Leave it out, or pass text.")
        ids = prompt
        if isinstance(prompt, Encoded):
            ids, mask = prompt
        elif isinstance(prompt, Mapping):
            known = ("input_ids", "attention_mask", *UNUSED)
            for key in prompt:
                require(
                    key in known,
                    f"a dict prompt has input_ids and attention_mask; got {key!r}.{nearest(str(key), known)}",
                    PromptError,
                )
            require(
                "input_ids" in prompt,
                f"a dict prompt needs input_ids; got {', '.join(prompt) or 'an empty dict'}.",
                PromptError,
            )
            ids, mask = prompt["input_ids"], prompt.get("attention_mask")
        if mask is None and isinstance(ids, PaddedIds):
            require(
                not ids.written(),
                f"a token was written over the padding of these ids (token {ids.pad}), where it would be ignored; "
                f"pass attention_mask= with 1 on it, or the texts themselves.",
                PromptError,
            )
            mask = ids.is_real
        found = self._ids(ids, side)
        if _unmarked(prompt):
            self._refuse_padding(found.ids, "begin", lone=2)
        return found if mask is None else Encoded(found.ids, found.real & marks(mask, found.real))

    def id_rows(self, given: Any) -> list[list[int]]:
        """Rows of token ids, unchanged; -1, a position that does not exist yet, is allowed.

        Raises:
            PromptError: `given` is not token ids, or has ids outside the vocabulary.
        """
        rows = _array(given).tolist() if isinstance(given, Tensor | np.ndarray) else _rows(given)
        low, high = min(min(row) for row in rows), max(max(row) for row in rows)
        self._check_range(max(low, 0) if low == -1 else low, high)
        return rows

    def padded(self, rows: Sequence[list[int]], side: str = "left") -> Encoded:
        """Rows of token ids as one batch, padded on the "left" or the "right"."""
        for row in filter(None, rows):
            self._check_range(min(row), max(row))
        pad = partial(pad_sequence, batch_first=True, padding_side=side)
        ids = pad([torch.tensor(row, dtype=torch.long) for row in rows], padding_value=self.pad)
        real = pad([torch.ones(len(row), dtype=torch.bool) for row in rows], padding_value=False)
        return Encoded(ids.to(self.device), real.to(self.device))

    def warn_right_padding(self, prompt: Any, given: Encoded) -> None:
        """Warn if ids without a mask look padded on the right: some rows end with the padding token, one does not."""
        if self.tokenizer is None or not _unmarked(prompt):
            return
        runs = _leading(given.ids.flip(1), self.pad)
        if int(runs.min()) == 0 < int(runs.max()):
            warn_caller(
                f"{int((runs > 0).sum())} of the {len(runs)} rows of these ids end with token {self.pad}, which is "
                f"padding or the end of the text; this pass reads it as text. Pass attention_mask= (0 on padding; 1 "
                f"everywhere if it is text), or the texts themselves.",
                PromptWarning,
            )

    def _ids(self, given: Any, side: str = "left") -> Encoded:
        """Token ids from an array or from lists."""
        if not isinstance(given, Tensor | np.ndarray):
            return self.padded(_rows(given, self.unconditional), side)
        ids = _array(given, self.unconditional).to(self.device)
        if ids.numel():
            self._check_range(int(ids.min()), int(ids.max()))
        return Encoded(ids, torch.ones_like(ids, dtype=torch.bool))

    def _check_range(self, low: int, high: int) -> None:
        require(
            low >= 0 and high < self.size,
            f"token ids range from {low} to {high}; this model's vocabulary is 0 to {self.size - 1}. "
            f"Do they come from another tokenizer?",
            PromptError,
        )

    def _refuse_padding(self, ids: Int[Tensor, "batch pos"], side: str, lone: int) -> None:
        """Reject rows that look padded: their counts of leading padding tokens differ, or are all `lone` or more."""
        runs = _leading(ids, self.pad)
        # without a tokenizer, the padding token is unknown
        if self.tokenizer is not None and (bool((runs != runs[0]).any()) or int(runs[0]) >= lone):
            raise PromptError(
                f"rows of these ids {side} with {int(runs.min())} to {int(runs.max())} tokens {self.pad}, the padding "
                f"token; ids alone do not show whether that is padding. Pass a dict with input_ids and attention_mask, "
                f"as the tokenizer returns it, or the texts themselves."
            )

    def _row(self, text: str, chat_template: bool | str, prepend_bos: bool | None) -> list[int]:
        """Token ids of one text."""
        require(
            self.tokenizer is not None,
            f"{self.name} has no tokenizer, so it accepts token ids [batch, pos], not text; "
            f"pass one with sinklens.load(..., tokenizer=...)"
            + (", or [[]] as the prompt, to generate without one." if not text and self.unconditional else "."),
            PromptError,
        )
        require(
            text or self.unconditional,
            "the prompt is empty; pass at least one character.",
            PromptError,
        )
        if broken := re.search("[\ud800-\udfff]", text):
            raise PromptError(
                f"character {broken.start()} of the prompt is {broken.group()!r}, half of a surrogate pair, which is "
                f"not text. Was it read with an encoding other than UTF-8?"
            )
        if chat_template is False:
            ids = self._with_start(text, prepend_bos)
        elif prepend_bos is not None:
            raise PromptError("a chat template determines the start token; leave prepend_bos out.")
        else:
            ids = self._in_template(text, chat_template)
        require(
            not text or ids,
            f"the tokenizer of {self.name} returns no tokens for {text!r}; pass other text.",
            PromptError,
        )
        return ids

    def _with_start(self, text: str, prepend_bos: bool | None) -> list[int]:
        """Token ids of `text`; `prepend_bos` decides on the start token, by default the tokenizer does. Never two."""
        ids, start = list(self.tokenizer(text).input_ids), self.tokenizer.bos_token_id
        if start is None:
            require(
                not prepend_bos,
                f"the tokenizer of {self.name} has no start token; leave prepend_bos=True out.",
                PromptError,
            )
            return ids
        if adds_start(self.tokenizer, text) and (prepend_bos is False or ids[1:2] == [start]):
            return ids[1:]
        return [start, *ids] if prepend_bos and ids[:1] != [start] else ids

    def _in_template(self, text: str, chat_template: bool | str) -> list[int]:
        """Token ids of `text` as one user turn."""
        own = chat_template is True
        template = self.tokenizer.chat_template if own else chat_template
        require(
            template is not None or not own,
            f"the tokenizer of {self.name} has no chat template. Leave chat_template (--chat) out; in Python you "
            f"can also pass a template as a string.",
            PromptError,
        )
        named = next((one for one in map(Path(self.tokenizer.name_or_path).joinpath, TEMPLATES) if one.is_file()), None)
        name = f" of {named or self.name}" * own
        require(
            not own or not isinstance(template, str) or "{{" in template,
            f"the chat template{name} lacks {{{{ messages }}}}: {template!r:.60}. Correct the file, or pass another "
            f"template as a string.",
            PromptError,
        )
        require(
            isinstance(chat_template, bool | str) and (own or "{{" in str(template)),
            f"chat_template must be True, False, or a template string that contains {{{{ messages }}}}; "
            f"got {chat_template!r}.",
            PromptError,
        )
        turns = [{"role": "user", "content": text}]
        only = template if isinstance(template, str) else None  # of several by name, the tokenizer takes its default
        return list(self.tokenizer(render(self.tokenizer, turns, only, name), add_special_tokens=False).input_ids)


def marks(mask: Any, real: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """An attention mask as booleans.

    Args:
        mask: 1 or True on real tokens, 0 or False on padding; a tensor, an array, or lists.
        real: which of the ids are real so far. A `mask` given as lists has the lengths of the unpadded rows.

    Raises:
        PromptError: the shape differs, or the mask has other values than 0 and 1, such as an additive mask for
            attention scores.
    """
    lists = isinstance(mask, list | tuple) and all(isinstance(row, list | tuple) for row in mask)
    if lists and [len(row) for row in mask] == real.sum(dim=1).tolist():
        mask = [[0] * (real.shape[1] - len(row)) + list(row) for row in mask]
    try:
        found = torch.atleast_2d(torch.as_tensor(mask))
    except (TypeError, ValueError, RuntimeError):
        raise PromptError(f"{MARKS}, {list(real.shape)}; got {mask!r:.60} ({type(mask).__name__}).") from None
    if found.shape != real.shape or not bool(((found == 0) | (found == 1)).all() & found.any(dim=1).all()):
        raise PromptError(
            f"{MARKS}, {list(real.shape)}, with a real token in each row; got {list(found.shape)}, "
            f"{found.tolist()!s:.60}."
        )
    return found.to(real.device).bool()


def adds_start(tokenizer: Any, text: str = "a") -> bool:
    """Whether a tokenizer adds its start token to a text."""
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None:
        return False
    ids = list(tokenizer(text).input_ids)
    return ids[:1] == [start] and len(ids) > len(tokenizer(text, add_special_tokens=False).input_ids)


def _unmarked(prompt: Any) -> bool:
    """Whether the prompt is an array of ids, which may be padded, without marks of its padding."""
    if isinstance(prompt, Mapping) and prompt.get("attention_mask") is None:
        prompt = prompt.get("input_ids")
    return isinstance(prompt, Tensor | np.ndarray) and not isinstance(prompt, PaddedIds)


def _leading(ids: Int[Tensor, "batch pos"], token: int) -> Int[Tensor, " batch"]:
    """How often each row repeats `token` at its beginning."""
    return (ids == token).long().cumprod(dim=1).sum(dim=1)


def _texts(prompt: Any) -> list[str] | None:
    """The texts of a prompt; None if it is not text."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    is_text = isinstance(texts, Sequence) and len(texts) and all(isinstance(text, str) for text in texts)
    return list(texts) if is_text else None


def _rows(given: Any, empty: bool = False) -> list[list[int]]:
    """Rows of token ids from lists; without any tokens only if `empty`.

    Raises:
        PromptError: `given` is not rows of token ids.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise PromptError(f"{ALLOWED}; got {given!r:.60} ({type(given).__name__}).")
    require(
        len(given),
        "the list of prompts is empty; pass at least one.",
        PromptError,
    )
    one = _row_of(given)
    rows = [_row_of(entry) for entry in given] if one is None else [one]
    if not empty and any(row == [] for row in rows):
        raise PromptError(f"row {rows.index([])} of the token ids is empty; pass at least one token.")
    if any(row is None for row in rows):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in given}))
        turns = " For chat turns pass the text of the turn with chat_template=True." if kinds == "dict" else ""
        raise PromptError(f"{ALLOWED}; got a list of {kinds}.{turns}")
    return [row for row in rows if row is not None]


def _row_of(given: Any) -> list[int] | None:
    """One row of token ids; None if `given` is not one."""
    if isinstance(given, PaddedIds) and given.ndim == 1:
        return given.plain[given.is_real].tolist()
    if isinstance(given, Tensor | np.ndarray):
        ids = given if isinstance(given, Tensor) else _from_numpy(given)
        return ids.tolist() if ids.ndim == 1 and _is_integer(ids.dtype) else None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        return None
    row = [as_integer(entry) for entry in given]
    return None if None in row else [token for token in row if token is not None]


def _array(given: Tensor | np.ndarray, empty: bool = False) -> Int[Tensor, "batch pos"]:
    """Token ids from an array with one or more rows; rows have no tokens only if `empty`.

    Raises:
        PromptError: the array is not of integers, is empty, or has more than two axes.
    """
    ids = given.as_subclass(Tensor) if isinstance(given, Tensor) else _from_numpy(given)
    require(
        _is_integer(ids.dtype) and ids.ndim in (1, 2) and len(ids) != 0 and (ids.numel() != 0 or empty),
        f"token ids must be a non-empty integer tensor [pos] or [batch, pos]; "
        f"got {ids.dtype} of shape {list(ids.shape)}.",
        PromptError,
    )
    return torch.atleast_2d(ids.long())


def _from_numpy(given: np.ndarray) -> Tensor:
    require(
        given.dtype.kind in "iubf",
        f"{ALLOWED}; got an array of {given.dtype}.",
        PromptError,
    )
    return torch.from_numpy(given.astype(np.int64) if given.dtype.kind in "iu" else given)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
