"""Finders: what ``where=`` of an intervention means in one run, as a mask for each step and layer.

An array is looked up, states and kinds are read from the canvas when a step begins, and detectors read the scores of
the step before (previous_sinks.py).

Pitfall: an array holds columns of the canvas, left padding included, while ``positions=`` do not count padding.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.choice import as_tuple
from sinklens.interventions.kinds_now import of_kind
from sinklens.interventions.previous_sinks import PreviousSinks
from sinklens.interventions.where import AtPositions, Where
from sinklens.runs.intervention import Pairs, RunContext, Snapshot, place_mask, within
from sinklens.sinks.detectors import AXES, Detector, EpsilonOverMean
from sinklens.sinks.strongest import check_only
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model

LESS_STEP = ("batch", "layer", "head", "pos")


@runtime_checkable
class Finder(Protocol):
    """Finds the positions of each step and layer.

    Attributes:
        by_layer: whether they differ between layers.
        past: whether those of a step lie before all queries that it computes.
    """

    by_layer: bool
    past: bool

    def first(self) -> Pairs:
        """Hooks to list before those that use the positions."""

    def last(self) -> Pairs:
        """Hooks to list after them."""

    def at(self, step: int, layer: int | None) -> Bool[Tensor, "#batch #head pos"] | None:
        """The positions, over the text so far or all of it; None for nowhere."""


def finder_of(what: AtPositions, model: "Model", run: RunContext | None, layers: Sequence[int]) -> Finder:
    """The finder of ``what.where`` for one run.

    Raises:
        SettingError: `where` is of an unknown type, names a place that does not exist, or needs a run.
    """
    where, name = what.where, type(what).__name__
    if isinstance(where, Tensor | np.ndarray | xr.DataArray):
        return InArray(where, Sizes.of(model, run), run)
    if run is None:
        raise SettingError(
            f"{name} finds its places in a run, which a single pass is not; use sinklens.trace or sinklens.generate, "
            f"or pass an array."
        )
    if isinstance(where, Detector):
        where = Where(detector=where)
    elif isinstance(where, SinkTrack):
        where = Where(detector=EpsilonOverMean(), source=where, same_step=True)
    if isinstance(where, Where):
        return _of_scores(where, what, model, run, layers)
    if callable(where) and not isinstance(where, type):
        return OnCanvas(_by_step(where, Sizes.of(model, run), run), run, what)
    if is_names(where):
        return OnCanvas(_by_kind(where, run), run, what)
    raise SettingError(
        f"where must be a detector, a Where, a SinkTrack, a state or token kind, a boolean array or a function of the "
        f"step; got {where!r}. Positions that never change are positions=."
    )


def is_names(value: object) -> bool:
    """Whether `value` is a name or a list of names."""
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(name, str) for name in value)
    )


class Sizes(NamedTuple):
    """The sizes of a run's axes; None where a single pass does not fix them."""

    batch: int | None
    step: int
    layer: int
    head: int
    pos: int | None

    @classmethod
    def of(cls, model: "Model", run: RunContext | None) -> "Sizes":
        """Those of `run`, or of a single pass."""
        if run is None:
            return cls(None, 1, model.cfg.n_layers, model.cfg.n_heads, None)
        return cls(run.real.shape[0], run.steps, model.cfg.n_layers, model.cfg.n_heads, run.real.shape[1])


class InArray:
    """Positions marked in a boolean array [batch, step, layer, head, pos]."""

    past = False

    def __init__(self, where: Any, sizes: Sizes, run: RunContext | None) -> None:
        self._steps: list[int] | None = None
        if isinstance(where, xr.DataArray):
            if "step" in where.coords:
                where = where if "step" in where.dims else where.expand_dims("step")
                self._steps = where["step"].to_numpy().tolist()
                within("step", self._steps, sizes.step)
            where = _all_axes(where)
        self._marked = checked_array(where, AXES, sizes._replace(step=len(self._steps)) if self._steps else sizes, run)
        self.by_layer = self._marked.shape[2] > 1

    def first(self) -> Pairs:
        """See `Finder.first`."""
        return []

    last = first

    def at(self, step: int, layer: int | None) -> Bool[Tensor, "#batch #head pos"] | None:
        """See `Finder.at`."""
        if self._steps is not None:
            if step not in self._steps:
                return None
            step = self._steps.index(step)
        return _of_layer(self._marked[:, step if self._marked.shape[1] > 1 else 0], layer)


def _of_layer(mask: Bool[Tensor, "batch layer head pos"], layer: int | None) -> Bool[Tensor, "batch head pos"]:
    if layer is None and mask.shape[1] > 1:
        raise SettingError(f"where has {mask.shape[1]} layers, and this point is in none; give its layer axis size 1.")
    return mask[:, layer if layer is not None and mask.shape[1] > 1 else 0]


def _all_axes(where: xr.DataArray) -> xr.DataArray:
    """`where` on all axes of a track; those that it lacks have size 1."""
    unknown = [axis for axis in map(str, where.dims) if axis not in AXES]
    if unknown:
        raise SettingError(f"where has an axis {unknown[0]!r}; the axes of a run are {', '.join(AXES)}.")
    return where.expand_dims([axis for axis in AXES if axis not in where.dims]).transpose(*AXES)


def checked_array(where: Any, axes: Sequence[str], sizes: Sizes, run: RunContext | None) -> Bool[Tensor, "..."]:
    """`where` as a tensor, once its type and axes are those of the run.

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
        known = getattr(sizes, axis)
        if known is not None and size not in (1, known):
            hint = " A DataArray, such as track.detect(), may lack steps." if axis == "step" else ""
            raise SettingError(f"where has {size} along {axis}, this run {known}; give 1 or {known}.{hint}")
    if run is None:
        return values
    values = values.to(run.real.device)
    real = run.real.view(len(run.real), *[1] * (len(axes) - 2), -1)
    if shape[0] > 1 and shape[-1] > 1 and bool((wrong := values & ~real).any()):
        first = wrong.nonzero()[0].tolist()
        raise SettingError(
            f"where marks position {first[-1]} of row {first[0]}, which is padding; positions of an array are columns "
            f"of the canvas, as in a track."
        )
    return values & real


Rule = Callable[[int, Snapshot], Bool[Tensor, "batch layer head pos"] | None]


class OnCanvas:
    """Positions that a rule finds when a step begins, from its number and canvas."""

    by_layer = past = False

    def __init__(self, rule: Rule, run: RunContext, what: AtPositions) -> None:
        self._rule, self._run, self._in_step = rule, run, what.step_test(run)
        self._found: dict[int, Tensor] = {}

    def first(self) -> Pairs:
        """See `Finder.first`."""
        return [("denoise.hook_canvas", self._begin)]

    def last(self) -> Pairs:
        """See `Finder.last`."""
        return []

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        if not self._run.causal:
            self._found.clear()
        step = int(hook.step or 0)
        if self._in_step(step):
            found = self._rule(step, Snapshot(value, self._run.undecided(value)))
            if found is not None:
                self._found[step] = found

    def at(self, step: int, layer: int | None) -> Bool[Tensor, "#batch #head pos"] | None:
        """See `Finder.at`."""
        found = self._found.get(step)
        return None if found is None else _of_layer(found, layer)


def _by_kind(where: Any, run: RunContext) -> Rule:
    names = as_tuple(where)
    check_only(names, "where")
    if run.causal and {"masked", "mask"} & set(names):
        raise SettingError(
            f"where={where!r}: an autoregressive run has no masked positions; name 'prompt', 'committed' or a kind."
        )

    def found(step: int, canvas: Snapshot) -> Tensor:
        return of_kind(names, run, canvas, f"where={where!r}")[:, None, None]

    return found


def _by_step(function: Callable[[int], Any], sizes: Sizes, run: RunContext) -> Rule:
    def found(step: int, canvas: Snapshot) -> Tensor | None:
        given = function(step)
        if given is None:
            return None
        if is_names(given):
            return _by_kind(given, run)(step, canvas)
        if isinstance(given, Tensor | np.ndarray | xr.DataArray) and given.dtype in (torch.bool, np.bool_):
            return checked_array(given, LESS_STEP, sizes, run)
        return (place_mask(given, run.real) & run.real)[:, None, None]

    return found


def _of_scores(
    where: Where, what: AtPositions, model: "Model", run: RunContext, layers: Sequence[int]
) -> "PreviousSinks | OfOneHead":
    in_step, everywhere = what.step_test(run), torch.ones_like(run.real)
    if where.of is None:
        heads = what.chosen_heads(model)
        return PreviousSinks(where, type(what).__name__, model, run, layers, in_step, everywhere, heads)
    layer = within("layer", [where.of[0]], model.cfg.n_layers)[0]
    head = within("head", [where.of[1]], model.cfg.n_heads)[0]
    sinks = PreviousSinks(where, type(what).__name__, model, run, [layer], in_step, everywhere, [head])
    return OfOneHead(sinks, layer, head)


class OfOneHead:
    """The positions of one head, for all layers and heads."""

    by_layer = False

    def __init__(self, sinks: PreviousSinks, layer: int, head: int) -> None:
        self._sinks, self._layer, self._head, self.past = sinks, layer, head, sinks.past
        self.first, self.last = sinks.first, sinks.last

    def at(self, step: int, layer: int | None) -> Bool[Tensor, "#batch #head pos"] | None:
        """See `Finder.at`."""
        found = self._sinks.at(step, self._layer)
        return None if found is None else found[:, [self._head]]
