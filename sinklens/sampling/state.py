"""The state that a run carries from step to step, and how a sampler calls the model.

A sampler is a generator: it yields once *before* each step and runs the step when resumed, changing `State.canvas`.
Between two steps its caller (loop.py) can therefore publish the step number, replay another canvas or stop, and after
the last step it knows that the run has ended.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import HookFunctionError, NotANumberError, ReadOnlyHookError, require
from sinklens.hooks.attention.blocks import Blocks, ruled_by
from sinklens.hooks.forward_pass import ForwardPass, PassKind, undecided_in
from sinklens.hooks.points import Point, at
from sinklens.hooks.tree import HookTree
from sinklens.sampling.decisions import RowNoise, among, chosen_among_equals, probability
from sinklens.sampling.key_cache import KeyCache, Policy, PolicyCache, one_later


@dataclass
class State:
    """A run in progress.

    Attributes:
        tree: the model.
        canvas: current token ids of prompt and answer.
        real: False on left padding.
        prompt_length: positions before the answer, padding included.
        mask_id: the mask token; -1 for an autoregressive model, whose undecided positions hold -1.
        eos_ids: tokens that end an answer.
        eot_id: end-of-turn token, if the family has one.
        noise: random generators of the rows.
        shift: whether logits at i predict the token at i + 1.
        undecided: the undecided positions of `canvas`; None (the default) for those that hold `mask_id`. A sampler
            without a mask token sets it before its first yield and passes it to `end_step`.
        step_canvas: the canvas that the current step works on, with edits at ``denoise.hook_canvas``.
        step_undecided: the undecided positions of `step_canvas`; None as for `undecided`.
        keys: keys and values that steps reuse, exactly or under a policy (`cache=` of a run); None computes all
            positions.
        replay: canvases of an earlier run, forced after every step; None for a free run.
        replay_undecided: their undecided positions; None if only canvases were given.
        steps_done: number of finished steps.
        tied: how many positions the last step chose in each row by breaking a tie; see `commit`.
        logits_dtype: dtype of the last step's logits as the model computed them.
        active: rows that the current step works on. The others have finished their block, their canvas or their answer
            and wait; they may pass through the model again, but the step changes nothing in them. `logits` sets it to
            the rows in which the step can decide a position, before the pass; all rows until then.
        time: noise level of each row, for a network that reads it; its sampler sets it before `begin_step`.
        window: positions that the step's passes see, for a sampler whose passes see a part of the text. The sampler
            sets it before `begin_step` and decides no position outside it. Positions are then counted from the window's
            first. None for all.
        kind: the kind of the next pass, in a model that changes its attention; its sampler sets it before each yield.
            None for other models.
        launched: called between a pass and the decisions from its logits; a GPU may still compute the pass.
    """

    tree: HookTree
    canvas: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    prompt_length: int
    mask_id: int
    eos_ids: tuple[int, ...]
    eot_id: int | None
    noise: RowNoise
    shift: bool
    undecided: Bool[Tensor, "batch pos"] | None = None
    step_undecided: Bool[Tensor, "batch pos"] | None = None
    keys: KeyCache | None = None
    replay: Int[Tensor, "batch step pos"] | None = None
    replay_undecided: Bool[Tensor, "batch step pos"] | None = None
    steps_done: int = 0
    kind: PassKind | None = None
    launched: Callable[[], None] = lambda: None
    tied: Int[Tensor, " batch"] = field(init=False)
    logits_dtype: torch.dtype = torch.float32
    step_canvas: Int[Tensor, "batch pos"] = field(init=False)

    def __post_init__(self) -> None:
        self.step_canvas = self.canvas
        self.tied = torch.zeros_like(self.canvas[:, 0])
        self._active = torch.ones_like(self.canvas[:, 0], dtype=torch.bool)
        self._window: Bool[Tensor, "batch pos"] | None = None

    @property
    def time(self) -> Float[Tensor, " batch"] | None:
        return self.tree.watch.forward_pass.time

    @time.setter
    def time(self, level: Float[Tensor, " batch"]) -> None:
        self.tree.watch.describe(time=level)

    @property
    def window(self) -> Bool[Tensor, "batch pos"] | None:
        return self._window

    @window.setter
    def window(self, seen: Bool[Tensor, "batch pos"]) -> None:
        self._window = seen & self.real
        self.tree.watch.describe(real=self._window, decidable=self._window)

    @property
    def active(self) -> Bool[Tensor, " batch"]:
        return self._active

    @active.setter
    def active(self, rows: Bool[Tensor, " batch"]) -> None:
        self._active = rows
        self.tree.watch.describe(active=rows)

    def announce(self, step: int) -> None:
        """Describe the pass of `step` to every point, before its canvas is settled."""
        watch = self.tree.watch
        watch.forward_pass = replace(
            watch.forward_pass if self.steps_done else ForwardPass(),
            step=step, prompt_length=self.prompt_length, real=self.real, undecided=self.undecided, canvas=self.canvas,
            active=None, **(self.kind or PassKind("causal" if self.tree.causal else "denoise"))._asdict(),
        )  # fmt: skip

    def begin_step(self, block: slice | None = None, stop: int | None = None) -> Int[Tensor, "batch pos"]:
        """The canvas that the step works on: the last step's result, passed through ``denoise.hook_canvas``.

        Args:
            block: columns of the active block, for a cache; None for a sampler that decides anywhere in the answer.
            stop: end of the text that ``denoise.hook_canvas`` shows; None for the complete canvas.
        """
        self.tied = torch.zeros_like(self.tied)
        self.active = torch.ones_like(self.active)
        text, point = self.canvas[:, :stop], self.tree.denoise.hook_canvas
        if point.watched:  # a copy, so that edits do not change the last step's result
            text = self.ids_at(point, text.clone())
        self.step_canvas = text if stop is None else torch.cat([text, self.canvas[:, stop:]], dim=1)
        self.step_undecided = (
            None
            if self.undecided is None
            else undecided_in(self.step_canvas, self.canvas, self.undecided, self.mask_id)
        )
        self.tree.watch.describe(undecided=self.undecided_before())
        if self.keys is not None:
            self.keys.plan(self.step_canvas, self.undecided_before(), self.step_canvas != self.canvas, block)
        return self.step_canvas

    @property
    def answer(self) -> slice:
        """Columns of the answer, with any tokens appended to it."""
        return slice(self.prompt_length, self.canvas.shape[1])

    def computed(self) -> Bool[Tensor, "batch pos"]:
        """The positions that the step computes, with what predicts them, and can therefore decide; never padding."""
        if self.keys is not None and self.keys.decidable is not None:
            return self.keys.decidable
        return self.real if self.window is None else self.window

    def ids_at(self, point: Point, ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Token ids, passed through `point` if it is watched.

        Raises:
            HookFunctionError: a hook or trace block wrote an id that is not in the vocabulary.
        """
        if not point.watched:
            return ids
        found, size = point(ids), self.tree.cfg.d_vocab
        if len(outside := ((found < 0) | (found >= size)).nonzero()):
            row, place = outside[0].tolist()
            mask = "" if self.mask_id < 0 else f" To mask a position, write {self.mask_id}, model.mask_token_id."
            raise HookFunctionError(
                f"a hook or trace block wrote the token id {int(found[row, place])} at {point.name} (step "
                f"{point.step}, row {row}, column {place}); the vocabulary has {size} tokens, with ids 0 to "
                f"{size - 1}.{mask}"
            )
        return found

    def through(self, point: str, value: Tensor) -> Tensor:
        """`value`, passed through the point ``denoise.<point>`` if it is watched."""
        return at(getattr(self.tree.denoise, point), value)

    def uniform(self, where: Bool[Tensor, "batch pos"], size: int, dtype: torch.dtype) -> Float[Tensor, "drawn vocab"]:
        """`size` numbers of U[0, 1) for every True of `where`, passed through ``denoise.hook_uniform`` if there is one.

        Only families whose own samplers draw by these numbers have the point. It holds all positions of the canvas;
        where `where` is False, its numbers are 0 and have no effect.
        """
        drawn, point = self.noise.uniform(where, size, dtype=dtype), self.tree.hook_dict.get("denoise.hook_uniform")
        if point is None or not point.watched:
            return drawn
        everywhere = drawn.new_zeros(*where.shape, size)
        everywhere[where] = drawn
        return point(everywhere)[where]

    def commit(
        self,
        chosen: Bool[Tensor, "batch pos"],
        proposed: Int[Tensor, "batch pos"],
        fill: bool = False,
        undecided: Bool[Tensor, "batch pos"] | None = None,
        best_by: Float[Tensor, "batch pos"] | None = None,
    ) -> None:
        """End the step: pass `chosen` through ``denoise.hook_commit``, and write what is `proposed` there.

        Args:
            best_by: the confidence by which `chosen` holds the best of the proposals, to count those that were chosen
                by breaking a tie; None if they were chosen otherwise.
            fill: end rows at their end token; see `filled`.
            undecided: as in `end_step`; by default those of the step without the committed ones.
        """
        if best_by is not None:
            self.tied = chosen_among_equals(best_by, chosen)
        chosen = self.through("hook_commit", chosen)
        canvas = torch.where(chosen, proposed, self.step_canvas)
        if undecided is None and self.step_undecided is not None:
            undecided = self.step_undecided & ~chosen
        self.end_step(self.filled(canvas) if fill else canvas, undecided)

    def cache_keys(self, policy: Policy | None = None, read: Callable[..., Tensor] | None = None) -> None:
        """Let steps reuse keys and values from now on: under a policy, or exactly.

        Args:
            read: the pass that computes them, as in `KeyCache`.
        """
        self.keys = KeyCache(self.tree, read)
        if policy is not None:
            self.keys = PolicyCache(self.tree, policy, self.real, self.answer, self.mask_id, self.shift)

    def end_step(self, canvas: Int[Tensor, "batch pos"], undecided: Bool[Tensor, "batch pos"] | None = None) -> None:
        """End the step with `canvas` and its `undecided` positions, or with those of the replayed run."""
        self.steps_done += 1
        if self.replay is not None:  # a copy: an in-place edit of the canvas must not reach the earlier run
            canvas = self.replay[:, self.steps_done].to(canvas.device, copy=True)
            if undecided is not None and self.replay_undecided is not None:
                undecided = self.replay_undecided[:, self.steps_done].to(canvas.device)
        self.canvas, self.undecided = canvas, undecided

    def filled(self, canvas: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """`canvas`, with the masks of rows that have ended replaced by their end token (``stop_at_eos``).

        A row has ended when its answer holds an end token and everything before that token is decided.
        """
        masked, ends = canvas == self.mask_id, self.ends(canvas, self.eos_ids)
        token = canvas.gather(1, ends.long().argmax(dim=1, keepdim=True))
        return torch.where(masked & ends.any(dim=1, keepdim=True), token, canvas)

    def ends(self, canvas: Int[Tensor, "batch pos"], stop_ids: Sequence[int]) -> Bool[Tensor, "batch pos"]:
        """The stop tokens in the answer that no masked position precedes; `canvas` may lack the last columns."""
        columns = torch.arange(canvas.shape[1], device=canvas.device)
        answer = self.real[:, : canvas.shape[1]] & (columns >= self.prompt_length)
        return among(canvas, stop_ids) & answer & (((canvas == self.mask_id) & answer).cumsum(dim=1) == 0)

    def require_end_tokens(self) -> None:
        """Refuse ``stop_at_eos`` of a model without end tokens.

        Raises:
            SettingError: the model has none.
        """
        require(
            self.eos_ids,
            "stop_at_eos needs an end-of-text token, and this model has none; load it with a tokenizer that "
            "defines one, or leave stop_at_eos out.",
        )

    def undecided_before(self) -> Bool[Tensor, "batch pos"]:
        """The undecided positions of `step_canvas`."""
        return self.step_canvas == self.mask_id if self.step_undecided is None else self.step_undecided

    def undecided_after(self) -> Bool[Tensor, "batch pos"]:
        """The undecided positions of `canvas`."""
        return self.canvas == self.mask_id if self.undecided is None else self.undecided

    def while_undecided(self, items: Iterable[Any], where: Any = ...) -> Iterator[Any]:
        """The items, until no position of the canvas, or of its part ``canvas[where]``, is undecided."""
        for item in items:
            if not bool(self.undecided_after()[where].any()):
                return
            yield item

    def logits(
        self,
        canvas: Int[Tensor, "batch pos"],
        where: Bool[Tensor, "batch pos"],
        cfg_scale: float = 0.0,
        given: Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "masked vocab"]:
        """Logits, in float32, of the tokens at the True positions of `where`.

        The language-model head runs only at those positions unless ``denoise.hook_logits`` is watched, or a trace block
        waits for the head itself. With `cfg_scale` w > 0 the batch of the pass is the conditional rows followed by the
        same rows with the prompt (or the positions `given`) masked, and the logits are un + (w + 1)(cond − un). With
        `keys`, ``denoise.hook_logits`` covers the window that the step computes, and `where` may be True only at
        `computed` positions. Without them, and while nothing is watched, rows without a True in `where` are left out of
        the pass.
        """
        rows, real = canvas, self.real if self.window is None else self.window
        self.active = where.any(dim=1)
        if cfg_scale > 0:
            if given is None:
                given = (torch.arange(canvas.shape[1], device=canvas.device) < self.prompt_length).expand_as(canvas)
            rows, real = torch.cat([canvas, canvas.masked_fill(given, self.mask_id)]), torch.cat([real, real])
        if self.keys is not None:
            hidden, where = self._partial(self.keys, rows, real, where)
        else:
            running, columns = self.running(self.tree.denoise.hook_logits), self._columns(real)
            chosen: slice | Tensor = slice(None)
            rule: Blocks | None = None
            time = self.time
            if running is not None:
                chosen, where = running.repeat(len(rows) // len(where)), where[running]
                time = None if time is None else time[running]
                blocks = self.tree.attention_blocks
                rule = blocks.of_rows(running) if blocks is not None and blocks.sealed else None
            with ruled_by(self.tree.hf.config, rule):
                rows, real = (one[chosen, columns].clone() for one in (rows, real))  # a block may write to them
                hidden, where = self.tree.hidden(rows, real, time=time, of_step=True), where[:, columns]
            if self.shift:  # logits at i - 1 predict position i
                hidden = one_later(hidden, real)
        self.launched()
        return self.logits_of(hidden.chunk(2) if cfg_scale > 0 else (hidden,), where, cfg_scale)

    def logits_of(
        self,
        parts: Sequence[Float[Tensor, "batch window d_model"]],
        where: Bool[Tensor, "batch window"],
        cfg_scale: float = 0.0,
    ) -> Float[Tensor, "masked vocab"]:
        """Logits, in float32, of final-norm outputs at the True positions of `where`; passes ``denoise.hook_logits``.

        Args:
            parts: the outputs, and those of the unconditional rows under guidance.
        """
        point = self.tree.denoise.hook_logits
        if point.watched or self.tree.head_awaited:
            logits = point(_guided([self.tree.head(part) for part in parts], cfg_scale))[where]
        else:
            logits = _guided([self.tree.head(part[where]) for part in parts], cfg_scale)
        self.logits_dtype = logits.dtype
        return self.checked(logits.float())

    def checked(self, logits: Float[Tensor, "*positions vocab"]) -> Float[Tensor, "*positions vocab"]:
        """`logits`, unless they hold NaN, which no sampler can decide by.

        Raises:
            NotANumberError: they do.
        """
        if bool(logits.sum().isfinite()):  # one pass over them; a sum that is not may be of infinite logits
            return logits
        wrong = logits.amax(dim=-1).isnan()  # the largest of some numbers and NaN is NaN
        if bool(wrong.any()):
            raise NotANumberError(
                f"in step {self.steps_done}, the logits of {int(wrong.sum())} of {wrong.numel()} positions are NaN. A "
                f"hook, a trace block or an intervention before them divided by zero, overflowed or wrote NaN: look "
                f"for the first point where value.isnan().any() is True. Without any of these, the weights hold NaN "
                f"or overflow in this dtype; load the model with another dtype=."
            )
        return logits

    def running(self, *points: Point) -> Bool[Tensor, " batch"] | None:
        """The rows that the pass computes; None for all: while it or one of `points` is watched, or if no row waits."""
        some = 0 < int(self.active.sum()) < self.active.numel()
        alone = some and not self.tree.is_watched and not any(point.watched for point in points)
        return self.active if alone else None

    def _columns(self, seen: Bool[Tensor, "batch pos"]) -> slice:
        """The columns that the pass computes: all while anything is watched, else those in any row's window."""
        if self.window is None or self.tree.denoise.hook_logits.watched or self.tree.is_watched:
            return slice(None)
        columns = seen.any(dim=0).nonzero()[:, 0]
        return slice(int(columns[0]), int(columns[-1]) + 1)

    def _partial(
        self,
        keys: KeyCache,
        rows: Int[Tensor, "row pos"],
        real: Bool[Tensor, "row pos"],
        where: Bool[Tensor, "batch pos"],
    ) -> tuple[Float[Tensor, "row window d_model"], Bool[Tensor, "batch window"]]:
        """The final-norm outputs of the columns that the step computes, shifted if need be, and `where` among them."""
        require(
            keys.decidable is None or not bool((where & ~keys.decidable).any()),
            "this sampler decides positions that the cache policy does not compute; it has to restrict them to "
            "State.computed() before it calls State.logits. Leave cache= out, or change the sampler.",
        )
        hidden = keys.hidden(rows, real)
        if self.shift:
            hidden = one_later(hidden, real[:, : keys.window.stop], keys.before)
        return hidden, where[:, keys.window]

    def propose(
        self, where: Bool[Tensor, "batch pos"], candidates: Int[Tensor, " masked"], canvas: Int[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " masked"]]:
        """Put candidates on the canvas and pass it through ``denoise.hook_candidates``.

        Returns:
            The canvas with candidates at `where` and its own tokens elsewhere, and the candidates at `where`.
        """
        point = self.tree.denoise.hook_candidates
        watched = point.watched  # asked before: a trace block has gone on when the point returns
        proposed = self.ids_at(point, canvas.masked_scatter(where, candidates))
        return proposed, proposed[where] if watched else candidates

    def propose_drawn(
        self,
        where: Bool[Tensor, "batch pos"],
        drawn: Int[Tensor, " masked"],
        canvas: Int[Tensor, "batch pos"],
        probs: Callable[[], Tensor],
    ) -> Int[Tensor, "batch pos"]:
        """The canvas of `propose`, for a step that decides without confidence; calls `probs` only if it is read."""
        proposed, candidates = self.propose(where, drawn, canvas)
        self.show_confidence(where, lambda: probability(probs(), candidates))
        return proposed

    def spread_confidence(
        self, where: Bool[Tensor, "batch pos"], confidence: Float[Tensor, " masked"]
    ) -> Float[Tensor, "batch pos"]:
        """Confidences on the canvas, −inf outside `where`, passed through ``denoise.hook_confidence``."""
        return at(self.tree.denoise.hook_confidence, _spread(where, confidence))

    def show_confidence(self, where: Bool[Tensor, "batch pos"], confidence: Callable[[], Tensor]) -> None:
        """`spread_confidence` where the step decides without it; computes it only if it is read.

        Raises:
            ReadOnlyHookError: a hook or trace block changed it.
        """
        point = self.tree.denoise.hook_confidence
        if not point.watched:
            return
        shown = _spread(where, confidence().double())
        require(
            torch.equal(point(shown.clone()), shown),
            f"{point.name} decides nothing with this sampler, so an edit of it would be lost. Edit "
            f"denoise.hook_candidates to force another token.",
            ReadOnlyHookError,
        )


def _spread(where: Bool[Tensor, "batch pos"], values: Float[Tensor, " masked"]) -> Float[Tensor, "batch pos"]:
    return torch.full(where.shape, -torch.inf, dtype=values.dtype, device=where.device).masked_scatter_(where, values)


def _guided(logits: list[Tensor], scale: float) -> Tensor:
    if len(logits) == 1:
        return logits[0]
    conditional, unconditional = logits
    return unconditional + (scale + 1) * (conditional - unconditional)
