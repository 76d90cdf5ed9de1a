"""Patch values of one run, kept by `Activations`, into another.

Clean into corrupted or vice versa, by step, layer, head and position.

A value is patched in *parts*, each with the positions that belong to one step. In a diffusion run, one part is the
complete value. In an autoregressive run each query belongs to the step that first read its token, also when a later
pass computes it again, so that patches are the same with and without a key/value cache. If the other run's values cover
the same columns, a mask selects those to take. Where ``source_positions=`` pairs positions, or the other run has
another length or other padding, values are moved from position to position; neither side counts padding.

Pitfall: runs may compute different columns at a step, under a cache policy or with cached blocks. A value is read only
where the columns of both are known to agree, or where the source has all columns.

Limitation: prompts of different lengths have different positions. Patching between them needs ``positions=`` and
``source_positions=`` that state which position corresponds to which; a guess would put values at unrelated positions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks import names
from sinklens.hooks.forward_pass import QuerySpan
from sinklens.hooks.names import READ_ONLY
from sinklens.hooks.points import Point
from sinklens.interventions.places import CANVAS, AtPositions, Places, along, at_heads
from sinklens.model import Model
from sinklens.runs.caches import chosen_points, require_columns
from sinklens.runs.intervention import Pairs, RunContext, place_mask, whole_numbers, within
from sinklens.utils.arguments import Unread, plainly_shown
from sinklens.utils.integers import as_integer


@dataclass(frozen=True, kw_only=True)
class FromSource(AtPositions):
    """An intervention that takes the values of another run, at the steps that it holds; see `PatchHooks`."""

    within_step: ClassVar[bool] = True

    source: Annotated[Mapping[int, Any], Unread]
    source_positions: Sequence[int] | None = None

    def acting_steps(self, steps: int) -> list[int]:
        return steps_of_source(self.source) if self.steps is None else super().acting_steps(steps)


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class PatchHooks(FromSource):
    """Patch the values of another run into this one.

    In an autoregressive run the values of a step are those of the queries that belong to it, with or without a
    key/value cache; keys and masks are those of the pass. With cached blocks (``use_cache`` of a block sampler), the
    pass of a batch begins at the earliest current block of its rows; to make changes independent of the batch, restrict
    them with `positions` or `where`, such as "masked".

    Attributes:
        source: step -> point -> value: ``activations.caches``, ``t.cache(...)``, or any such mapping. It has one row,
            or as many as this run. If values cover all columns and a pass computes only some, the pass takes those.
        names: points to patch; by default all that `source` holds, except the read-only ones (`READ_ONLY`).
        steps: steps of this run; by default those of `source`, all of which this run must have.
        heads: heads to patch at points with a head axis (key/value heads where the point has those).
        positions: positions to patch (queries, for scores and patterns; keys, for the additive mask); every row must
            have them.
        where: positions to patch that may differ by row, step, layer and head; see `AtPositions`. A key/value head gets
            the positions of all its query heads; a point without a head axis, those of all heads of its layer.
        source_positions: positions of the source to take, one for each of `positions`, by default the same ones. They
            do not count padding either, unless `source` is not from `Activations` and so does not say where it is.

    Raises:
        SettingError: a step or point that `source` does not hold; a step of `source` that the run does not have;
            lengths or padding that differ without `positions`, or in a pass that computes only some positions.
    """

    on_canvas: ClassVar[bool] = True

    names: Sequence[str] | Any | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        steps_of_source(self.source)
        count = 0 if self.positions is None else len(whole_numbers("position", self.positions))
        paired = self.source_positions
        if paired is not None and (self.where is not None or len(paired) != count):
            raise SettingError(
                f"source_positions= pairs with positions=, of the same length, and where= takes the values of the same "
                f"positions; got {len(paired)} and {count}."
            )

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        writable = [str(name) for name in self.source[min(self.source)] if not str(name).endswith(READ_ONLY)]
        points = chosen_points(writable if self.names is None else self.names, model, self.layers)
        patch = _Patch(self, points, model, run)
        return patch.places.around([(name, patch) for name in points])


def steps_of_source(source: Mapping[int, Any]) -> list[int]:
    """The steps that the values of another run hold.

    Raises:
        SettingError: they do not map steps to caches, or hold no step.
    """
    known = isinstance(source, Mapping) and not any(as_integer(step) is None for step in source)
    require(
        known and all(isinstance(cache, Iterable) for cache in source.values()),
        f"source maps steps to caches: pass the .caches of Activations, or what t.cache(...) returned; got "
        f"{type(source).__name__}. For the cache of a single pass write source={{0: cache}}.",
    )
    require(len(source), "source holds no step; run the model that fills it first.")
    return sorted(source)


class _Part(NamedTuple):
    """The positions of a point's value that belong to one step.

    Attributes:
        name: the point.
        axis: the position axis of its value.
        step: the step that owns the positions.
        start: index of the first of them along `axis`.
        columns: columns of the text that they are.
        mask: the chosen ones, over the heads of the model; None for all.
    """

    name: str
    axis: int
    step: int
    start: int
    columns: range
    mask: Bool[Tensor, "#batch #head pos"] | None

    def of(self, value: Tensor) -> Tensor:
        """This part of the value of the point, a view."""
        return value.narrow(self.axis, self.start, len(self.columns))


class _Patch:
    """The hook function of a patch in one run."""

    def __init__(self, what: PatchHooks, points: Sequence[str], model: "Model", run: RunContext) -> None:
        self._what, self._run, self._steps = what, run, _steps_of(what, points, run)
        self._limited = what.positions is not None or what.where is not None
        self.places = Places(what, model, run, points, of="queries" if any(map(_of_queries, points)) else None)
        self._columns = None if run.single or what.positions is None else _columns(what.positions, run.real)
        self._real = None if run.single else getattr(what.source[min(what.source)], "real", None)
        self._aligned = self._real is None or _begin_alike(self._real, run.real)
        outside = [name for name in points if name.startswith("denoise.") and name != CANVAS]
        if outside and self._limited and model.tree.architecture.encoder:
            raise SettingError(
                f"{outside[0]} has the positions of the current canvas only, so positions= and where=, which count "
                f"from the prompt, do not apply; leave them out, or patch a point of the layers."
            )

    def __call__(self, value: Tensor, hook: Point) -> Tensor | None:
        before = value
        for part in self._parts(value, hook):
            new = self._chosen(part, part.of(value), self._read(part, part.of(value), hook))
            if len(part.columns) == value.shape[part.axis]:
                value = new
            else:
                value = value.clone()
                part.of(value).copy_(new)
        return None if value is before else value

    def _parts(self, value: Tensor, hook: Point) -> Iterator[_Part]:
        """The parts of a value in which something is replaced."""
        name, run, step = str(hook.name), self._run, hook.step or 0
        axis = names.position_axis(name) % value.ndim
        size, first = value.shape[axis], 0
        spans = [QuerySpan(step, 0, size)]
        if _of_queries(name) or (name == "denoise.hook_logits" and not run.causal):
            first = run.forward_pass.first(size)  # with cached blocks, a pass has only the later queries, and logits
            spans = run.forward_pass.spans(size) if run.causal and not run.single else spans
        elif run.causal and name.startswith("denoise.") and name != CANVAS and not run.single:
            first = run.prompt_length + step  # a single position, the one being decoded
        for span in spans:
            mask = self.places.of_span(hook, span, first, value.device) if self._limited else None
            if span.step in self._steps and (mask is not None or not self._limited):
                yield _Part(name, axis, span.step, span.start, range(first + span.start, first + span.stop), mask)

    def _read(self, part: _Part, here: Tensor, hook: Point) -> Tensor:
        """The source's values for a part; those that the pass of a diffusion run does not compute are left out."""
        cache, run, axes = self._what.source[part.step], self._run, names.axes_of(part.name)
        require_columns(cache, part.name, part.step, part.columns)
        new = cache[part.name].to(here)
        require(
            len(new) in (1, len(here)),
            f"source has {len(new)} rows at {part.name}, this run {len(here)}; pass one row or {len(here)}.",
        )
        new = new.expand(len(here), *new.shape[1:])
        if run.single or (run.causal and not _of_queries(part.name)):
            return new
        if run.causal:
            if here.shape[part.axis] == 1:  # the source may have recomputed the queries of earlier steps
                new = new.narrow(part.axis, new.shape[part.axis] - 1, 1)
            if "key" in axes and new.shape[-1] == run.prompt_length + part.step:
                hidden = -torch.inf if part.name.endswith("hook_attn_scores") else 0.0  # keys after the query
                new = torch.nn.functional.pad(new, (0, max(0, here.shape[-1] - new.shape[-1])), value=hidden)
            return new
        keys, queries = hook.forward_pass.keys, hook.forward_pass.queries
        for axis, kind in enumerate(axes):
            size = here.shape[axis] if kind in ("pos", "key") else len(queries)  # a mask may have one row for all
            if kind in ("pos", "query", "query|1", "key") and new.shape[axis] == run.real.shape[1] > size:
                new = new.narrow(axis, keys.start if kind == "key" else queries.start, size)
        return new

    def _chosen(self, part: _Part, here: Tensor, new: Tensor) -> Tensor:
        """`here` with the chosen positions and heads of `new`."""
        name, what = part.name, self._what
        if name.endswith("hook_attn_mask") and here.shape[2] != new.shape[2]:  # one row applies to all queries
            queries = max(here.shape[2], new.shape[2])
            here, new = here.expand(-1, -1, queries, -1), new.expand(-1, -1, queries, -1)
        same = new.shape == here.shape and (self._aligned or len(part.columns) == 1)  # the single query of a step
        if what.positions is not None and (what.source_positions is not None or not same):
            new, same = self._moved(part, here, new, what.positions), True
        require(
            same,
            f"{name} has shape {list(new.shape)} in the source and {list(here.shape)} here, or its rows begin after "
            f"other padding; for prompts of different lengths pass positions= and source_positions=.",
        )
        if part.mask is not None:
            new = torch.where(along(part.mask, name, here), new, here)
        return new if what.heads is None else torch.where(at_heads(what.heads, name, here), new, here)

    def _moved(self, part: _Part, here: Tensor, new: Tensor, positions: Sequence[int]) -> Tensor:
        """`here` with values of `new` at `positions`; those outside of `part` belong to other steps."""
        columns = _columns(positions, self._run.forward_pass.real) if self._columns is None else self._columns
        changed, source = here.movedim(part.axis, 1).clone(), new.movedim(part.axis, 1)
        require(
            changed.shape[2:] == source.shape[2:],
            f"{part.name}: values of shape {list(source.shape[2:])} cannot replace {list(changed.shape[2:])}; "
            f"patterns and scores can be patched only between runs of one length.",
        )
        length, paired = source.shape[1], self._what.source_positions
        numbers = whole_numbers("position", positions if paired is None else paired)
        run, known = self._run, self._real if length > 1 else None
        require(
            run.single or run.causal or len(part.columns) == run.real.shape[1],
            f"the pass computes only some columns of {part.name}, so positions of another run cannot be moved there; "
            f"leave out cache= (or use_cache=True), or patch the same positions.",
        )
        real = here.new_ones(1, length).bool() if known is None else known[:, :length].to(here.device)
        for number, target in zip(numbers, (columns.to(here.device) - part.columns.start).T, strict=True):
            rows = ((target >= 0) & (target < changed.shape[1])).nonzero()[:, 0]
            if len(rows):
                there = _columns([number if length > 1 else 0], real)[:, 0].expand(len(here))
                changed[rows, target[rows]] = source[rows, there[rows]]
        return changed.movedim(1, part.axis)


def _steps_of(what: PatchHooks, points: Sequence[str], run: RunContext) -> frozenset[int]:
    """The steps of a run to patch: those named, or by default those for which the source holds values.

    Raises:
        SettingError: it lacks a point at one of them, or by default holds a step that the run does not have.
    """
    held, last = steps_of_source(what.source), max(what.source)
    steps = [0] if run.single else held if what.steps is None else within("step", what.steps, run.steps)
    require(
        what.steps is not None or run.single or last < run.steps,
        f"source holds step {last}, which does not exist in this run; it has {run.steps}, 0 to {run.steps - 1}. "
        f"Name the steps to patch (steps=), or pass a part of source.",
    )
    for step in steps:
        require(step in what.source, f"source holds steps {held}, but not step {step}; record it, or change steps=.")
        if (missing := next((name for name in points if name not in what.source[step]), None)) is not None:
            raise SettingError(f"source does not hold {missing!r}; it holds {', '.join(what.source[held[0]])}.")
    return frozenset(steps)


def _of_queries(name: str) -> bool:
    """Whether a point's positions are the queries of a pass; with a key/value cache there are fewer than keys."""
    return not name.startswith("denoise.") and not {"pos", "query"}.isdisjoint(names.axes_of(name))


def _begin_alike(source: Bool[Tensor, "#batch n"], here: Bool[Tensor, "batch pos"]) -> bool:
    """Whether the rows of a source, or its only one, begin after as much padding as those of a run."""
    theirs, ours = source.long().argmax(dim=1).to(here.device), here.long().argmax(dim=1)
    return len(theirs) in (1, len(ours)) and torch.equal(theirs.expand(len(ours)), ours)


def _columns(positions: Sequence[int], real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch place"]:
    """Column of each position in each row.

    Raises:
        SettingError: a row lacks one of the positions.
    """
    numbers = whole_numbers("position", positions)
    masks = torch.stack([place_mask([number], real) for number in numbers], dim=1)
    require(
        bool(masks.any(dim=2).all()),
        f"not every row has the positions {numbers}; patch rows of different lengths separately.",
    )
    return masks.long().argmax(dim=2)
