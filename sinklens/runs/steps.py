"""Synchronization of a trace block with the sampler's steps.

Before each step the sampler serves the step's number at a separate location, `STEP`; a block that loops over
`VisitedSteps` waits there. After the last step it serves `RUN_ENDED`, so the loop ends and the statements after it run.

Silent failure: if a block requests a point too late, nnsight would serve it from the *next* step, without an error. At
the end of every step `StepServer` checks for requests that are still waiting and raises on the requesting line.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sinklens.errors import HookOrderError, require
from sinklens.families.samplers import never_passed
from sinklens.hooks.interleaving import RepeatedBlock, wait_for
from sinklens.hooks.points import SamplerPoint
from sinklens.model import Model
from sinklens.runs.intervention import within
from sinklens.sampling.state import State

STEP = "denoise.step"
RUN_ENDED = object()  # served at STEP instead of a number when the run has ended
NO_OUTPUT = (
    "model.output is that of a single pass, and a step of a run has none. Its logits are t['denoise.hook_logits']; "
    "those of the positions that the sampler looks at are model.lm_head.output."
)


class StepServer:
    """Serves every step's number to waiting blocks, and detects requests that can no longer be served.

    Attributes:
        step: the current step, or the last one; None before the first.
        over: whether the run has ended.
    """

    def __init__(self, model: Model, sampler: str) -> None:
        self._handover = model.handover
        self._tree = model.tree
        self._names = model.hook_names()
        self._sampler = sampler
        self.step: int | None = None
        self.over = False

    def before(self, step: int, state: "State") -> None:
        """Serve the step's number."""
        self.step = step
        self._handover.count_visits(self._names, step)
        self._handover.serve(STEP, step)

    def after(self, step: int, state: "State") -> None:
        """Reject requests for points of the step that just ended."""
        self._refuse(
            step,
            f"was requested in step {step} after the step had passed it. Points must be read in the order in which a "
            f"step reaches them (model.hook_names()): move this line up, or request it in the next step.",
        )

    def close(self, values: Mapping[str, Any]) -> None:
        """End the loops that wait for another step after the run has ended, and serve `values` by location."""
        self.over = True
        for location, value in {STEP: RUN_ENDED, **values}.items():
            self._handover.release(location, value)
        ran = 0 if self.step is None else self.step + 1
        self._refuse(None, f"was requested after the run had ended; it had {ran} steps.")

    def _refuse(self, step: int | None, why: str) -> None:
        """Raise `HookOrderError` on a line that waits for a point that will not be served."""

        def error(place: str) -> HookOrderError:
            point = self._tree.hook_dict.get(place)
            if isinstance(point, SamplerPoint) and point.reached != self.step:
                return HookOrderError(never_passed(place, self._sampler))
            inside = [name for name in self._names if name.startswith(f"{place}.")]
            if point is None and inside:
                return HookOrderError(
                    f"{place!r} holds hook points and has no value of its own; read one of them, such as "
                    f"t[{inside[0]!r}] ({len(inside)} in all, see model.hook_names())."
                )
            return HookOrderError(f"{place!r} {why}" if place else NO_OUTPUT)

        self._handover.refuse_late(step, error)


class VisitedSteps(RepeatedBlock):
    """The steps that a block visits: all, or a selection.

    ``t.steps[8:]``, ``t.steps[::2]``, ``t.steps[[0, 5]]``, ``t.steps[-1]`` and ``t.steps.at(0.5)`` are selections.
    Negative indices and fractions refer to the number of planned steps; a run that ends early ends the loop. Iteration
    waits for each step in turn and yields its number; nnsight's older ``with t.iter[8:]:`` runs its body in each.

    Args:
        owner: the open run, a `Trace`.
        chosen: the selection; None for all.
    """

    def __init__(self, owner: Any, chosen: Sequence[int] | None = None) -> None:
        super().__init__()
        self._owner, self._selected = owner, chosen is not None
        self._chosen = list(range(owner.planned)) if chosen is None else list(chosen)

    def __len__(self) -> int:
        """Number of selected steps; for ``t.steps`` itself, of planned steps."""
        return len(self._chosen)

    def __repr__(self) -> str:
        return f"VisitedSteps({self._chosen})"

    def __getitem__(self, key: Any) -> "VisitedSteps":
        """A selection, visited in ascending order.

        Raises:
            SettingError: a step does not exist, the key is not made of step indices, it is an empty list, or the
                steps are already a selection.
        """
        steps = range(self._owner.planned)
        require(
            not self._selected,
            f"t.steps{self._chosen} is already a selection; select from t.steps itself.",
        )
        if isinstance(key, slice):
            return VisitedSteps(self._owner, sorted(steps[key]))
        several = isinstance(key, Iterable) and not isinstance(key, str) and getattr(key, "ndim", 1) > 0
        wanted = within("step", list(key) if several else [key], len(steps))  # a tensor without axes is one step
        require(
            wanted,
            "t.steps[[]] selects no step, so its loop would never run; leave the loop out.",
        )
        return VisitedSteps(self._owner, wanted)

    def at(self, *fractions: float) -> "VisitedSteps":
        """The steps at fractions of the run: 0 is the first, 1 the last."""
        for fraction in fractions:
            require(0 <= fraction <= 1, f"a fraction of the run must be between 0 and 1; got {fraction}.")
        return self[[round(fraction * (self._owner.planned - 1)) for fraction in fractions]]

    def __iter__(self) -> Iterator[int]:
        server = self._owner.server
        require(
            server is not None and self._owner.running,
            "t.steps can be iterated only inside the `with sinklens.trace(...)` block.",
            HookOrderError,
        )
        for step in self._chosen:
            if server.step is not None and (step < server.step or (server.over and step == server.step)):
                where = "has already ended" if server.over else f"is already at step {server.step}"
                raise HookOrderError(
                    f"step {step} was requested, but the run {where}; steps are visited in order, "
                    f"each in one loop. Put the statements of both loops into one loop over t.steps."
                )
            if server.over or (step != server.step and wait_for(STEP, step) is RUN_ENDED):
                return
            yield step
        if self._chosen and not server.over:  # statements after the loop run after its last step, not during it
            wait_for(STEP, self._chosen[-1] + 1)
