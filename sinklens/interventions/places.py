"""The places of one intervention in one run, and the base classes of interventions that have places.

`Places` evaluates a rule (where.py) when a step begins, and it alone asks which queries and keys a pass has. In a
diffusion run the places of a step apply to all queries of its pass. In an autoregressive run each query has the places
of the step that owns it, also when a later pass computes it again; a key/value cache therefore changes nothing.

An intervention is a rule and an *edit*: `AtPositions.edit` replaces the values at a point of the chosen layers, only at
the chosen places. `AtKeys` is for interventions on keys, whose places are keys instead of queries.

Limitation: in a single pass there are no steps and no padding, so only arrays and ``positions=`` are meaningful.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names
from sinklens.hooks.forward_pass import QuerySpan
from sinklens.hooks.points import Point
from sinklens.interventions.scores import StepScores
from sinklens.interventions.selection import Selection
from sinklens.interventions.where import Moment, Positions, Rule, StepPlaces, Where, as_rule
from sinklens.runs.intervention import (
    Canvas,
    HookSource,
    Intervention,
    Pairs,
    RunContext,
    layer_of,
    place_mask,
    within,
)

if TYPE_CHECKING:
    from sinklens.model import Model

Reach = Literal["newest", "each", "all"]
Edit = Callable[[Tensor, Point], Tensor | None]
CANVAS = "denoise.hook_canvas"


class KeyMask(NamedTuple):
    """The keys that a pass treats differently.

    Attributes:
        keys: [batch, head, query, key], or one row for all queries.
        rows: queries of each row of the batch that they apply to; the others are unchanged.
        some: whether there are any keys; None if not known yet.
    """

    keys: Bool[Tensor, "batch #head #query key"]
    rows: Bool[Tensor, "batch #query"]
    some: bool | None = None

    def any(self) -> bool:
        """Whether there are any keys. On a GPU, a known answer avoids waiting for the device."""
        return bool(self.keys.any()) if self.some is None else self.some


class Places:
    """The places of one intervention in one run: the steps, the rule and the positions that it names, all of them.

    Args:
        what: the intervention.
        layers: layers that it changes; by default those of `what`.
        of: whether the places are "queries" or "keys"; None for neither.
        pool: whether a rule by scores chooses only among ``positions=``; otherwise these limit what it has chosen.

    Attributes:
        layers, heads: as non-negative indices.

    Raises:
        SettingError: the rule has no meaning in this run.
    """

    def __init__(
        self,
        what: HookSource,
        model: "Model",
        run: RunContext,
        layers: Sequence[int] | None = None,
        of: Literal["queries", "keys"] | None = "queries",
        pool: bool = False,
    ) -> None:
        of_keys, name = of == "keys", type(what).__name__
        rule = Positions(None) if what.rule is None and of_keys and not run.single else what.rule
        self._run, self._in_step, self._positions = run, what.step_test(run), what.positions
        self.layers = what.chosen_layers(model) if layers is None else list(layers)
        self.heads = what.chosen_heads(model) if of_keys or rule is not None else list(range(model.cfg.n_heads))
        self._only = head_mask(self.heads, model.cfg.n_heads, torch.device("cpu")) if of_keys else None
        self._fixed = None if run.single else place_mask(what.positions, run.real)[:, None]
        self._limit = None if self._fixed is None else (self._fixed & run.real[:, None])[:, None]
        self._rows = run.real.any(dim=1)
        among = self._fixed[:, 0] if self._fixed is not None and pool else None
        now = self._now = Moment(name, model, run, self.layers, self.heads, among)
        chooser = self._chooser = None if rule is None else rule.start(now)
        if of == "queries" and chooser is not None and chooser.past:
            raise SettingError(
                f"where={rule!r} finds keys of the text before, whose queries an autoregressive run has already "
                f"computed, so {name} would change nothing. Pass a SinkTrack of another run or Where(source=..., "
                f"same_step=True); or change keys, with AblateValues or MaskSinks."
            )
        follows = chooser is not None and not chooser.fixed
        self._canvas = Canvas(run) if follows else None
        self._scores = None if chooser is None else StepScores(model, run, chooser.scored)
        self._choice = run.choices.begin(what) if run.choices is not None and chooser is not None else None
        self._found: dict[int, StepPlaces | None] = {}  # by step; in a diffusion run of the current step alone
        self._some: list[bool] | None = None

    # --- hooks ---

    def around(self, acts: Pairs) -> Pairs:
        """`acts` between the hooks that find places and those that keep the scores of a step for the next."""
        return [*self.first(), *acts, *self.last()]

    def first(self) -> Pairs:
        """The hooks that find places; list them before those that use them."""
        return [] if self._canvas is None or self._scores is None else [(CANVAS, self._begin), *self._scores.first()]

    def last(self) -> Pairs:
        """The hooks that keep the scores of a step for the next; list them last."""
        return [] if self._scores is None else self._scores.last()

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        """Choose the places of a step; the scores collected so far are those of the step before."""
        assert self._canvas is not None
        assert self._scores is not None
        self._canvas.hook(value, hook)
        before = self._scores.begin(self._canvas.before)
        self._forget()
        if self._in_step(step := int(hook.step or 0)):
            self._choose(replace(self._now, step=step, canvas=self._canvas.now, before=before))

    def _choose(self, now: Moment) -> None:
        """Evaluate the rule, and limit what it finds to the positions and the heads of the intervention."""
        assert self._chooser is not None
        found = self._chooser.at(now)
        if found is not None and self._limit is not None:
            missing = self._limit.shape[-1] - found.mask.shape[-1]  # not decoded yet
            mask = (torch.nn.functional.pad(found.mask, (0, missing)) if missing else found.mask) & self._limit
            if self._only is not None and not bool(self._only.all()):
                mask = mask & self._only.to(mask.device)[:, None]
            if self._choice is not None:
                self._choice.keep(now.step, mask)
            if self._only is not None and not self._run.causal:
                self._some = mask.any(dim=0).flatten(1).any(dim=1).tolist()
            found = found._replace(mask=mask)
        self._found[now.step] = found

    def _forget(self) -> None:
        """Drop the places of earlier steps, unless their queries may be computed again."""
        if not self._run.causal:
            self._found.clear()
            self._some = None

    def _of_step(self, step: int) -> StepPlaces | None:
        """What the rule found for a step."""
        if self._chooser is not None and self._chooser.fixed and step not in self._found:
            self._forget()
            self._choose(replace(self._now, step=step))
        return self._found.get(step)

    # --- what was found ---

    def refuse_by_layer(self, point: str) -> None:
        """Check that the places are the same in all layers, because `point` is in none.

        Raises:
            SettingError: they differ by layer.
        """
        if self._chooser is not None and self._chooser.by_layer:
            raise SettingError(
                f"where= finds positions for each layer, and {point} is in none; name a head, as in "
                f"Where(top_k=1, of=(layer, head)), or pass an array whose layer axis has size 1."
            )

    def at(self, step: int, layer: int | None) -> Bool[Tensor, "#batch #head pos"] | None:
        """The places of a step of the run, over the complete text; None for nowhere."""
        if not self._in_step(step):
            return None
        if self._chooser is None:
            return self._fixed
        found = self._of_step(step)
        return None if found is None else _of_layer(found.mask, layer)

    def in_any_head(self, step: int) -> Bool[Tensor, "#batch pos"] | None:
        """The places of a step of the run in any layer and head, over the complete text; None for nowhere."""
        listed = self.layers if self._chooser is not None and self._chooser.by_layer else [None]
        found = [mask for layer in listed if (mask := self.at(step, layer)) is not None]
        return torch.stack([mask.any(dim=1) for mask in found]).any(dim=0) if found else None

    def of_queries(self, hook: Point, queries: int, device: torch.device) -> Bool[Tensor, "#batch #head query"] | None:
        """The affected queries of the pass of a point; None if there are none at this step."""
        if self._run.single:
            return self._of_single_pass(hook, queries, device)
        first, spans = hook.forward_pass.first(queries), hook.forward_pass.spans(queries)
        if len(spans) == 1:
            return self.of_span(hook, spans[0], first, device)
        found = [(span, mask) for span in spans if (mask := self.of_span(hook, span, first, device)) is not None]
        if not found:
            return None
        heads = max(mask.shape[1] for _, mask in found)
        rows = torch.zeros(len(self._run.real), heads, queries, dtype=torch.bool, device=device)
        for span, mask in found:
            rows[..., span.start : span.stop] = mask
        return rows

    def of_span(
        self, hook: Point, span: QuerySpan, first: int, device: torch.device
    ) -> Bool[Tensor, "#batch #head query"] | None:
        """The affected positions of a span of a pass whose first one is text position `first`; None if none are."""
        if self._run.single:
            return self._of_single_pass(hook, span.stop - span.start, device)
        mask = self.at(span.step, layer_at(hook))
        return None if mask is None else mask[..., first + span.start : first + span.stop].to(device)

    def _of_single_pass(self, hook: Point, size: int, device: torch.device) -> Bool[Tensor, "#batch #head pos"]:
        """The affected positions of a single pass."""
        first, real = hook.forward_pass.first(size), hook.forward_pass.real
        fixed = place_mask(self._positions, real)[:, None, first : first + size].to(device)
        if self._chooser is None:
            return fixed
        found = self._of_step(0)
        assert found is not None, "a single pass has only places that do not depend on a run"
        mask = _of_layer(found.mask, layer_at(hook))
        if mask.shape[-1] not in (1, size):
            raise SettingError(f"where has {mask.shape[-1]} positions, and the pass {size}; give one for each.")
        return mask.to(device) & fixed

    def along(self, hook: Point, value: Tensor, heads: Sequence[int] | None = None) -> Bool[Tensor, "..."] | None:
        """The affected places of the value of a point, along its axes; None if there are none at this step.

        Args:
            heads: heads of its head axis that are affected; None for all. Key/value heads where it has those.
        """
        name = str(hook.name)
        mask = self.of_queries(hook, value.shape[names.position_axis(name)], value.device)
        if mask is None:
            return None
        chosen = along(mask, name, value)
        return chosen if heads is None else chosen & at_heads(heads, name, value)

    # --- keys ---

    def keys_at(self, hook: Point, value: Tensor, reach: str = "each") -> KeyMask | None:
        """The keys of this layer and pass; None if there is nothing to do.

        Args:
            value: of an attention point, with the axes batch, head, query and key.
            reach: in an autoregressive run, the affected queries: the "newest" token of each step, "each" token by the
                keys of the step that it belongs to, or "all" tokens of a pass by the keys of the newest one.
        """
        layer, step, width, device = layer_of(hook), int(hook.step or 0), value.shape[-1], value.device
        if self._run.single:
            single = self._of_single_pass(hook, width, device) & head_mask(self.heads, value.shape[1], device)[:, None]
            return KeyMask(single[:, :, None], torch.ones(1, 1, dtype=torch.bool, device=device))
        if self._run.causal:
            return self._causal_keys(layer, step, value, reach, hook.forward_pass.spans())
        mask = self.at(step, layer)
        if mask is None:
            return None
        place = hook.forward_pass.keys
        if place.stop > mask.shape[-1]:  # positions that are new, or not among the keys of the pass
            mask = torch.nn.functional.pad(mask, (0, place.stop - mask.shape[-1]))
        mask = mask[..., place.start : place.stop].to(device)
        some = None if self._some is None else self._some[layer if len(self._some) > 1 else 0]
        return KeyMask(mask[:, :, None], self._rows_of(step)[:, None].to(device), some)

    def _rows_of(self, step: int) -> Bool[Tensor, " batch"]:
        """Rows whose keys are known."""
        found = self._of_step(step)
        return self._rows if found is None or found.rows is None else found.rows

    def _causal_keys(
        self, layer: int, step: int, value: Tensor, reach: str, spans: Sequence[QuerySpan]
    ) -> KeyMask | None:
        """In a causal pass, each token keeps the keys of the step that it belongs to, even when recomputed."""
        size, width, device = spans[-1].stop, value.shape[-1], value.device
        if reach == "all" and size < width:
            raise SettingError(
                "queries='all' changes what earlier tokens computed, which a key/value cache has already stored; run "
                "with use_cache=False."
            )
        spans = [QuerySpan(step, 0, size)] if reach == "all" else spans
        found = torch.zeros(*value.shape[:2], 1 if reach == "all" else size, width, dtype=torch.bool, device=device)
        rows = torch.zeros(len(value), found.shape[2], dtype=torch.bool, device=device)
        for span in spans:
            keys = self.at(span.step, layer)
            if keys is None:
                continue
            own = slice(
                span.stop - 1 if reach == "newest" else span.start, span.stop
            )  # of the prompt, the last decodes
            found[:, :, own] = keys[:, :, None, :width].to(device)
            rows[:, own] = self._rows_of(span.step)[:, None].to(device)
        return KeyMask(found, rows) if bool(rows.any()) else None


def _of_layer(mask: Bool[Tensor, "batch layer head pos"], layer: int | None) -> Bool[Tensor, "batch head pos"]:
    if layer is None and mask.shape[1] > 1:
        raise SettingError(f"where has {mask.shape[1]} layers, and this point is in none; give its layer axis size 1.")
    return mask[:, layer if layer is not None and mask.shape[1] > 1 else 0]


def layer_at(point: Point) -> int | None:
    """The layer of a point; None if it is in none."""
    return layer_of(point) if str(point.name).startswith("blocks.") else None


def head_mask(heads: Sequence[int], size: int, device: torch.device) -> Bool[Tensor, " head"]:
    """True at `heads`, of `size` heads."""
    chosen = torch.zeros(size, dtype=torch.bool, device=device)
    chosen[list(heads)] = True
    return chosen


def along(mask: Bool[Tensor, "#batch #head pos"], name: str, value: Tensor) -> Bool[Tensor, "..."]:
    """`mask` along the axes of `value` at the point `name`; one without heads has the positions of any head."""
    axes, place = names.axes_of(name), names.position_axis(name) % value.ndim
    head = next((axes.index(axis) for axis in ("head", "kv_head") if axis in axes), None)
    if head is None:
        mask = mask.any(dim=1, keepdim=True)
    elif mask.shape[1] > value.shape[head]:
        mask = mask.unflatten(1, (value.shape[head], -1)).any(dim=2)
    shape = [1] * value.ndim
    shape[0], shape[place] = mask.shape[0], mask.shape[2]
    if head is None:
        return mask[:, 0].reshape(shape)
    shape[head] = mask.shape[1]
    return (mask if head < place else mask.transpose(1, 2)).reshape(shape)


def at_heads(heads: Sequence[int], name: str, value: Tensor) -> Bool[Tensor, "..."]:
    """True at `heads` along the head axis of `value`, of size 1 along the others."""
    axis = head_axis(name)
    chosen = head_mask(within("head", heads, value.shape[axis]), value.shape[axis], value.device)
    return chosen.view([-1 if other == axis else 1 for other in range(value.ndim)])


def head_axis(name: str) -> int:
    """The head axis of a point's value.

    Raises:
        SettingError: the point has no head axis.
    """
    axes = names.axes_of(name)
    for axis in ("head", "kv_head"):
        if axis in axes:
            return axes.index(axis)
    raise SettingError(f"{name} has no head axis ({' '.join(axes)}); omit heads=, or patch an attn point.")


@dataclass(frozen=True, kw_only=True)
class AtPositions(Intervention):
    """Base class of interventions that edit values at chosen places; a subclass defines `acts_on` and `edit`.

        @dataclass(frozen=True, kw_only=True)
        class ScaleHeads(AtPositions):
            acts_on = "attn.hook_z"
            factor: float

            def edit(self, z, hook):
                return self.factor * z

    One that acts elsewhere than at one point of each layer, or that prepares itself for a run, defines `pairs` with
    `edits` or `Places`.

    Attributes:
        where: limits the intervention to positions that may differ by row, step, layer and head; with `positions`, to
            those in both. A `Rule` or a combination of rules, or one of:
            a detector: what it finds by the scores of the step before, as `Where` does;
            a `SinkTrack` of another run of the same prompts: its sinks at the same step, as `EpsilonOverMean` defines
            them (for another definition pass ``track.detect(detector)``);
            states ("prompt", "masked", "committed") or token kinds ("digit", "newline", …), as in `OfKind`;
            a boolean array [batch, step, layer, head, pos], as in `InArray`;
            a function of the step, as in `ByStep`.
    """

    acts_on: ClassVar[str] = ""
    """The point of a layer whose value `edit` replaces, such as ``"attn.hook_z"``."""

    where: Any = None

    @property
    def rule(self) -> Rule | None:
        """The rule of ``where=``; None for everywhere.

        Raises:
            SettingError: `where` is of an unknown type.
        """
        return None if self.where is None else as_rule(self.where)

    def edit(self, value: Tensor, hook: Point) -> Tensor | None:
        """The new value of the point, of the same shape; only the chosen places take it.

        It may return a new tensor, or edit `value`, which is a copy, in place.
        """
        raise NotImplementedError(f"{type(self).__name__} must define edit(self, value, hook), or pairs.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        return self.edits(model, run, self.acts_on, self.edit)

    def edits(
        self, model: "Model", run: RunContext, point: str, edit: Edit, layers: Sequence[int] | None = None
    ) -> Pairs:
        """The hooks that replace the value of `point` by that of `edit`, at the places of this intervention alone.

        Args:
            point: a point of a layer, with a position axis.
            edit: as `AtPositions.edit`.
            layers: the layers; by default those of ``layers=``.

        Raises:
            SettingError: ``heads=`` at a point without heads, or see `Places`.
        """
        places = Places(self, model, run, layers)
        points = [f"blocks.{layer}.{point}" for layer in places.layers]
        heads = None if self.heads is None else self.chosen_heads(model)
        if heads is not None:
            head_axis(points[0])

        def act(value: Tensor, hook: Point) -> Tensor | None:
            chosen = places.along(hook, value, heads)
            if chosen is None:
                return None
            given = value.clone()  # an edit in place must not reach the other places
            new = edit(given, hook)
            return torch.where(chosen, (given if new is None else new).to(value), value)

        return places.around([(name, act) for name in points])


@dataclass(frozen=True, kw_only=True)
class AtKeys(Selection, AtPositions):
    """Base class of interventions on keys, which are chosen by their scores or named by ``where=``."""

    def __post_init__(self) -> None:
        """Check the choice; with `where`, that nothing else is set.

        Raises:
            SettingError: settings that exclude each other.
        """
        if self.where is None:
            self.check_rule()
            return
        if self.top_k is not None or self.detector is not None:
            raise SettingError(
                f"pass one of top_k, detector and where; got where and top_k={self.top_k}, detector={self.detector!r}. "
                f"{type(self).__name__}(top_k=None, where=...) takes all keys there."
            )
        if not self.is_default():
            raise SettingError(
                "with where=, the settings scope, pick, only, same_step, source and persistent have no effect; "
                "pass them to it: where=Where(top_k=1, pick='random')."
            )

    @property
    def rule(self) -> Rule:
        """The rule of the keys."""
        return Where.like(self) if self.where is None else as_rule(self.where)

    def key_places(self, model: "Model", run: RunContext) -> Places:
        """The keys of one run; a choice by scores is one among ``positions=``.

        Raises:
            SettingError: a single pass, for keys chosen by scores; or see `Places`.
        """
        if run.single and self.where is None:
            raise SettingError(
                f"{type(self).__name__} acts on the sinks of an earlier step, which a single pass does not have; use "
                f"it in sinklens.trace or sinklens.generate."
            )
        return Places(self, model, run, of="keys", pool=self.where is None)


def check_reach(queries: str) -> None:
    """Check the name of the affected queries.

    Raises:
        SettingError: an unknown name.
    """
    if queries not in get_args(Reach):
        raise SettingError(f"queries must be one of {', '.join(get_args(Reach))}; got {queries!r}.")


def follows_run(entry: Intervention) -> bool:
    """Whether the places of an intervention at a step may depend on what earlier steps of its run did."""
    rule = entry.rule if isinstance(entry, AtPositions) else None
    return rule is not None and rule.follows_run
