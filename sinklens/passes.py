"""Single passes that a user asks for: `model(prompt)`, `run_with_cache`, `run_with_hooks`, and the inputs of a trace.

Each takes a prompt and hands ids to the tree of hook points (hooks/tree.py), which computes. Ids that are padded stay
where they are, left or right, so that the logits of a position are those of its token. Passes of sinklens itself, of
runs, the self-check and studies, call the tree and are not looked at here.

How it could fail silently: a diffusion model predicts what its masks stand for. Over a prompt without masks its logits
say nothing of a next token; that is warned of, once.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinklens.errors import PromptWarning, SinklensError
from sinklens.hooks.interleaving import Root
from sinklens.prompts import Encoded, Prompt
from sinklens.tokens import TokenMethods, refuse_right_padding

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

BETWEEN = ("sinklens", "nnsight", "jaxtyping", "contextlib")  # packages whose frames are not the user's


class SinglePasses(TokenMethods, Root):
    """One forward pass over a prompt."""

    tree: Any
    _warned = False  # of a pass without masks

    def __call__(
        self,
        input_ids: Prompt,
        attention_mask: Any = None,
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        hook: bool = False,
        **options: Any,
    ) -> Any:
        """One pass: the logits [batch, pos, vocab] of every position.

        Args:
            input_ids: a prompt: text, texts, token ids, or a tokenizer's output. Padded ids stay where they are.
            attention_mask: 1 on real tokens, 0 on padding, for ids.
            prepend_bos: of text: True puts a start token where there is none, False takes the tokenizer's away.
            padding_side: "left"; nothing else is supported.
            hook: in a trace block, whether the block sees this pass.
            **options: of `HookTree.forward`, which refuses others.

        Raises:
            PromptError: a prompt that cannot be used, or is longer than the context.
        """
        ids, mask = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return super().__call__(ids, hook=hook, **_with_mask(mask), **options)

    forward = __call__

    def run_with_cache(
        self,
        input_ids: Prompt,
        *args: Any,
        attention_mask: Any = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> "tuple[Any, ActivationCache]":
        """One pass that keeps the points chosen by ``names_filter`` (all, if None): (logits, ActivationCache).

        The prompt and its `attention_mask` are what `model(...)` takes, the rest what `HookTree.run_with_cache` does.
        """
        self._refuse_edits("run_with_cache")
        ids, mask = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return self.tree.run_with_cache(ids, *args, **_with_mask(mask), **options)

    def run_with_hooks(
        self,
        input_ids: Prompt,
        *args: Any,
        attention_mask: Any = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> Any:
        """One pass under ``fwd_hooks=[(name or predicate, fn(value, hook)), …]``, as in TransformerLens.

        The prompt and its `attention_mask` are what `model(...)` takes, the rest what `HookTree.run_with_hooks` does.
        """
        self._refuse_edits("run_with_hooks")
        ids, mask = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return self.tree.run_with_hooks(ids, *args, **_with_mask(mask), **options)

    @contextmanager
    def hooks(self, *args: Any, **options: Any) -> Iterator["SinglePasses"]:
        """TransformerLens's context manager: hooks that are on every pass inside it, and gone behind it."""
        with self.tree.hooks(*args, **options):
            yield self

    def _refuse_edits(self, what: str) -> None:
        """Edits of ``edit()`` act where nnsight runs the model, which TransformerLens's passes do not ask for."""
        if self.has_edits:
            raise SinklensError(
                f"this model carries edits of model.edit(), which {what} would leave out. Give the change as a hook "
                f"function, or use model.trace; model.clear_edits() takes edits away."
            )

    def _one_pass(
        self, prompt: Any, mask: Any, prepend_bos: bool | None, padding_side: str | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Ids and attention mask of a pass that the user asked for; where the prompt is padded, it stays so."""
        if options.get("start_at_layer") is not None:  # the prompt is a stream
            return prompt, mask
        refuse_right_padding(padding_side)
        given = self.reader.read(prompt, prepend_bos=prepend_bos, mask=mask)
        self._check_pass(given)
        return given.ids, None if bool(given.real.all()) else given.real

    def _check_pass(self, given: Encoded) -> None:
        """Refuse a pass beyond the context, and warn of one that has nothing to predict."""
        self._check_length(int(given.real.sum(dim=1).max()))
        self._warn_without_masks(given)

    def _warn_without_masks(self, given: Encoded) -> None:
        """Warn once of a pass of a diffusion model that predicts no masked position."""
        if self._warned or self.mask_token_id is None or bool((given.ids == self.mask_token_id).any()):
            return
        self._warned = True
        _warn(
            f"{self.name} is a diffusion model, and these tokens hold no mask token ({self.mask_token_id}): the logits "
            f"predict tokens that are there already, and no next token. model.to_canvas(prompt, gen_length=...) puts "
            f"masks behind a prompt, as the first step of a run has them. (Said once per model.)",
        )

    def count_rows(self, *inputs: Any, **kwargs: Any) -> int:
        """Rows of the batch that the inputs of an invoke make; 0 without inputs."""
        prompt = inputs[0] if inputs else kwargs.get("input_ids")
        if prompt is None or kwargs.get("start_at_layer") is not None:
            return 0 if prompt is None else len(prompt)
        return len(self.reader.read(prompt, prepend_bos=kwargs.get("prepend_bos")).ids)

    def join(self, invokes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Arguments and keyword arguments of one pass over the inputs of several invokes."""
        if not invokes:
            return (), {}
        if len(invokes) == 1:
            return self._lone_invoke(*invokes[0][0], **invokes[0][1])
        rows = [row for inputs, kwargs in invokes for row in self._real_tokens(*inputs, **kwargs)]
        given = self.reader.left_padded(rows)
        self._check_pass(given)
        return (given.ids,), {"attention_mask": given.real}

    def _lone_invoke(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> tuple:
        ids, mask = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return (ids,), {**_with_mask(mask), **options}

    def _real_tokens(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> list[list[int]]:
        """The tokens of one invoke, row by row, without its padding."""
        refuse_right_padding(padding_side)
        ids, real = self.reader.read(input_ids, prepend_bos=prepend_bos, mask=attention_mask)
        return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]


def _with_mask(mask: Tensor | None) -> dict[str, Tensor]:
    """The attention mask as an argument, if there is one."""
    return {} if mask is None else {"attention_mask": mask}


def _warn(message: str) -> None:
    """Warn of the line that called, past the frames of `BETWEEN`."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    warnings.warn_explicit(message, PromptWarning, frame.f_code.co_filename, frame.f_lineno)
