"""What one pass of the model covers: which queries and keys, for which rows, at which step.

The description is made by what runs the pass: a sampler's step, a cache, the encoder, or a single pass. Every point has
it as ``hook.forward_pass``. Hook functions, recorders and caches read it there instead of inferring it from the shapes
of values.

*Positions* are columns of the batch, padding included. A description is immutable; a change replaces it. Until the pass
of a step begins, as at ``denoise.hook_canvas``, `queries`, `keys`, `fresh`, `gone` and `decidable` are those of the
pass before.

Pitfall: the rows of tensors are those of the canvas. Under guidance a pass repeats them. A pass may leave out rows, but
only while nothing is watched.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.names import axes_of, covers_all_columns

Mode = Literal["causal", "prefill", "denoise", "commit", "draft", "verify", "encode"]
MODES: tuple[Mode, ...] = get_args(Mode)
CAUSAL: tuple[Mode, ...] = ("causal", "prefill", "commit", "verify")
"""Modes in which logits predict the next token, in a model whose attention changes from pass to pass."""
IN_BLOCK: tuple[Mode, ...] = ("denoise", "draft")
"""Modes in which it sees all of a block, whose logits predict the tokens at their own positions."""


class PassKind(NamedTuple):
    """What a pass is, besides the columns that it computes; see the fields of `ForwardPass` of these names."""

    mode: Mode | None = None
    segments: tuple[range, ...] | None = None
    adapted: bool = False

    @property
    def block(self) -> range | None:
        """Columns of the block that a "denoise" or "draft" pass fills, the last of its `segments`; None in others."""
        return self.segments[-1] if self.segments and self.mode in IN_BLOCK else None


class QuerySpan(NamedTuple):
    """Queries of a pass that belong to one step.

    Attributes:
        step: the step that owns them.
        start, stop: their range of indices in the pass.
    """

    step: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One pass of the model.

    Attributes:
        step: number of the denoising step; None outside a run.
        time: noise level of each row that the model gets; None for a model that gets none.
        mode: "causal" decodes left to right, "denoise" is a step on a canvas, "encode" is the encoder's pass over the
            text before a canvas, whose keys later passes read; None is a single pass that names no mode. In a model
            that changes its attention, also "prefill", which reads the prompt; "commit", which reads a finished block
            again; "draft", which proposes a block; and "verify", which reads the draft from left to right.
        segments: ranges of columns whose queries see all of their range, where other queries see earlier keys only, see
            segments.py; None for the attention of the model.
        adapted: whether the checkpoint's adapter acts on the `block`.
        queries: positions whose stream the pass computes.
        keys: positions of the keys that its queries attend to; in a layer with a sliding window those in reach.
        prompt_length: positions before the answer, padding included; 0 outside a run.
        real: False on padding, and outside the window of a pass that sees a part of the text; empty before the first
            pass.
        fresh: keys that the pass computes under a cache policy, never padding; None without a policy.
        gone: keys that the policy hides from every query; None without a policy.
        decidable: positions that the step can decide under a policy, those computed with what predicts them, or in
            the window of a pass that sees a part of the text; None without both.
        active: rows that the step works on; the others wait. None for all.
        undecided: undecided positions that the step works on; None until its canvas is settled, and in a single pass.
            A sampler that marks them itself says so before ``denoise.hook_canvas``.
        canvas: token ids before hooks at ``denoise.hook_canvas`` edit them; None in a single pass.
        counted: queries that sink scores sum over; None for all.
    """

    step: int | None = None
    time: Float[Tensor, " _"] | None = None
    mode: Mode | None = None
    queries: range = range(0)
    keys: range = range(0)
    prompt_length: int = 0
    real: Bool[Tensor, "batch pos"] = field(default_factory=lambda: torch.ones(0, 0, dtype=torch.bool))
    fresh: Bool[Tensor, "batch layer pos"] | None = None
    gone: Bool[Tensor, "batch layer pos"] | None = None
    decidable: Bool[Tensor, "batch pos"] | None = None
    active: Bool[Tensor, " batch"] | None = None
    undecided: Bool[Tensor, "batch pos"] | None = None
    canvas: Int[Tensor, "batch pos"] | None = None
    counted: Bool[Tensor, "batch pos"] | None = None
    segments: tuple[range, ...] | None = None
    adapted: bool = False

    @property
    def kind(self) -> "PassKind":
        """What the pass is, besides what it computes."""
        return PassKind(self.mode, self.segments, self.adapted)

    @property
    def block(self) -> range | None:
        return self.kind.block

    @cached_property
    def computed(self) -> Bool[Tensor, "batch pos"] | None:
        """Positions that the pass computes in any layer under a cache policy; None if it computes all its queries."""
        return None if self.fresh is None else self.fresh.any(dim=1)

    def first(self, size: int) -> int:
        """Position at which a value with `size` positions begins.

        A value covers all keys, as ``hook_k`` under a cache policy, or the queries, or the last of them, as
        ``denoise.hook_logits`` of an autoregressive run.
        """
        return self.keys.start if size == len(self.keys) else max(0, self.queries.stop - size)

    def columns(self, name: str) -> range:
        """Positions along the position axis of the value at the point `name` of a layer; of a map, its queries."""
        axes = axes_of(name)
        if ("key" in axes and "query" not in axes) or (self.fresh is not None and covers_all_columns(name)):
            return self.keys
        return self.queries

    def spans(self, size: int | None = None) -> list[QuerySpan]:
        """The queries, or the last `size` of them, grouped by the step that owns them.

        In an autoregressive run, step 0 owns the prompt, and each later token belongs to the step that first reads it.
        In other passes all queries belong to `step`.
        """
        size = len(self.queries) if size is None else size
        if self.mode != "causal":
            return [QuerySpan(self.step or 0, 0, size)]
        first = self.queries.stop - size
        prompt = min(size, max(0, self.prompt_length - first))
        later = [QuerySpan(first + row - self.prompt_length + 1, row, row + 1) for row in range(prompt, size)]
        return [QuerySpan(0, 0, prompt), *later] if prompt else later

    def distances(self, device: torch.device) -> Int[Tensor, "query key"]:
        """Key position minus query position."""
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return keys[None, :] - torch.arange(self.queries.start, self.queries.stop, device=device)[:, None]

    def of_rows(self, rows: slice) -> "ForwardPass":
        """The pass for some rows of the batch."""
        names = ("time", "real", "fresh", "gone", "decidable", "active", "undecided", "canvas", "counted")
        found = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value[rows] for name, value in found.items() if value is not None})


def undecided_in(
    edited: Int[Tensor, "batch pos"],
    canvas: Int[Tensor, "batch pos"],
    undecided: Bool[Tensor, "batch pos"],
    mask_id: int,
) -> Bool[Tensor, "batch pos"]:
    """The undecided positions of an edited canvas, from those of `canvas`.

    A token that a hook writes decides its position, and a mask makes it undecided; nothing does without a mask token.
    """
    return undecided if mask_id < 0 else torch.where(edited != canvas, edited == mask_id, undecided)
