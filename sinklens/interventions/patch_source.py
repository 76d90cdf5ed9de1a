"""Reading the values that a patch takes from another run.

A value is read in *parts*: the positions of a point's value that belong to one step. In a diffusion run that is all of
the value. In an autoregressive run each query belongs to the step that first read its token, also when a later pass
computes it again, so that patches are the same with and without a key/value cache.

Pitfall: runs may compute different columns at a step, under a cache policy or with cached blocks. A value is read only
where the columns of both are known to agree, or where the source has all columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names
from sinklens.hooks.names import READ_ONLY
from sinklens.hooks.points import Point
from sinklens.runs.caches import require_columns
from sinklens.runs.intervention import RunContext, within
from sinklens.utils.integers import as_integer


class Part(NamedTuple):
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


class PatchSource:
    """Values of another run, by step and point.

    Args:
        caches: step -> point -> value.
        shift: the value at step t of this run is that of step t + shift.

    Raises:
        SettingError: they do not map steps to caches, or hold no step.
    """

    def __init__(self, caches: Mapping[int, Any], shift: int) -> None:
        known = isinstance(caches, Mapping) and not any(as_integer(step) is None for step in caches)
        if not known or not all(isinstance(cache, Iterable) for cache in caches.values()):
            raise SettingError(
                f"source maps steps to caches: pass the .caches of Activations, or what t.cache(...) returned; got "
                f"{type(caches).__name__}. For the cache of a single pass write source={{0: cache}}."
            )
        if not len(caches):
            raise SettingError("source holds no step; run the model that fills it first.")
        self._caches, self._shift = caches, shift

    @property
    def steps(self) -> list[int]:
        """Steps of a run for which it holds the step `shift` later; a run has no steps before 0."""
        return sorted(step - self._shift for step in self._caches if step >= self._shift)

    @property
    def points(self) -> list[str]:
        """The points that it holds and that can be changed."""
        return [str(name) for name in self._caches[min(self._caches)] if not str(name).endswith(READ_ONLY)]

    def steps_of(self, run: RunContext, wanted: Sequence[int] | None, points: Sequence[str]) -> frozenset[int]:
        """The steps of a run to patch: those `wanted`, or by default those for which it holds values.

        Raises:
            SettingError: it lacks a point at one of them; by default, it holds a step that the run does not have, or
                with a shift, only such steps.
        """
        steps, shift = [0] if run.single else self.steps, self._shift
        if wanted is not None and not run.single:
            steps = within("step", wanted, run.steps)
        elif not run.single:
            steps = [step for step in self.steps if step < run.steps]
            if not steps or (shift == 0 and steps != self.steps):
                last = max(self._caches)
                shifted = f" (step {last - shift} here, with shift={shift})" if shift else ""
                raise SettingError(
                    f"source holds step {last}{shifted}, which does not exist in this run; it has {run.steps}, 0 to "
                    f"{run.steps - 1}. Name the steps to patch (steps=), or pass a part of source."
                )
        for step in steps:
            if step + shift not in self._caches:
                raise SettingError(
                    f"source holds steps {sorted(self._caches)}, but step {step} needs {step + shift}; record it, or "
                    f"change steps= or shift=."
                )
            missing = next((name for name in points if name not in self._caches[step + shift]), None)
            if missing is not None:
                held = ", ".join(self._caches[min(self._caches)])
                raise SettingError(f"source does not hold {missing!r}; it holds {held}.")
        return frozenset(steps)

    def read(self, part: Part, here: Tensor, hook: Point, run: RunContext) -> Tensor:
        """The values for a part of the value of a point.

        Args:
            part: which part.
            here: its values in this run.
            hook: the point.
            run: this run.

        Raises:
            SettingError: another number of rows; a pass that computed other columns.
        """
        cache = self._caches[part.step + self._shift]
        require_columns(cache, part.name, part.step, part.columns)
        new = cache[part.name].to(here)
        if len(new) not in (1, len(here)):
            raise SettingError(
                f"source has {len(new)} rows at {part.name}, this run {len(here)}; pass one row or {len(here)}."
            )
        new = new.expand(len(here), *new.shape[1:])
        if run.single:
            return new
        if run.causal:
            return self._of_step(new, part, here, run) if of_queries(part.name) else new
        return _of_window(new, here, part.name, hook, run)

    def _of_step(self, new: Tensor, part: Part, here: Tensor, run: RunContext) -> Tensor:
        """`new`, the queries of a causal pass, at those that belong to the step of `part`."""
        if here.shape[part.axis] == 1:  # the source may have recomputed the queries of earlier steps
            new = new.narrow(part.axis, new.shape[part.axis] - 1, 1)
        if "key" in names.axes_of(part.name) and new.shape[-1] == run.prompt_length + part.step + self._shift:
            hidden = -torch.inf if part.name.endswith("hook_attn_scores") else 0.0  # keys after the query
            new = torch.nn.functional.pad(new, (0, max(0, here.shape[-1] - new.shape[-1])), value=hidden)
        return new


def _of_window(new: Tensor, here: Tensor, name: str, hook: Point, run: RunContext) -> Tensor:
    """`new`, a value at all columns, at those that the pass of a diffusion run computes; others are unchanged."""
    length, keys, queries = run.real.shape[1], hook.forward_pass.keys, hook.forward_pass.queries
    for axis, kind in enumerate(names.axes_of(name)):
        size = here.shape[axis] if kind in ("pos", "key") else len(queries)  # a mask may have one row for all
        if kind in ("pos", "query", "query|1", "key") and new.shape[axis] == length > size:
            new = new.narrow(axis, keys.start if kind == "key" else queries.start, size)
    return new


def of_queries(name: str) -> bool:
    """Whether a point's positions are the queries of a pass; with a key/value cache there are fewer than keys."""
    return not name.startswith("denoise.") and not {"pos", "query"}.isdisjoint(names.axes_of(name))
