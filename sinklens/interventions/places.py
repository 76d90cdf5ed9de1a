"""The places of one intervention in one run, and the base classes of interventions that have places.

`Places` evaluates a rule (rules.py) when a step begins, and it alone asks which queries and keys a pass has. In a
diffusion run the places of a step apply to all queries of its pass. In an autoregressive run each query has the places
of the step that owns it, also when a later pass computes it again; a key/value cache therefore changes nothing.

An intervention is a rule and an *edit*: `AtPositions.edit` replaces the values at a point of the chosen layers, only at
the chosen places. `AtKeys` is for interventions on keys, whose places are keys instead of queries.

Limitation: in a single pass there are no steps, so only arrays and ``positions=`` are meaningful.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import nearest, require
from sinklens.hooks import names
from sinklens.hooks.forward_pass import QuerySpan
from sinklens.hooks.points import Point
from sinklens.interventions.rules import Moment, Positions, Rule, StepPlaces, Where, as_rule
from sinklens.interventions.scores import StepScores
from sinklens.model import Model
from sinklens.runs.choices import Choice
from sinklens.runs.intervention import (
    Canvas,
    HookSource,
    Intervention,
    Pairs,
    RunContext,
    layer_of,
    place_mask,
    whole_numbers,
    within,
)

Reach = Literal["newest", "each", "all"]
Edit = Callable[[Tensor, Point], Tensor | None]
CANVAS = "denoise.hook_canvas"


class KeyMask(NamedTuple):
    """The keys that a pass treats differently.

    Attributes:
        keys: [batch, head, query, key], or one row for all queries.
        rows: queries of each row of the batch that they apply to; the others are unchanged.
    """

    keys: Bool[Tensor, "batch #head #query key"]
    rows: Bool[Tensor, "batch #query"]


class Places:
    """The places of one intervention in one run: the steps, the rule and the positions that it names, all of them.

    Args:
        what: the intervention.
        points: the points that it changes; by default points of its layers.
        of: whether the places are "queries" or "keys"; None for neither.

    Attributes:
        layers, heads: as non-negative indices.

    Raises:
        SettingError: the rule has no meaning in this run, or differs by layer at a point outside the layers; or heads
            are named at a point without a head axis.
    """

    def __init__(
        self,
        what: HookSource,
        model: "Model",
        run: RunContext,
        points: Sequence[str] | None = None,
        of: Literal["queries", "keys"] | None = "queries",
    ) -> None:
        of_keys, name = of == "keys", type(what).__name__
        rule = Positions(None) if what.rule is None and of_keys and not run.single else what.rule
        self._run, self._in_step, self._positions = run, what.step_test(run), what.positions
        for point in points or () if what.heads is not None else ():
            require(
                head_axis(point) is not None,
                f"{point} has no head axis ({' '.join(names.axes_of(point))}); omit heads=, or patch an attn point.",
            )
        inside = [int(point.split(".")[1]) for point in points or () if point.startswith("blocks.")]
        self.layers = what.chosen_layers(model) if points is None else sorted(set(inside))
        self.heads = what.chosen_heads(model)
        all_heads = not of_keys or set(self.heads) == set(range(model.cfg.n_heads))
        self._only = None if all_heads else index_mask(self.heads, model.cfg.n_heads, run.real.device)
        self._together = not (run.causal or run.single)  # all queries of a pass have the places of its step
        self._real_rows = run.real.any(dim=1)
        self._fixed = None if run.single else place_mask(what.positions, run.real)[:, None]
        now = self._now = Moment(name, model, run, self.layers, self.heads)
        chooser = self._chooser = None if rule is None else rule.start(now)
        require(
            of != "queries" or chooser is None or not chooser.past,
            f"where={rule!r} finds keys in earlier text, whose queries an autoregressive run has already "
            f"computed, so {name} would change nothing. Pass a SinkTrack of another run or Where(source=..., "
            f"same_step=True); or change keys, with AblateValues or MaskSinks.",
        )
        outside = next((point for point in points or () if not point.startswith("blocks.")), None)
        require(
            outside is None or chooser is None or not chooser.by_layer,
            f"where= finds positions for each layer, and {outside} is in none; name a head, as in "
            f"Where(top_k=1, of=(layer, head)), or pass an array whose layer axis has size 1.",
        )
        sought = [] if rule is None else [leaf.sought for leaf in rule.leaves() if isinstance(leaf, Where)]
        self._sought = (id(what), f"{name} with {' and '.join(filter(None, sought))}") if any(sought) else None
        self._canvas = Canvas(run)
        self._scores = StepScores(model, run, () if chooser is None else chooser.scored)
        self._choice: Choice | None = None
        if run.choices is not None and chooser is not None:
            self._choice = Choice(what, (run.steps, run.real.shape[1]))
            run.choices.append(self._choice)
        self._found: dict[int, StepPlaces | None] = {}  # by step; in a diffusion run of the current step alone

    # --- hooks ---

    def around(self, acts: Pairs) -> Pairs:
        """The hooks that find places, then `acts`, then the hooks that keep a step's scores for the next step."""
        if self._chooser is None or self._chooser.fixed:
            return acts
        return [(CANVAS, self._begin), *self._scores.first(), *acts, *self._scores.last()]

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        """Choose the places of a step; the scores collected so far are those of the step before."""
        self._canvas.hook(value, hook)
        before = self._scores.begin(self._canvas.before)
        self._forget()
        if self._in_step(step := int(hook.step or 0)):
            self._choose(replace(self._now, step=step, canvas=self._canvas.now, before=before))

    def _choose(self, now: Moment) -> None:
        """Evaluate the rule, and limit what it finds to the positions and the heads of the intervention."""
        assert self._chooser is not None
        found = self._chooser.at(now)
        if found is not None and self._fixed is not None:
            limit = (self._fixed & self._run.real[:, None])[:, None]
            missing = limit.shape[-1] - found.mask.shape[-1]  # not decoded yet
            mask = (torch.nn.functional.pad(found.mask, (0, missing)) if missing else found.mask) & limit
            if self._only is not None:
                mask = mask & self._only[:, None]
            if self._choice is not None:
                self._choice.keep(now.step, mask)
            layers = tuple(mask.any(dim=-1).any(dim=2).any(dim=0).tolist())
            found = found._replace(mask=mask, layers=layers, by_layer=mask.unbind(1))
        if self._sought is not None and (found is not None or now.step == self._run.steps - 1):
            self._run.controls.add(self._sought, found is not None and any(found.layers or ()))
        self._found[now.step] = found

    def _forget(self) -> None:
        """Drop the places of earlier steps, unless their queries may be computed again."""
        if not self._run.causal:
            self._found.clear()

    def _of_step(self, step: int) -> StepPlaces | None:
        """What the rule found for a step."""
        if self._chooser is not None and self._chooser.fixed and step not in self._found:
            self._forget()
            self._choose(replace(self._now, step=step))
        return self._found.get(step)

    # --- what was found ---

    def at(
        self, step: int, layer: int | None, real: Bool[Tensor, "batch pos"] | None = None
    ) -> Bool[Tensor, "#batch #head pos"] | None:
        """The places of a step over the complete text; None for nowhere.

        Args:
            real: False on the padding of a single pass; None in a run.
        """
        if not self._in_step(step):
            return None
        fixed = self._fixed if real is None else place_mask(self._positions, real)[:, None]
        if self._chooser is None:
            return fixed
        found = self._of_step(step)
        if found is None or fixed is None:
            return None
        place = layer if layer is not None and found.mask.shape[1] > 1 else 0
        if found.by_layer and real is None:
            return found.by_layer[place]
        mask = found.mask[:, place].to(fixed.device)
        require(
            mask.shape[-1] in (1, fixed.shape[-1]),
            f"where has {mask.shape[-1]} positions, and the pass {fixed.shape[-1]}; give one for each.",
        )
        return mask & fixed

    def in_any_head(self, step: int) -> Bool[Tensor, "#batch pos"] | None:
        """The places of a step of the run in any layer and head, over the complete text; None for nowhere."""
        listed = self.layers if self._chooser is not None and self._chooser.by_layer else [None]
        found = [mask for layer in listed if (mask := self.at(step, layer)) is not None]
        return torch.stack([mask.any(dim=1) for mask in found]).any(dim=0) if found else None

    def of_queries(self, hook: Point, queries: int, device: torch.device) -> Bool[Tensor, "#batch #head query"] | None:
        """The affected queries of the pass of a point; None if there are none at this step."""
        now = hook.forward_pass
        first, spans = now.first(queries), [QuerySpan(0, 0, queries)] if self._run.single else now.spans(queries)
        found = [(span, mask) for span in spans if (mask := self.of_span(hook, span, first, device)) is not None]
        if len(spans) == 1 or not found:
            return found[0][1] if found else None
        heads = max(mask.shape[1] for _, mask in found)
        rows = torch.zeros(len(self._run.real), heads, queries, dtype=torch.bool, device=device)
        for span, mask in found:
            rows[..., span.start : span.stop] = mask
        return rows

    def of_span(
        self, hook: Point, span: QuerySpan, first: int, device: torch.device
    ) -> Bool[Tensor, "#batch #head query"] | None:
        """The affected positions of a span of a pass whose first one is text position `first`; None if none are."""
        real = hook.forward_pass.real if self._run.single else None
        mask = self.at(span.step, layer_of(hook) if str(hook.name).startswith("blocks.") else None, real)
        return None if mask is None else mask[..., first + span.start : first + span.stop].to(device)

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
            reach: in an autoregressive run, the affected queries: the "newest" token of each step, "each" token with
                the keys of its own step, or "all" tokens of a pass with the keys of the newest.
        """
        layer, step, device, now = layer_of(hook), int(hook.step or 0), value.device, hook.forward_pass
        if not (self._together or self._run.single):
            return self._causal_keys(layer, step, value, reach, now.spans())
        mask = self.at(step, layer, now.real if self._run.single else None)
        if mask is None:
            return None
        if now.keys.stop > mask.shape[-1]:  # positions that are new, or not among the keys of the pass
            mask = torch.nn.functional.pad(mask, (0, now.keys.stop - mask.shape[-1]))
        if now.keys != range(mask.shape[-1]):
            mask = mask[..., now.keys.start : now.keys.stop]
        mask = mask.to(device)
        if self._run.single:
            rows = torch.ones(1, dtype=torch.bool)
            mask = mask & index_mask(self.heads, value.shape[1], device)[:, None]
        else:
            rows = self._rows_of(step)
        return KeyMask(mask[:, :, None], rows[:, None].to(device))

    def of_layers(self, hook: Point) -> StepPlaces | None:
        """The places of all layers in a point's pass; None where `keys_at` has to be asked for each layer."""
        step = int(hook.step or 0)
        found = self._of_step(step) if self._together and self._in_step(step) else None
        if found is None or not found.by_layer or hook.forward_pass.keys != range(found.mask.shape[-1]):
            return None
        return found

    def nowhere(self, hook: Point) -> bool:
        """Whether it is known that no layer has a place at the step of a point."""
        step = int(hook.step or 0)
        found = self._in_step(step) and (self._chooser is None or self._of_step(step) is not None)
        return self._together and not found

    def anywhere(self, hook: Point) -> bool | None:
        """Whether the rule found a place in the layer of a point at this step; None if that was not asked."""
        found = self._found.get(int(hook.step or 0)) if self._together else None
        layers = None if found is None else found.layers
        return None if layers is None else layers[layer_of(hook) if len(layers) > 1 else 0]

    def _rows_of(self, step: int) -> Bool[Tensor, " batch"]:
        """Rows whose keys are known."""
        found = self._of_step(step)
        return self._real_rows if found is None or found.rows is None else found.rows

    def _causal_keys(
        self, layer: int, step: int, value: Tensor, reach: str, spans: Sequence[QuerySpan]
    ) -> KeyMask | None:
        """In a causal pass, each token keeps the keys of the step that it belongs to, even when recomputed."""
        size, width, device = spans[-1].stop, value.shape[-1], value.device
        require(
            reach != "all" or size >= width,
            "queries='all' changes what earlier tokens computed, which a key/value cache has already stored; run "
            "with use_cache=False.",
        )
        spans = [QuerySpan(step, 0, size)] if reach == "all" else spans
        found = torch.zeros(*value.shape[:2], 1 if reach == "all" else size, width, dtype=torch.bool, device=device)
        rows = torch.zeros(len(value), found.shape[2], dtype=torch.bool, device=device)
        for span in spans:
            if (keys := self.at(span.step, layer)) is None:
                continue
            own = slice(
                span.stop - 1 if reach == "newest" else span.start, span.stop
            )  # of the prompt, the last decodes
            found[:, :, own] = keys[:, :, None, :width].to(device)
            rows[:, own] = self._rows_of(span.step)[:, None].to(device)
        return KeyMask(found, rows) if bool(rows.any() | found.any()) else None


def index_mask(indices: Sequence[int], size: int, device: torch.device) -> Bool[Tensor, " index"]:
    """True at `indices`, in a mask of length `size`."""
    chosen = torch.zeros(size, dtype=torch.bool, device=device)
    chosen[list(indices)] = True
    return chosen


def along(mask: Bool[Tensor, "#batch #head pos"], name: str, value: Tensor) -> Bool[Tensor, "..."]:
    """`mask` along the axes of `value` at the point `name`; one without heads has the positions of any head."""
    place, head = names.position_axis(name) % value.ndim, head_axis(name)
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
    assert axis is not None, "Places refuses heads at other points"
    chosen = index_mask(within("head", heads, value.shape[axis]), value.shape[axis], value.device)
    return chosen.view([-1 if other == axis else 1 for other in range(value.ndim)])


def head_axis(name: str) -> int | None:
    """The head axis of a point's value; None without one."""
    axes = names.axes_of(name)
    return next((axes.index(axis) for axis in ("head", "kv_head") if axis in axes), None)


@dataclass(frozen=True, kw_only=True)
class AtPositions(Intervention):
    """Base class of interventions that edit values at chosen places; a subclass defines `acts_on` and `edit`.

        @dataclass(frozen=True, kw_only=True)
        class ScaleHeads(AtPositions):
            acts_on = "attn.hook_z"
            factor: float

            def edit(self, z, hook):
                return self.factor * z

    A subclass that acts anywhere but at one point of each layer, or that needs state for a run, defines `pairs` with
    `edits` or `Places`.

    Attributes:
        where: limits the intervention to positions that may differ by row, step, layer and head; with `positions`, to
            those in both. A `Rule` or a combination of rules, or one of:
            a detector: what it finds by the scores of the step before, as `Where` does;
            a `SinkTrack` of another run of the same prompts: its sinks at the same step, as `EpsilonOverMean` defines
            them (for another definition pass ``track.detect(detector)``);
            states ("prompt", "masked", "committed") or token kinds ("digit", "newline", …), as in `OfKind`;
            a boolean array [batch, step, layer, head, pos], as in `InArray`.
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
        return self.edits(model, run, self.acts_on, self.edit)

    def edits(self, model: "Model", run: RunContext, points: str | Sequence[str], edit: Edit) -> Pairs:
        """The hooks that replace the values of points by those of `edit`, at the places of this intervention alone.

        Args:
            points: the points, which have a position axis; or one of a layer, for every layer of ``layers=``.
            edit: as `AtPositions.edit`.

        Raises:
            SettingError: ``heads=`` at a point without heads, or see `Places`.
        """
        if isinstance(points, str):
            points = [f"blocks.{layer}.{points}" for layer in self.chosen_layers(model)]
        places = Places(self, model, run, points)

        def act(value: Tensor, hook: Point) -> Tensor | None:
            chosen = places.along(hook, value, self.heads)
            if chosen is None:
                return None
            given = value.clone()  # an edit in place must not reach the other places
            new = edit(given, hook)
            return torch.where(chosen, (given if new is None else new).to(value), value)

        return places.around([(name, act) for name in points])


@dataclass(frozen=True, kw_only=True)
class AtKeys(AtPositions):
    """Base class of interventions on keys.

    Attributes:
        where: the keys; see `AtPositions`.
        queries: in an autoregressive run, which tokens' queries are affected: the "newest"; "each", the prompt's
            included, with the keys of its own step; or "all", with the keys of the newest.
        positions: limits the keys.

    Raises:
        SettingError: no keys.
    """

    queries: Reach = "newest"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.where is not None or self.positions is not None,
            f"{type(self).__name__} needs where= or positions=, the keys that it changes.",
        )
        earlier = isinstance(self.where, Where) and not self.where.same_step
        require(
            self.steps is None or not earlier or set(whole_numbers("step", self.steps)) != {0},
            f"{type(self).__name__} acts on the sinks of the previous step, so steps=[0] alone has no effect. Name "
            f"a later step, or pass same_step=True.",
        )


def chosen_keys(
    top_k: int | None, where: Any, positions: Sequence[int] | None, which: Mapping[str, Any], usual: int | None = None
) -> dict[str, Any]:
    """``where=`` and ``positions=`` of an intervention on the keys that a constructor's arguments name.

    Args:
        top_k, where, positions, which: the arguments.
        usual: value of `top_k` if no argument says which keys.

    Raises:
        SettingError: settings that exclude each other, or an unknown one.
    """
    known = [entry.name for entry in fields(Where)]
    for name in which:
        require(
            name in known,
            f"there is no argument {name!r}. Use steps=, layers= and heads= to say where it acts, and where= or "
            f"{', '.join(known)} to choose the keys.{nearest(name, ['steps', 'layers', 'heads', *known])}",
        )
    if where is None:
        number = usual if top_k is None and which.get("detector") is None else top_k
        return {"where": Where(top_k=number, positions=positions, **which)}
    require(
        top_k is None and not which,
        f"pass one of top_k, detector and where; got where and {', '.join(['top_k', *which])}. With where=, the "
        f"other settings belong in it: where=Where(top_k=1, pick='random').",
    )
    return {"where": where, "positions": positions}


def follows_run(entry: Intervention) -> bool:
    """Whether the places of an intervention at a step may depend on what earlier steps of its run did."""
    rule = entry.rule if isinstance(entry, AtPositions) else None
    return rule is not None and rule.follows_run
