"""Rules: where an intervention acts. At each step a rule is a boolean mask over layer, head and position.

``where=`` of an intervention takes a rule, or anything that `as_rule` turns into one. Rules combine: ``one & other``
selects the places of both, ``one | other`` those of either, and ``~one`` all others in the text. One of the two sides
may be anything that ``where=`` takes:

    AblateHeads(where=OfKind("digit") & ~Where(top_k=3))  # digits that are not among the head's three strongest keys
    MaskSinks(where=Where(detector=EpsilonOverMean()) & "prompt")

A rule does not know what is done at its places, and an intervention does not know how they are found. An intervention
evaluates its rule once per step, when the step begins (places.py). A rule of your own is a subclass with `Rule.at`.

Pitfall: the scores of the step before do not exist at step 0. A `Where` without a `source` selects nothing there, and
neither does its complement. A key that another intervention hides receives no attention, so it has no score either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.interventions import controls
from sinklens.interventions.controls import DRAWN, Pick
from sinklens.interventions.scores import (
    ScoredStep,
    check_prompts,
    check_source,
    detected,
    kinds_now,
    of_kind,
    recorded,
)
from sinklens.model import Model
from sinklens.runs.control_keys import ControlCount
from sinklens.runs.intervention import RunContext, Snapshot, place_mask, within
from sinklens.runs.result import Generation
from sinklens.sinks.detectors import AXES, Detector, EpsilonOverMean
from sinklens.sinks.strongest import check_only
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Seed, Share, Words, as_tuple, check_arguments, plainly_shown

Mask = Bool[Tensor, "#batch #layer #head pos"]

NO_SCORES = ScoredStep({})
ITSELF: Literal["itself"] = "itself"


@dataclass(frozen=True, eq=False)
class Moment:
    """What a rule sees of a run when a step begins; before the first step, `step` and `canvas` have no meaning.

    Attributes:
        name: the intervention, for errors.
        model: the model.
        run: the run, or the single pass.
        layers, heads: those that the intervention changes.
        step: the step.
        canvas: its canvas, a `Snapshot`; None where rules depend on the step's number alone.
        before: the scores of the step before, and the canvas that they belong to.
    """

    name: str
    model: "Model"
    run: RunContext
    layers: Sequence[int]
    heads: Sequence[int]
    step: int = 0
    canvas: Any = None
    before: ScoredStep = NO_SCORES

    def need_run(self) -> RunContext:
        """The run.

        Raises:
            SettingError: it is a single pass.
        """
        require(
            not self.run.single,
            f"{self.name} finds its places in a run, which a single pass is not; use sinklens.trace or "
            f"sinklens.generate, or pass an array [batch, 1, layer, head, pos] as where=.",
        )
        return self.run


class StepPlaces(NamedTuple):
    """The places of a step.

    Attributes:
        mask: True at the places, over the text from its first position on. The layers are those of the model.
        rows: rows that had scores; None if all had.
        layers: whether the mask is True anywhere in each layer; None if this was not asked.
        by_layer: the mask of each of its layers, once it is limited to the positions of an intervention.
    """

    mask: Mask
    rows: Bool[Tensor, " batch"] | None = None
    layers: tuple[bool, ...] | None = None
    by_layer: tuple[Tensor, ...] = ()


class Chooser(NamedTuple):
    """A rule in one run.

    Attributes:
        at: the places of a step; None for nowhere.
        by_layer: whether they differ between layers.
        past: whether every place precedes the step's queries.
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
        """The places of a step, each axis complete or of size 1; None if nothing is known, so that its complement has
        no places either. Padding never counts.
        """
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

    def leaves(self) -> list["Rule"]:
        """The rules that it combines, or itself."""
        return [self]

    def mapped(self, change: "Callable[[Where], Rule]") -> "Rule":
        """The rule with every `Where` in it changed."""
        return self

    def __and__(self, other: Any) -> "Rule":
        return Combined((self, as_rule(other)), "and")

    def __or__(self, other: Any) -> "Rule":
        return Combined((self, as_rule(other)), "or")

    def __invert__(self) -> "Rule":
        return Combined((self,), "not")

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise SettingError(
            "a rule is neither true nor false; combine rules with &, | and ~ instead of and, or and not."
        )

    __array_ufunc__ = None  # so that ``array & rule`` is a rule


@dataclass(frozen=True)
class Combined(Rule):
    """The places of all of several rules ("and"), of any of them ("or"), or outside one rule ("not").

    Where one of the rules has no scores, in a row or at a step, the complement of the combination has no places.
    """

    rules: tuple[Rule, ...]
    how: Literal["and", "or", "not"]

    @property
    def follows_run(self) -> bool:
        return any(rule.follows_run for rule in self.rules)

    def leaves(self) -> list[Rule]:
        return [leaf for rule in self.rules for leaf in rule.leaves()]

    def mapped(self, change: "Callable[[Where], Rule]") -> Rule:
        return replace(self, rules=tuple(rule.mapped(change) for rule in self.rules))

    def start(self, now: Moment) -> Chooser:
        """See `Rule.start`.

        Raises:
            SettingError: with ``&``, a control of sinks, which the other rules would make smaller.
        """
        picks = [rule.pick for rule in self.rules if isinstance(rule, Where) and rule.pick != "strongest"]
        if self.how == "and" and picks:
            raise SettingError(
                f"{now.name}: Where(pick={picks[0]!r}) draws as many keys as there are sinks, and & would then "
                f"leave out some of them. Restrict the draw itself: Where(pick={picks[0]!r}, only=[...]), or "
                f"positions=; for another control pass an array."
            )
        parts = [rule.start(now) for rule in self.rules]

        def found(now: Moment) -> StepPlaces | None:
            known = [one for part in parts if (one := part.at(now)) is not None]
            if not known or (self.how == "and" and len(known) < len(parts)):
                return None
            length = max(one.mask.shape[-1] for one in known)  # some cover only the text so far
            masks = [torch.nn.functional.pad(one.mask, (0, length - one.mask.shape[-1])) for one in known]
            rows = [one.rows for one in known if one.rows is not None]
            if len(known) < len(parts):  # one side of "or" has no scores
                rows.append(now.run.real.new_zeros(len(now.run.real)))
            judged = torch.stack(rows).all(dim=0) if rows else None
            if self.how == "not":
                return StepPlaces(~masks[0] if judged is None else ~masks[0] & judged[:, None, None, None], judged)
            return StepPlaces(reduce(torch.bitwise_and if self.how == "and" else torch.bitwise_or, masks), judged)

        return Chooser(
            found,
            by_layer=any(part.by_layer for part in parts),
            past=any(part.past for part in parts),
            fixed=all(part.fixed for part in parts),
            scored=frozenset[int]().union(*(part.scored for part in parts)),
        )


class OfStep(Rule):
    """Base class of rules whose places do not depend on earlier steps."""

    @property
    def follows_run(self) -> bool:
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
        names = as_tuple(self.names)
        check_only(names, "where")
        require(
            not now.need_run().causal or not ({"masked", "mask"} & set(names)),
            f"where={self.names!r}: an autoregressive run has no masked positions; name 'prompt', 'committed' or "
            f"a kind.",
        )
        return super().start(now)

    def at(self, now: Moment) -> Mask:
        return of_kind(as_tuple(self.names), now.run, now.canvas, f"where={self.names!r}")[:, None, None]


@plainly_shown
@dataclass(frozen=True)
class AtNoise(OfStep):
    """All positions of the rows whose undecided share of the answer lies in a range, at the steps where it does.

        Steer(direction, where=AtNoise(0.5, 1.0) & "masked")  # undecided positions, while half the answer is open

    It means the same for runs of any number of steps, and in the passes of a likelihood. The share is that of all
    positions after the prompt: a `Suffix` or a given part of the answer counts as decided.

    Attributes:
        least, most: the range, ends included; 1 is an answer without any token, 0 a finished one.

    Raises:
        SettingError: not numbers from 0 to 1; in a run, a model without a mask token.
    """

    least: Share
    most: Share = 1.0

    def __post_init__(self) -> None:
        check_arguments(self)

    def start(self, now: Moment) -> Chooser:
        require(
            not now.need_run().causal and now.model.mask_token_id is not None,
            f"AtNoise counts undecided positions of the answer, and {now.model.name} has no masks; use steps=.",
        )
        return super().start(now)

    def at(self, now: Moment) -> Mask:
        real = now.run.real
        answer = real & (torch.arange(real.shape[1], device=real.device) >= now.run.prompt_length)
        share = (now.canvas.undecided & answer).sum(dim=1) / answer.sum(dim=1).clamp(min=1)
        return (((share >= self.least) & (share <= self.most))[:, None] & real)[:, None, None]


@dataclass(frozen=True)
class Positions(OfStep):
    """Fixed positions of every row, as in ``positions=``: padding does not count, negative ones count from the end."""

    positions: Sequence[int] | None

    def start(self, now: Moment) -> Chooser:
        found = StepPlaces(place_mask(self.positions, now.need_run().real)[:, None, None])
        return Chooser(lambda now: found, fixed=True)


@dataclass(frozen=True, eq=False)
class InArray(OfStep):
    """Positions marked in a boolean array; they are columns of the canvas, left padding included, as in a track.

    Attributes:
        marked: [batch, step, layer, head, pos], each axis complete or of size 1. A DataArray may omit axes; its `step`
            coordinate says which steps it covers.
    """

    marked: Any

    def start(self, now: Moment) -> Chooser:
        where, steps, run, cfg = self.marked, None, now.run, now.model.cfg
        sizes = {"layer": cfg.n_layers, "head": cfg.n_heads, "step": run.steps}
        sizes |= {} if run.single else dict(zip(("batch", "pos"), run.real.shape, strict=True))
        if isinstance(where, xr.DataArray):
            if "step" in where.coords:
                where = where if "step" in where.dims else where.expand_dims("step")
                steps = where["step"].to_numpy().tolist()
                within("step", steps, sizes["step"])
                sizes["step"] = len(steps)
            if unknown := [axis for axis in map(str, where.dims) if axis not in AXES]:
                raise SettingError(f"where has an axis {unknown[0]!r}; the axes of a run are {', '.join(AXES)}.")
            where = where.expand_dims([axis for axis in AXES if axis not in where.dims]).transpose(*AXES).to_numpy()
        marked = _checked(torch.as_tensor(where), run, sizes)

        def at(now: Moment) -> StepPlaces | None:
            if steps is not None and now.step not in steps:
                return None
            place = now.step if steps is None else steps.index(now.step)
            return StepPlaces(marked[:, place if marked.shape[1] > 1 else 0])

        return Chooser(at, by_layer=marked.shape[2] > 1, fixed=True)


def _checked(values: Tensor, run: RunContext, sizes: Mapping[str, int]) -> Bool[Tensor, "..."]:
    """The places that an array marks, once its type and axes are those of the run.

    Raises:
        SettingError: it is not boolean, an axis has another size, or it is True on padding.
    """
    shape = list(values.shape)
    require(
        values.dtype is torch.bool and values.ndim == len(AXES),
        f"where must be boolean, True at the places, with the axes [{', '.join(AXES)}], those that do not matter "
        f"with size 1; got {values.dtype} of shape {shape}.",
    )
    for axis, size in zip(AXES, shape, strict=True):
        if size not in (1, sizes.get(axis, size)):
            hint = " A DataArray, such as track.detect(), may lack steps." if axis == "step" else ""
            raise SettingError(f"where has {size} along {axis}, this run {sizes[axis]}; give 1 or {sizes[axis]}.{hint}")
    if run.single:
        return values
    values = values.to(run.real.device)
    real = run.real.view(len(run.real), 1, 1, 1, -1)
    if shape[0] > 1 and shape[-1] > 1 and bool((wrong := values & ~real).any()):
        first = wrong.nonzero()[0].tolist()
        raise SettingError(
            f"where marks position {first[-1]} of row {first[0]}, which is padding; positions of an array are columns "
            f"of the canvas, as in a track."
        )
    return values & real


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class Where(Rule):
    """Positions chosen by their scores at every step: sinks, strongest keys, or a control of them.

        PatchHooks(source=kept.caches, where=Where(top_k=1, of=(3, 0)))  # follows the strongest key of head 3.0

    The scores are the column sums of a head's pattern; in an autoregressive run, the attention of its newest token.
    Padding is never chosen. A head whose scores are all 0 has no strongest key.

    Attributes:
        top_k: number of strongest keys per head; None if `detector` chooses them. The paper masks 1, 5 and 10.
        detector: finds the keys in a one-step track; its strength is not used.
        pick: "strongest", or other keys as a control: "weakest": as many of the weakest; "random": as many random keys
            that are weaker than all of the strongest; "random_any": as many random keys of any strength, possibly the
            strongest themselves; "same_mass": random keys that are not sinks by Eq. 3, over all heads of a layer, until
            together they receive as much attention as the strongest; "same_kind": for each of the strongest, a random
            one of the weaker keys with the same kind of token; "nearest": for each of the strongest, the nearest
            position among the weaker keys.
        only: states ("prompt", "masked", "committed") or token kinds that may be taken, any of them; "not digit", for
            example, leaves out digits.
        positions: positions that may be taken, as in ``positions=``; None for all.
        seed: seed of random keys, which depend only on the seed, the row's prompt, the step, the layer and the head.
        persistent: draw random keys once per run, not at every step: a key is replaced only while it may not be taken,
            as when it becomes one of the strongest. In an autoregressive run keys of the prompt are taken first,
            because only they exist at every step.
        same_step: use the scores of step t itself, from an unmasked pass before it; doubles the work, diffusion only.
        source: "itself", another run of the same prompts, or that run's `sinks`. Scores of another run are its recorded
            column sums at step t − 1 (at step t with `same_step`); at a step that the run or a row of it lacks, nothing
            is selected. A part of a track holds the steps listed in its ``step`` coordinate.
        of: (layer, head) whose positions apply to every layer and head that the intervention changes. By default each
            head has its own positions; at a point without a head axis, those of any of the layer's heads.

    Raises:
        SettingError: settings that exclude each other; in a run, a `top_k` above the number of positions, once the run
            reaches that step; a source of other prompts or another model.
    """

    top_k: Annotated[int, Ge(0)] | None = None
    detector: "Detector | None" = None
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    positions: Sequence[int] | None = None
    seed: Seed = 0
    persistent: bool = False
    same_step: bool = False
    source: "SinkTrack | Generation | Literal['itself']" = ITSELF
    of: Annotated[tuple[int, int], Words("a pair (layer, head)")] | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        require(
            (self.top_k is None) != (self.detector is None),
            f"pass either top_k, a number of keys per head, or detector; got top_k={self.top_k} and "
            f"detector={self.detector!r}. positions= and only= alone restrict which keys count.",
        )
        require(
            not self.persistent or self.pick in DRAWN,
            f"persistent=True needs random keys, pick={' or '.join(map(repr, DRAWN))}; pick={self.pick!r} draws "
            f"none. Leave it out.",
        )
        check_only(as_tuple(self.only))
        _ = self.track

    @property
    def track(self) -> SinkTrack | None:
        """The recorded scores; None for those of the run itself.

        Raises:
            SettingError: `source` recorded no sinks, or is not a run.
        """
        if isinstance(self.source, str) and self.source == ITSELF:
            return None
        found = self.source if isinstance(self.source, SinkTrack) else getattr(self.source, "sinks", None)
        if not isinstance(found, SinkTrack):
            raise SettingError(
                f"source must be another run or its sinks; got {self.source!r}. A run made with record_sinks=False has "
                f"none; repeat it without that setting."
            )
        return found

    @property
    def follows_run(self) -> bool:
        """See `Rule.follows_run`: by the scores or the tokens of the step before, or by keys drawn once."""
        earlier = self.track is None or bool(self.only) or self.pick == "same_kind"
        return self.persistent or (earlier and not self.same_step)

    @property
    def sought(self) -> str:
        """What it looks for, in words; empty for no key at all."""
        which = f"top_k={self.top_k}" if self.detector is None else f"detector={self.detector!r}"
        instead = "" if self.pick == "strongest" else f", pick={self.pick!r}"
        return "" if self.top_k == 0 else which + instead

    def mapped(self, change: "Callable[[Where], Rule]") -> Rule:
        return change(self)

    def start(self, now: Moment) -> Chooser:
        run, source, cfg = now.need_run(), self.track, now.model.cfg
        layers, heads = list(now.layers), list(now.heads)
        if self.of is not None:
            layers, heads = within("layer", self.of[:1], cfg.n_layers), within("head", self.of[1:], cfg.n_heads)
        if source is not None:
            check_source(source, run)
        require(
            source is not None or not self.same_step or not (run.causal or run.tree.architecture.encoder),
            "same_step needs a second pass over the canvas; it is available in diffusion runs of a model without an "
            "encoder, where no self-conditioning is lost; use the sinks of the previous step.",
        )
        scored = layers if self.detector is None or self.detector.within_layer else list(range(cfg.n_layers))
        at = [scored.index(layer) for layer in layers]
        counted = None if self.pick == "strongest" else run.controls.begin(f"{now.name}(pick={self.pick!r})")
        checked = source is None

        def found(now: Moment) -> StepPlaces | None:
            nonlocal checked
            if source is not None and not checked:
                check_prompts(source, run, now.canvas.ids)
                checked = True
            seen = self._evidence(now, scored)
            if not seen.scores:
                return None
            chosen = self.taken(seen, now.step, run, counted, heads, at)[:, at]
            if self.of is not None:
                chosen = chosen[:, :, heads]
            elif len(layers) < cfg.n_layers:
                complete = chosen.new_zeros(len(chosen), cfg.n_layers, *chosen.shape[2:])
                complete[:, layers] = chosen
                chosen = complete
            return StepPlaces(chosen, (run.real if seen.there is None else seen.there).any(dim=1))

        return Chooser(
            found,
            by_layer=self.of is None,
            past=run.causal and not (self.same_step and source is not None),
            scored=frozenset() if source is not None or self.same_step else frozenset(scored),
        )

    def _evidence(self, now: Moment, layers: list[int]) -> ScoredStep:
        """The scores of the step that `source` and `same_step` name."""
        run, source, canvas = now.run, self.track, now.canvas
        if source is not None:
            step, known = now.step if self.same_step else now.step - 1, source.data["step"].to_numpy().tolist()
            return recorded(source, known.index(step), layers, canvas.ids.device) if step in known else NO_SCORES
        if not self.same_step:
            scores = now.before.scores
            return now.before._replace(scores={layer: scores[layer] for layer in layers if scores})
        names = [f"blocks.{layer}.attn.hook_sink_scores" for layer in layers]
        peeked = run.tree.peek(canvas.ids, run.forward_pass.real, names)
        here = {layer: peeked[name].to(canvas.ids.device) for layer, name in zip(layers, names, strict=True)}
        return ScoredStep(here, canvas)

    def taken(
        self,
        seen: ScoredStep,
        step: int,
        run: RunContext,
        counted: ControlCount | None = None,
        heads: Sequence[int] | None = None,
        layers: Sequence[int] | slice = slice(None),
    ) -> Bool[Tensor, "batch layer head key"]:
        """The chosen keys of a step, for the layers that have scores.

        Args:
            seen: the scores, and the canvas that they belong to, which `only`, kinds and detectors need.
            step: the step that the keys are for; random keys depend on it.
            run: the run.
            counted: counts the keys of a control and those that it controls for, in `heads` (all heads for None) of
                `layers`, indices of those that have scores.

        Raises:
            SettingError: `top_k` exceeds the number of keys that exist, or something needs unknown data.
        """
        scores, starts = torch.stack(list(seen.scores.values()), dim=1), [seen.starts.get(at, 0) for at in seen.scores]
        keys, real, device = scores.shape[-1], run.real, run.real.device
        reach = torch.arange(keys, device=device) >= torch.tensor(starts, device=device)[:, None]
        there = (real[:, None, :keys] & reach)[:, :, None]  # [batch, layer, 1, key]
        fewest = int(there.sum(dim=-1).min())
        require(
            self.top_k is None or self.top_k <= fewest,
            f"top_k = {self.top_k}, but at step {step} a row has only {fewest} positions; choose at most that many.",
        )
        assert seen.canvas is not None, "scores belong to a canvas"
        canvas = seen.canvas.first(keys)
        allowed = there if seen.there is None else there & seen.there[:, None, None, :keys]
        if self.positions is not None:
            allowed = allowed & place_mask(self.positions, real)[:, None, None, :keys]
        if names := as_tuple(self.only):
            allowed = allowed & of_kind(names, run, canvas, f"only={list(names)}")[:, None, None]
        attends = (scores != 0).any(dim=-1, keepdim=True)
        if self.detector is None:
            number = torch.full((len(scores), 1, 1, 1), self.top_k or 0, device=scores.device)
            found = controls.largest(scores, allowed, number) & attends
        else:
            found = detected(self.detector, scores.masked_fill(~there, torch.nan), seen, run, canvas) & allowed
        if self.pick == "strongest":
            return found
        taken = self._control(scores, found, allowed, there, run, canvas, step, list(seen.scores), heads)
        if self.pick in ("weakest", "random_any"):
            taken = taken & attends
        if counted is not None:
            of_heads = slice(None) if heads is None else list(heads)
            requested, picked = (part[:, layers][:, :, of_heads].sum(dim=-1) for part in (found, taken))
            none = (picked.sum(dim=-1, keepdim=True) == 0) & (requested > 0)  # in any head of the layer
            short = none if self.pick == "same_mass" else picked < requested
            counted.add(*(part.flatten(1) for part in (requested, picked, short)))
        return taken

    def _control(
        self, scores: Tensor, found: Tensor, allowed: Tensor, there: Tensor, run: RunContext, canvas: Snapshot,
        step: int, layers: list[int], heads: Sequence[int] | None,
    ) -> Bool[Tensor, "batch layer head key"]:  # fmt: skip
        """The control of the strongest keys `found`."""
        number, rest = found.sum(dim=-1, keepdim=True), controls.rest_of(scores, found, allowed)
        if self.pick == "weakest":
            return controls.largest(-scores, allowed, number)
        if self.pick == "nearest":
            return controls.nearest(scores, found, rest)
        order = controls.random_order(scores, run, self.seed, None if self.persistent else step, layers)
        if self.pick == "same_mass":
            free = torch.zeros_like(found)
            among = list(range(found.shape[2]) if heads is None else heads)
            free[:, :, among] = allowed.expand_as(found)[:, :, among]
            return controls.same_mass(order, scores, found & free, free, there)
        if self.pick == "same_kind":
            return controls.same_kind(order, found, rest, kinds_now(run, canvas, "pick='same_kind'")[:, None, None])
        return controls.largest(order, rest if self.pick == "random" else allowed, number)


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
    if isinstance(where, str) or (
        isinstance(where, list | tuple) and len(where) > 0 and all(isinstance(name, str) for name in where)
    ):
        return OfKind(where)
    raise SettingError(
        f"where must be a detector, a Where, a SinkTrack, a state or token kind or a boolean array; got {where!r}. "
        f"Positions that never change are positions=."
    )
