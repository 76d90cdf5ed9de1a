"""Rules: where an intervention acts. At each step a rule is a boolean mask over layer, head and position.

``where=`` of an intervention takes a rule, or anything that `as_rule` turns into one. Rules combine: ``one & other``
selects the places of both, ``one | other`` those of either, and ``~one`` all others in the text. One of the two sides
may be anything that ``where=`` takes:

    AblateHeads(where=OfKind("digit") & ~Where(top_k=3))  # digits that are not among the head's three strongest keys
    MaskSinks(top_k=None, where=Where(detector=EpsilonOverMean()) & "prompt")

A rule does not know what is done at its places, and an intervention does not know how they are found. An intervention
evaluates its rule once per step, when the step begins (places.py). A rule of your own is a subclass with `Rule.at`.

Pitfall: the scores of the step before do not exist at step 0. A `Where` without a `source` selects nothing there, and
neither does its complement.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.interventions.kinds_now import of_kind
from sinklens.interventions.scores import (
    ScoredStep,
    by_start,
    check_prompts,
    check_second_pass,
    check_source,
    place_of,
    recorded,
)
from sinklens.interventions.selection import Selection, as_tuple
from sinklens.runs.control_keys import ControlCount
from sinklens.runs.intervention import RunContext, Snapshot, place_mask, within
from sinklens.sinks.detectors import AXES, Detector, EpsilonOverMean
from sinklens.sinks.strongest import check_only
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model

Mask = Bool[Tensor, "#batch #layer #head pos"]

NO_SCORES = ScoredStep({})


@dataclass(frozen=True, eq=False)
class Moment:
    """What a rule sees of a run when a step begins; before the first step, `step` and `canvas` have no meaning.

    Attributes:
        name: the intervention, for errors.
        model: the model.
        run: the run, or the single pass.
        layers, heads: those that the intervention changes.
        among: keys that may be chosen by score; None for all.
        step: the step.
        canvas: its canvas; None where a rule depends on the step's number alone.
        before: the scores of the step before, and the canvas that they belong to.
    """

    name: str
    model: "Model"
    run: RunContext
    layers: Sequence[int]
    heads: Sequence[int]
    among: Bool[Tensor, "batch pos"] | None = None
    step: int = 0
    canvas: Snapshot | None = None
    before: ScoredStep = NO_SCORES

    def size(self, axis: str) -> int | None:
        """The size of an axis; None if a single pass does not fix it."""
        sizes: dict[str, int] = {"layer": self.model.cfg.n_layers, "head": self.model.cfg.n_heads}
        if self.run.single:
            return (sizes | {"step": 1}).get(axis)
        batch, length = self.run.real.shape
        return (sizes | {"batch": batch, "step": self.run.steps, "pos": length})[axis]

    def need_run(self) -> RunContext:
        """The run.

        Raises:
            SettingError: a single pass.
        """
        if self.run.single:
            raise SettingError(
                f"{self.name} finds its places in a run, which a single pass is not; use sinklens.trace or "
                f"sinklens.generate, or pass an array."
            )
        return self.run


class StepPlaces(NamedTuple):
    """The places of a step.

    Attributes:
        mask: True at the places, over the text from its first position on. The layers are those of the model.
        rows: rows for which the rule could tell, where others have no scores; None for all.
    """

    mask: Mask
    rows: Bool[Tensor, " batch"] | None = None


class Chooser(NamedTuple):
    """A rule in one run.

    Attributes:
        at: the places of a step; None for nowhere.
        by_layer: whether they differ between layers.
        past: whether they lie before all queries that the step computes.
        fixed: whether the number of the step determines them. A single pass has only such places.
        scored: the layers whose scores of the step before it reads.
    """

    at: Callable[[Moment], StepPlaces | None]
    by_layer: bool = False
    past: bool = False
    fixed: bool = False
    scored: frozenset[int] = frozenset()


class Rule:
    """Where an intervention acts; see the module. A subclass defines `at`."""

    @property
    def follows_run(self) -> bool:
        """Whether the places of a step may depend on what earlier steps of the run did."""
        return True

    def at(self, now: Moment) -> Mask | None:
        """The places of a step, each axis complete or of size 1; None for nowhere. Padding never counts."""
        raise NotImplementedError(f"{type(self).__name__} is a Rule and must define at(self, now).")

    def start(self, now: Moment) -> Chooser:
        """The rule in one run; override it to check the rule against the run, or to keep state.

        Raises:
            SettingError: the rule has no meaning there.
        """
        now.need_run()

        def found(now: Moment) -> StepPlaces | None:
            mask = self.at(now)
            return None if mask is None else StepPlaces(mask)

        return Chooser(found)

    def __and__(self, other: Any) -> "Rule":
        return Combined((self, as_rule(other)), every=True)

    def __or__(self, other: Any) -> "Rule":
        return Combined((self, as_rule(other)), every=False)

    def __invert__(self) -> "Rule":
        return Not(self)

    def __rand__(self, other: Any) -> "Rule":
        return Combined((as_rule(other), self), every=True)

    def __ror__(self, other: Any) -> "Rule":
        return Combined((as_rule(other), self), every=False)

    def __bool__(self) -> bool:
        raise SettingError(
            "a rule is neither true nor false; combine rules with &, | and ~ instead of and, or and not."
        )

    __array_ufunc__ = None  # so that ``array & rule`` is a rule


@dataclass(frozen=True)
class Combined(Rule):
    """Where `every` one of several rules is, as with ``&``; or where any of them is, as with ``|``."""

    rules: tuple[Rule, ...]
    every: bool

    @property
    def follows_run(self) -> bool:
        """See `Rule.follows_run`."""
        return any(rule.follows_run for rule in self.rules)

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`.

        Raises:
            SettingError: with ``&``, a control of sinks, which the other rules would make smaller.
        """
        controls = [rule for rule in self.rules if isinstance(rule, Where) and rule.pick != "strongest"]
        if self.every and controls:
            raise SettingError(
                f"{now.name}: Where(pick={controls[0].pick!r}) draws as many keys as there are sinks, and & would then "
                f"leave out some of them. Restrict the draw itself: Where(pick={controls[0].pick!r}, only=[...]), or "
                f"positions= of the intervention; for another control pass an array."
            )
        parts = [rule.start(now) for rule in self.rules]

        def found(now: Moment) -> StepPlaces | None:
            known = [one for part in parts if (one := part.at(now)) is not None]
            if not known or (self.every and len(known) < len(parts)):
                return None
            length = max(one.mask.shape[-1] for one in known)  # some cover only the text so far
            masks = [torch.nn.functional.pad(one.mask, (0, length - one.mask.shape[-1])) for one in known]
            rows = [one.rows for one in known if one.rows is not None]
            if self.every:
                return StepPlaces(reduce(torch.bitwise_and, masks), torch.stack(rows).all(dim=0) if rows else None)
            judged = torch.stack(rows).any(dim=0) if len(rows) == len(known) else None
            return StepPlaces(reduce(torch.bitwise_or, masks), judged)

        return Chooser(
            found,
            by_layer=any(part.by_layer for part in parts),
            past=any(part.past for part in parts),
            fixed=all(part.fixed for part in parts),
            scored=frozenset[int]().union(*(part.scored for part in parts)),
        )


@dataclass(frozen=True)
class Not(Rule):
    """Everywhere in the text but where another rule is, ``~rule``; in rows without scores, nowhere."""

    rule: Rule

    @property
    def follows_run(self) -> bool:
        """See `Rule.follows_run`."""
        return self.rule.follows_run

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        inner = self.rule.start(now)

        def found(now: Moment) -> StepPlaces | None:
            places = inner.at(now)
            if places is None or places.rows is None:
                return places and StepPlaces(~places.mask)
            return StepPlaces(~places.mask & places.rows[:, None, None, None], places.rows)

        return inner._replace(at=found)


class OfStep(Rule):
    """Base class of rules whose places do not depend on earlier steps."""

    @property
    def follows_run(self) -> bool:
        """See `Rule.follows_run`."""
        return False


@dataclass(frozen=True)
class OfKind(OfStep):
    """Positions whose state or token kind is one of those named, on the canvas as the step begins.

    Attributes:
        names: states ("prompt", "masked", "committed") or token kinds ("digit", "newline", …), any of them; "not
            digit", for example, is all but digits. "mask" is "masked", and "decided" is "committed": a decided answer
            token.
    """

    names: str | Sequence[str]

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        names, run = as_tuple(self.names), now.need_run()
        check_only(names, "where")
        if run.causal and {"masked", "mask"} & set(names):
            raise SettingError(
                f"where={self.names!r}: an autoregressive run has no masked positions; name 'prompt', 'committed' or "
                f"a kind."
            )
        return super().start(now)

    def at(self, now: Moment) -> Mask:
        """See `Rule.at`."""
        assert now.canvas is not None, "every step of a run has a canvas"
        kind = of_kind(as_tuple(self.names), now.need_run(), now.canvas, f"where={self.names!r}")
        return kind[:, None, None]


@dataclass(frozen=True)
class Positions(OfStep):
    """Fixed positions of every row, as in ``positions=``: padding does not count, negative ones count from the end."""

    positions: Sequence[int] | None

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        found = StepPlaces(place_mask(self.positions, now.need_run().real)[:, None, None])
        return Chooser(lambda now: found, fixed=True)


@dataclass(frozen=True, eq=False)
class InArray(OfStep):
    """Positions marked in a boolean array; they are columns of the canvas, left padding included, as in a track.

    Attributes:
        marked: [batch, step, layer, head, pos], each axis complete or of size 1. A DataArray may lack axes, and its
            steps are those of its coordinate.
    """

    marked: Any

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        where, steps = self.marked, None
        if isinstance(where, xr.DataArray):
            if "step" in where.coords:
                where = where if "step" in where.dims else where.expand_dims("step")
                steps = where["step"].to_numpy().tolist()
                within("step", steps, now.size("step") or 1)
            where = _all_axes(where)
        marked = checked_array(where, AXES, now, steps)

        def at(now: Moment) -> StepPlaces | None:
            if steps is not None and now.step not in steps:
                return None
            place = now.step if steps is None else steps.index(now.step)
            return StepPlaces(marked[:, place if marked.shape[1] > 1 else 0])

        return Chooser(at, by_layer=marked.shape[2] > 1, fixed=True)


def _all_axes(where: xr.DataArray) -> xr.DataArray:
    """`where` on all axes of a track; those that it lacks have size 1."""
    unknown = [axis for axis in map(str, where.dims) if axis not in AXES]
    if unknown:
        raise SettingError(f"where has an axis {unknown[0]!r}; the axes of a run are {', '.join(AXES)}.")
    return where.expand_dims([axis for axis in AXES if axis not in where.dims]).transpose(*AXES)


def checked_array(
    where: Any, axes: Sequence[str], now: Moment, steps: Sequence[int] | None = None
) -> Bool[Tensor, "..."]:
    """`where` as a tensor, once its type and axes are those of the run.

    Args:
        steps: the steps that it holds, if not those of the run.

    Raises:
        SettingError: it is not boolean, an axis has another size, or it is True on padding.
    """
    values = torch.as_tensor(where.to_numpy() if isinstance(where, xr.DataArray) else where)
    shape = list(values.shape)
    if values.dtype is not torch.bool:
        raise SettingError(f"where must be boolean, True at the places; got {values.dtype} of shape {shape}.")
    if values.ndim != len(axes):
        raise SettingError(
            f"where must have the axes [{', '.join(axes)}], those that do not matter with size 1; got shape {shape}."
        )
    for axis, size in zip(axes, shape, strict=True):
        known = len(steps) if axis == "step" and steps else now.size(axis)
        if known is not None and size not in (1, known):
            hint = " A DataArray, such as track.detect(), may lack steps." if axis == "step" else ""
            raise SettingError(f"where has {size} along {axis}, this run {known}; give 1 or {known}.{hint}")
    if now.run.single:
        return values
    values = values.to(now.run.real.device)
    real = now.run.real.view(len(now.run.real), *[1] * (len(axes) - 2), -1)
    if shape[0] > 1 and shape[-1] > 1 and bool((wrong := values & ~real).any()):
        first = wrong.nonzero()[0].tolist()
        raise SettingError(
            f"where marks position {first[-1]} of row {first[0]}, which is padding; positions of an array are columns "
            f"of the canvas, as in a track."
        )
    return values & real


@dataclass(frozen=True)
class ByStep(Rule):
    """Positions that a function names for each step.

    Attributes:
        function: of the step; returns ``positions=`` for it, a state or kind, a boolean array [batch, layer, head,
            pos], or None for nowhere.
    """

    function: Callable[[int], Any]

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        now.need_run()

        def found(now: Moment) -> StepPlaces | None:
            given = self.function(now.step)
            if isinstance(given, Tensor | np.ndarray | xr.DataArray) and given.dtype in (torch.bool, np.bool_):
                return StepPlaces(checked_array(given, [axis for axis in AXES if axis != "step"], now))
            if given is None:
                return None
            rule = OfKind(given) if _is_names(given) else Positions(given)
            return rule.start(now).at(now)

        return Chooser(found)


@dataclass(frozen=True, kw_only=True)
class Where(Selection, Rule):
    """Positions chosen by their scores at every step: sinks, strongest keys, or a control of them.

        PatchHooks(source=kept.caches, where=Where(top_k=1, of=(3, 0)))  # follows the strongest key of head 3.0

    Attributes:
        top_k, detector, scope, pick, only, seed, persistent, same_step, source: which keys; see `Selection`.
        of: (layer, head) whose positions apply to every layer and head that the intervention changes. By default each
            head has its own positions; at a point without a head axis, those of any of the layer's heads.

    Raises:
        SettingError: settings that exclude each other; in a run, a `top_k` above the number of positions, once the run
            reaches that step; a source of other prompts or another model.
    """

    of: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of is not None and len(self.of) != 2:
            raise SettingError(f"of must be a pair (layer, head); got {self.of!r}.")

    @classmethod
    def like(cls, selection: Selection) -> "Where":
        """The rule with the settings of an intervention."""
        return cls(**{field.name: getattr(selection, field.name) for field in fields(Selection)})

    @property
    def follows_run(self) -> bool:
        """See `Rule.follows_run`: by the scores or the tokens of the step before, or by keys drawn once."""
        earlier = self.track is None or bool(self.only) or self.pick == "same_kind"
        return self.persistent or (earlier and not self.same_step)

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`."""
        run, source, cfg = now.need_run(), self.track, now.model.cfg
        layers, heads = list(now.layers), list(now.heads)
        if self.of is not None:
            layers, heads = within("layer", self.of[:1], cfg.n_layers), within("head", self.of[1:], cfg.n_heads)
        if source is not None:
            check_source(source, run)
        elif self.same_step:
            check_second_pass(run)
        counted = self.count_in(run, now.name)
        checked = source is None
        among = torch.ones_like(run.real) if now.among is None else now.among

        def found(now: Moment) -> StepPlaces | None:
            nonlocal checked
            assert now.canvas is not None, "every step of a run has a canvas"
            if source is not None and not checked:
                check_prompts(source, run, now.canvas.ids)
                checked = True
            seen = self._evidence(now, layers)
            if not seen.scores:
                return None
            chosen = self.taken(seen, run.real, among, now.step, run, counted, heads)
            if self.of is not None:
                chosen = chosen[:, :, heads]
            elif len(layers) < cfg.n_layers:
                complete = chosen.new_zeros(len(chosen), cfg.n_layers, *chosen.shape[2:])
                complete[:, layers] = chosen
                chosen = complete
            return StepPlaces(chosen, (run.real if seen.there is None else seen.there).any(dim=1))

        past = run.causal and not (self.same_step and source is not None)
        scored = frozenset() if source is not None or self.same_step else frozenset(layers)
        return Chooser(found, by_layer=self.of is None, past=past, scored=scored)

    def taken(
        self,
        seen: "ScoredStep",
        real: Bool[Tensor, "batch pos"],
        among: Bool[Tensor, "batch pos"],
        step: int,
        run: RunContext | None = None,
        counted: ControlCount | None = None,
        heads: Sequence[int] | None = None,
    ) -> Bool[Tensor, "batch layer head key"]:
        """The keys of a step, for the layers that have scores; see `Selection.choose`."""
        keys = next(iter(seen.scores.values())).shape[-1]
        canvas = None if seen.canvas is None else seen.canvas.first(keys)
        real, among = real[:, :keys], among[:, :keys]
        among = among if seen.there is None else among & seen.there
        found: dict[int, Tensor] = {}
        for start, layers in by_start(seen.scores, seen.starts).items():
            if self.scope == "model" and len(layers) < len(seen.scores):
                raise SettingError(
                    "scope='model' pools the scores of all layers, but layers with a sliding window have different "
                    "keys; use scope='layer' or 'head'."
                )
            reach = torch.arange(keys, device=real.device) >= start
            found |= self.choose(
                layers, real & reach, run, canvas, step, among=among & reach, track=seen.track, counted=counted,
                heads=heads,
            )  # fmt: skip
        return torch.stack([found[layer] for layer in seen.scores], dim=1)

    def _evidence(self, now: Moment, layers: list[int]) -> "ScoredStep":
        """The scores of the step that `source` and `same_step` name."""
        run, source = now.need_run(), self.track
        assert now.canvas is not None
        if source is not None:
            place = place_of(source, now.step if self.same_step else now.step - 1)
            return ScoredStep({}) if place is None else recorded(source, place, layers, now.canvas.ids.device)
        if not self.same_step:
            scores = now.before.scores
            return now.before._replace(scores={layer: scores[layer] for layer in layers if scores})
        names = [f"blocks.{layer}.attn.hook_sink_scores" for layer in layers]
        peeked = run.tree.peek(now.canvas.ids, run.forward_pass.real, names)
        here = {layer: peeked[name].to(now.canvas.ids.device) for layer, name in zip(layers, names, strict=True)}
        return ScoredStep(here, now.canvas)


def _is_names(value: object) -> bool:
    """Whether `value` is a name or a list of names."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)
    )


def as_rule(where: Any) -> Rule:
    """The rule of what ``where=`` takes; see `places.AtPositions`.

    Raises:
        SettingError: it is of an unknown type.
    """
    if isinstance(where, Rule):
        return where
    if isinstance(where, Tensor | np.ndarray | xr.DataArray):
        return InArray(where)
    if isinstance(where, Detector):
        return Where(detector=where)
    if isinstance(where, SinkTrack):
        return Where(detector=EpsilonOverMean(), source=where, same_step=True)
    if callable(where) and not isinstance(where, type):
        return ByStep(where)
    if _is_names(where):
        return OfKind(where)
    raise SettingError(
        f"where must be a detector, a Where, a SinkTrack, a state or token kind, a boolean array or a function of the "
        f"step; got {where!r}. Positions that never change are positions=."
    )
