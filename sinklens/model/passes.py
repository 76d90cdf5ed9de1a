"""Single passes requested by the user: `model(prompt)`, `run_with_cache`, `run_with_hooks`, and the inputs of a trace.

Each takes a prompt and passes token ids to the tree of hook points (hooks/tree.py), which runs the model. Padding stays
in place, left or right, so the logits at a position belong to the token at that position. Internal passes (runs, the
self-check, studies) call the tree directly and skip these checks.

Silent failure: a diffusion model predicts the tokens behind its masks. On a prompt without masks its logits say nothing
about a next token; sinklens warns about this once per model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinklens.errors import PromptWarning, SinklensError, require, warn_caller
from sinklens.hooks.forward_pass import CAUSAL
from sinklens.hooks.interleaving import Root
from sinklens.hooks.turn import in_turn
from sinklens.model.prompts import Encoded, Prompt
from sinklens.model.tokens import TokenMethods, side_of
from sinklens.utils.arguments import plainly_shown

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

_CACHE = "a single pass computes every position; runs reuse keys and values (the setting use_cache, or cache=)"
_TOKENIZER = "call model.tokenizer(...) with it and pass the result"
_OUTPUTS = "read hook points, such as blocks.0.attn.hook_pattern and blocks.0.hook_resid_post"
_OLD = "nnsight has removed it; model.scan(prompt) opens a block for looking at shapes"
NOT_HERE = {  # arguments of the passes of TransformerLens, nnsight and transformers, and what to use instead
    "position_ids": "positions are counted from the first real token of each row; mark padding with attention_mask=",
    **dict.fromkeys(("past_kv_cache", "past_key_values", "use_cache"), _CACHE),
    **dict.fromkeys(("truncation", "padding", "max_length", "add_special_tokens"), _TOKENIZER),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _OUTPUTS),
    **dict.fromkeys(("scan", "validate"), _OLD),
    "max_new_tokens": "a single pass writes nothing; open a run with model.generate or sinklens.trace",
    "remote": "the model runs in this process",
    "return_dict": "a pass returns the logits",
    "labels": 'return_type="loss" returns the loss',
    "inputs_embeds": "start_at_layer=0 takes the stream that enters layer 0",
}


class SinglePasses(TokenMethods, Root):
    """One forward pass over a prompt."""

    tree: Any
    _warned = False  # whether a pass without masks was reported

    @plainly_shown
    @in_turn
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
            input_ids: a prompt: text, texts, token ids, or a tokenizer's output. Padding stays in place.
            attention_mask: for token ids: 1 on real tokens, 0 on padding.
            prepend_bos: for text: True adds a missing start token, False removes the tokenizer's.
            padding_side: for several texts: "left", the default, or "right".
            hook: in a trace block, whether the block sees this pass.
            **options: ``allow_longer`` (run more positions than the model was made for, with a warning), and arguments
                of `HookTree.forward`, which rejects unknown ones.

        Raises:
            PromptError: the prompt is invalid or longer than the context.
        """
        if not self.handover.running:
            self._refuse_edits("a plain call")
        ids, marks = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return super().__call__(ids, hook=hook, **marks, **options)

    forward = __call__

    @plainly_shown
    def run_with_cache(
        self,
        input_ids: Prompt,
        *args: Any,
        attention_mask: Any = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> "tuple[Any, ActivationCache]":
        """One pass that caches the points matched by ``names_filter`` (None: all); returns (logits, ActivationCache).

        The prompt and `attention_mask` are as in `model(...)`, all other arguments as in `HookTree.run_with_cache`.
        """
        self._refuse_edits("run_with_cache")
        ids, marks = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return self.tree.run_with_cache(ids, *args, **marks, **options)

    @plainly_shown
    def run_with_hooks(
        self,
        input_ids: Prompt,
        *args: Any,
        attention_mask: Any = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> Any:
        """One pass with ``fwd_hooks=[(name or predicate, fn(value, hook)), …]``, as in TransformerLens.

        The prompt and `attention_mask` are as in `model(...)`, all other arguments as in `HookTree.run_with_hooks`.
        """
        self._refuse_edits("run_with_hooks")
        ids, marks = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return self.tree.run_with_hooks(ids, *args, **marks, **options)

    def loss_fn(
        self,
        logits: Tensor,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        per_token: bool = False,
        targets: Tensor | None = None,
    ) -> Tensor:
        """The loss of `logits` [batch, pos, vocab], as with ``return_type="loss"``.

        For autoregressive models, the loss of each next token. For masked diffusion models, the loss of the tokens
        behind the masks of a canvas, averaged over the masked positions of each row and then over rows; hooks/losses.py
        gives the formula.

        Args:
            tokens: the ids of the pass, [batch, pos].
            attention_mask: 1 on real tokens, 0 on padding.
            per_token: return the loss of each token instead of their mean: [batch, pos - 1]; for a canvas [batch, pos],
                0 where it is not masked.
            targets: for a canvas: the ids behind the masks.

        Raises:
            SettingError: the loss is not defined for this model, these tokens or these targets.
        """
        given = self.reader.read(tokens, mask=attention_mask)
        real = None if bool(given.real.all()) else given.real
        return self.tree.loss_of(given.ids, real, targets)(logits, per_token)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """nnsight's ``trace``: a trace block over one pass.

        In the block, ``model.output`` is the logits, also available as ``model.output.logits``, as in a transformers
        model.

        Raises:
            SettingError: an argument of nnsight's or TransformerLens's passes that has no meaning here.
        """
        return super().trace(*args, **known_options(kwargs))

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """nnsight's ``scan``, a trace block for looking at shapes; the weights are loaded, so the pass is computed."""
        return self.trace(*args, **kwargs)

    @contextmanager
    def hooks(self, *args: Any, **options: Any) -> Iterator["SinglePasses"]:
        """TransformerLens's context manager: the hooks apply to every pass inside it and are removed on exit."""
        with self.tree.hooks(*args, **options):
            yield self

    def _refuse_edits(self, method: str) -> None:
        """Reject a model with ``edit()`` edits: they act only in nnsight's passes, not in TransformerLens's."""
        require(
            not self.has_edits,
            f"this model has edits from model.edit(), which {method} would ignore. Pass the change as a hook "
            f"function, or use model.trace; model.clear_edits() removes the edits.",
            SinklensError,
        )

    def _one_pass(
        self, prompt: Any, mask: Any, prepend_bos: bool | None, padding_side: str | None, options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Ids of a pass requested by the user and, as a keyword argument, its attention mask; padding stays in place.

        Arguments of other libraries' passes that have no effect are removed from `options`.
        """
        for name in options.keys() - known_options(options).keys():
            del options[name]
        longer = options.pop("allow_longer", False)
        if options.get("start_at_layer") is not None:  # the prompt is a stream
            return prompt, {} if mask is None else {"attention_mask": mask}
        given = self.reader.read(prompt, prepend_bos=prepend_bos, mask=mask, side=side_of(padding_side))
        if mask is None:
            self.reader.warn_right_padding(prompt, given)
        self._check_pass(given, options.get("mode"), longer)
        return given.ids, {} if bool(given.real.all()) else {"attention_mask": given.real}

    def _check_pass(self, given: Encoded, mode: Any = None, longer: bool = False) -> None:
        """Reject a pass longer than the context, and warn if there is nothing to predict."""
        self.check_length(int(given.real.sum(dim=1).max()), allow_longer=longer)
        if self._warned or mode in CAUSAL or self.mask_token_id is None or self.mask_token_id in given.ids:
            return
        self._warned = True
        warn_caller(
            f"{self.name} is a diffusion model, and these tokens contain no mask token ({self.mask_token_id}): the "
            f"logits predict the tokens already present, not a next token. model.to_canvas(prompt, gen_length=...) "
            f"appends masks to a prompt, as in the first step of a run. (Shown once per model.)",
            PromptWarning,
        )

    def count_rows(self, *inputs: Any, **kwargs: Any) -> int:
        """Number of batch rows in the inputs of an invoke; 0 without inputs."""
        prompt = inputs[0] if inputs else kwargs.get("input_ids")
        if prompt is None or kwargs.get("start_at_layer") is not None:
            return 0 if prompt is None else len(prompt)
        return len(self.reader.read(prompt, prepend_bos=kwargs.get("prepend_bos")).ids)

    def join(self, invokes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Positional and keyword arguments of one pass over the inputs of several invokes."""
        if not invokes:
            return (), {}
        if len(invokes) == 1:
            return self._lone_invoke(*invokes[0][0], **invokes[0][1])
        rows = [row for inputs, kwargs in invokes for row in self._real_tokens(*inputs, **kwargs)]
        given = self.reader.padded(rows)
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
        longer = {name: options[name] for name in ("allow_longer",) if name in options}  # the pass itself checks again
        ids, marks = self._one_pass(input_ids, attention_mask, prepend_bos, padding_side, options)
        return (ids,), {**marks, **options, **longer}

    def _real_tokens(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """The tokens of one invoke, row by row, without padding."""
        for name in known_options(options):
            raise TypeError(f"unexpected keyword argument {name!r} of one of several invokes; give it to model.trace.")
        side_of(padding_side)  # invokes are padded together, on the left
        ids, real = self.reader.read(input_ids, prepend_bos=prepend_bos, mask=attention_mask)
        return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` without arguments of other libraries' passes that are switched off.

    Raises:
        SettingError: one of them is switched on.
    """
    for name in NOT_HERE.keys() & options.keys():
        require(
            options[name] is None or options[name] is False,
            f"a pass has no argument {name}=: {NOT_HERE[name]}.",
        )
    return {name: value for name, value in options.items() if name not in NOT_HERE}
