"""TransformerLens's tokenization methods, and the methods of `torch.nn.Module` that return the module.

`Model` inherits both classes. Unlike in TransformerLens, no method adds a start token by default: text gets the special
tokens that the checkpoint's tokenizer adds. ``prepend_bos=True`` adds a missing start token,
``prepend_bos=False`` removes the tokenizer's, and no text begins with two.

Silent failure: if the tokenizer adds a start token, a fragment of a longer text gets one too. Pass
``prepend_bos=False``, or use `to_single_token`, which does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sinklens.errors import PromptError, PromptWarning, require, warn_caller
from sinklens.families.samplers import settings_for
from sinklens.hooks.padded import PaddedIds
from sinklens.model.prompts import Encoded, Prompt, PromptReader
from sinklens.utils.arguments import plainly_shown
from sinklens.utils.integers import as_integer

Self = TypeVar("Self", bound="ModuleMethods")
TokenIds = Sequence[int] | Sequence[Sequence[int]] | Tensor | np.ndarray


class TokenMethods:
    """Text to tokens and back.

    Attributes:
        name: name of the model.
        tokenizer: None if the model has none.
        cfg: sizes of the model's axes.
        mask_token_id: None for autoregressive models.
        family_record, checkpoint: specify the sampler and its settings.
        eos_token_ids: tokens that end an answer; the first is the padding token if the tokenizer defines none.
    """

    name: str
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None
    cfg: Any
    family_record: Any
    checkpoint: Any
    tree: Any

    @property
    def reader(self) -> PromptReader:
        """Converts prompts to token ids."""
        pad_token_id = getattr(self.tokenizer, "pad_token_id", None)
        pad = pad_token_id if pad_token_id is not None else next(iter(self.eos_token_ids), 0)
        return PromptReader(
            self.name, self.tokenizer, self.cfg.d_vocab, pad, self.cfg.device, self.checkpoint.refused_tokens
        )

    @plainly_shown
    def encode(
        self,
        prompts: Prompt,
        chat_template: bool | str = False,
        *,
        prepend_bos: bool | None = None,
        gen_length: int = 0,
    ) -> Encoded:
        """Token ids of one or more prompts, left-padded to equal length, and which of them are real.

        Args:
            prompts: a string, a list of strings, token ids [pos] or [batch, pos], rows of ids, which may differ in
                length, or a tokenizer's output.
            chat_template: True formats a text prompt as one user turn with the tokenizer's template; a string is used
                as the template.
            prepend_bos: for text: True adds a missing start token, False removes the tokenizer's.
            gen_length: number of mask tokens to append to each prompt; only for diffusion models.

        Raises:
            PromptError: the prompt is empty, not token ids, outside the vocabulary, padded without an attention mask,
                or text without a tokenizer.
        """
        reader = replace(self.reader, unconditional=self.family_record.unconditional)  # a single pass needs tokens
        ids, real = reader.encode(prompts, chat_template, prepend_bos)
        if not gen_length:
            return Encoded(ids, real)
        self.check_length(int(real.sum(dim=1).max()) + gen_length)
        masks = ids.new_full((len(ids), gen_length), self._mask_token())
        return Encoded(torch.cat([ids, masks], dim=1), torch.cat([real, torch.ones_like(masks).bool()], dim=1))

    @plainly_shown
    def to_canvas(
        self, prompts: Prompt, gen_length: int | None = None, chat_template: bool | str = False
    ) -> Int[Tensor, "batch pos"]:
        """The input of a run's first step: the prompt's ids, left-padded, followed by `gen_length` mask tokens.

        `model(model.to_canvas(prompt))` returns that step's logits. As with `to_tokens`, ids of texts of different
        lengths record which of them are padding.

        Args:
            prompts: as in `encode`.
            gen_length: number of answer positions; by default the checkpoint's value, or the sampler's if it has none.
            chat_template: as in `encode`.

        Raises:
            PromptError: the prompt is invalid, or the model is autoregressive.
        """
        self._mask_token()
        if gen_length is None:
            gen_length = settings_for(self, {}).gen_length
        require(
            as_integer(gen_length) is not None and gen_length >= 1,
            f"gen_length must be a number of positions, at least 1; got {gen_length!r}.",
        )
        return PaddedIds.of(*self.encode(prompts, chat_template, gen_length=gen_length), self.reader.pad)

    def _mask_token(self) -> int:
        if self.mask_token_id is None:
            require(
                self.family_record.causal,
                f"{self.name} has no mask token: its canvas begins as random tokens. Take one from run.canvas.",
                PromptError,
            )
            raise PromptError(
                f"{self.name} is autoregressive and has no mask token; its first step sees only the prompt: "
                f"model.to_tokens(prompt)."
            )
        return self.mask_token_id

    def check_length(self, positions: int, advice: str = "Shorten the prompt", allow_longer: bool = False) -> None:
        """Refuse a pass over more positions than the model was made for, or warn of it with `allow_longer`.

        Raises:
            PromptError: too many positions; always, in a network with an embedding for each position.
        """
        over = positions - self.cfg.n_ctx
        if over <= 0:
            return
        said = f"{self.name} has {self.cfg.n_ctx} positions, and a pass would need {positions}, {over} too many."
        require(
            not self.tree.architecture.positions,
            f"{said} {advice}; this network has no embedding for further positions.",
            PromptError,
        )
        require(
            allow_longer,
            f"{said} {advice}; or pass allow_longer=True, and rotary positions continue beyond those of training.",
            PromptError,
        )
        warn_caller(f"{said} allow_longer=True runs it; the model was not made for such distances.", PromptWarning)

    @plainly_shown
    def to_tokens(
        self,
        input: Prompt,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = False,
    ) -> Int[Tensor, "batch pos"]:
        """Token ids of a prompt. Those of several texts are padded, and record which of them are real.

        They can be copied, moved, sliced and passed wherever a prompt is accepted; each row then gives the same values
        as alone. `encode` returns ids and marks separately.

        Args:
            input: text, texts, or ids.
            prepend_bos: for text: True adds a missing start token, False removes the tokenizer's.
            padding_side: "left", the default, or "right".
            move_to_device: return ids on the model's device; otherwise on the CPU.
            truncate: keep only the first tokens of a text longer than the context, as TransformerLens does by default.

        Raises:
            PromptError: the prompt or `padding_side` is invalid.
        """
        side, (ids, real) = side_of(padding_side), self.reader.encode(input, prepend_bos=prepend_bos)
        longest = self.cfg.n_ctx if truncate else ids.shape[1]
        if side == "right" or longest < ids.shape[1]:
            rows = [row[keep][:longest].tolist() for row, keep in zip(ids, real, strict=True)]
            ids, real = self.reader.padded(rows, side)
        found = PaddedIds.of(ids, real, self.reader.pad)
        return found if move_to_device else found.cpu()

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None) -> Any:
        """The tokens of one text, one row of ids or one id as separate strings; for several texts, one list per text.

        A row of ``run.canvas`` may contain -1, a position that does not exist yet; its string is "".

        Raises:
            PromptError: the model has no tokenizer, or several rows of ids were given.
        """
        side_of(padding_side)
        if not isinstance(input, str) and isinstance(input, Sequence) and input and isinstance(input[0], str):
            return [self.to_str_tokens(str(text), prepend_bos) for text in input]
        input = self.to_tokens(input, prepend_bos) if isinstance(input, str) else input
        rows = self.reader.id_rows(input if as_integer(input) is None else [int(input)])
        tokenizer = self._require_tokenizer("to_str_tokens")
        require(
            len(rows) == 1,
            f"to_str_tokens takes one text or one row of ids; got {len(rows)} rows.",
            PromptError,
        )
        return [_text_of(tokenizer, [token]) for token in rows[0]]

    def to_string(self, tokens: TokenIds | int) -> str | list[str]:
        """The text of a row of ids; for several rows [batch, pos], a list of texts.

        Positions of ``run.canvas`` that do not exist yet (-1) are skipped.

        Raises:
            PromptError: `tokens` are not token ids, or the model has no tokenizer.
        """
        if as_integer(tokens) is not None:
            tokens = [int(tokens)]  # type: ignore[arg-type]
        rows, tokenizer = self.reader.id_rows(tokens), self._require_tokenizer("to_string")
        texts = [_text_of(tokenizer, row) for row in rows]
        return texts[0] if as_integer(tokens[0]) is not None else texts  # type: ignore[index]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is a single token.

        Raises:
            PromptError: the text is not a single token.
        """
        ids = self.to_tokens(text, prepend_bos=False)[0].tolist()
        require(
            len(ids) == 1,
            f"{text!r} is {len(ids)} tokens, {self.to_str_tokens(ids)}; pass text that is a single token.",
            PromptError,
        )
        return ids[0]

    def to_single_str_token(self, token: int) -> str:
        """The text of one token id."""
        return self.to_str_tokens([token])[0]

    def get_token_position(
        self,
        single_token: str | int | Tensor,
        input: str | TokenIds,
        mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Position of a token, given as an id or as text, in a text or in one row of ids.

        Args:
            single_token: the token to find.
            input: the text or ids to search.
            mode: which occurrence to return, "first" or "last".
            prepend_bos: as in `to_tokens`; a start token shifts the positions of a text by one.
            padding_side: "left" or "right"; a single text has no padding.

        Raises:
            PromptError: the token does not occur, its text is not a single token, or `mode` is invalid.
        """
        require(
            mode in ("first", "last"),
            f"mode must be 'first' or 'last'; got {mode!r}.",
            PromptError,
        )
        ids = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        rows = self.reader.id_rows(ids)
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        require(
            len(rows) == 1,
            f"get_token_position takes one text or one row of ids; got {len(rows)} rows.",
            PromptError,
        )
        require(
            token in rows[0],
            f"token {token} ({single_token!r}) is not among the {len(rows[0])} tokens of the prompt.",
            PromptError,
        )
        return rows[0].index(token) if mode == "first" else len(rows[0]) - 1 - rows[0][::-1].index(token)

    def _require_tokenizer(self, method: str) -> Any:
        require(
            self.tokenizer is not None,
            f"{method} needs a tokenizer, but {self.name} has none; load the model with tokenizer=....",
            PromptError,
        )
        return self.tokenizer


def _text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids; positions that do not exist yet (-1) are skipped."""
    return str(tokenizer.decode([token for token in ids if token >= 0], clean_up_tokenization_spaces=False))


def side_of(padding_side: str | None) -> str:
    """TransformerLens's ``padding_side`` argument, by default "left".

    Raises:
        PromptError: it is neither None, "left" nor "right".
    """
    require(
        padding_side in (None, "left", "right"),
        f"padding_side must be 'left', 'right' or omitted; got {padding_side!r}.",
        PromptError,
    )
    return padding_side or "left"


def _returning_model(name: str) -> Callable[..., Any]:
    """`torch.nn.Module`'s method `name`, returning the model it was called on."""

    def method(self: Self, *args: Any, **kwargs: Any) -> Self:
        getattr(self.tree, name)(*args, **kwargs)
        return self

    method.__name__, method.__doc__ = name, f"`torch.nn.Module.{name}` of the transformers model; returns the model."
    return method


class ModuleMethods:
    """Methods of `torch.nn.Module` that return the module; here they return the `Model`, not its tree."""

    tree: Any

    train, eval, requires_grad_, to, cpu, cuda, half, bfloat16, float, double = map(
        _returning_model,
        ("train", "eval", "requires_grad_", "to", "cpu", "cuda", "half", "bfloat16", "float", "double"),
    )
