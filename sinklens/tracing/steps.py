"""How a trace block and the sampler keep step.

Before each step the sampler serves the step's number at a location of its own, `STEP`; a block that loops over
`Steps` waits there. After the last step it is served `RUN_ENDED`, so the loop ends and the statements after it run.

One way this fails: nnsight would serve a point that a block asks for too late from the *next* step, silently. At the
end of every step `StepServer` looks who still waits for a point, and raises on the line that asked.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sinklens.errors import HookOrderError, SettingError
from sinklens.hooks.interleaving import wait_for
from sinklens.model import Model

if TYPE_CHECKING:
    from sinklens.sampling.state import State

STEP = "denoise.step"
RUN_ENDED = object()  # served at STEP instead of a number when the run has ended


class StepServer:
    """Offers every step's number to the blocks that wait for it, and finds those that wait in vain.

    Attributes:
        step: the step being run, or the last one; None before the first.
        over: whether the run has ended.
    """

    def __init__(self, model: Model) -> None:
        self._handover = model.handover
        self._names = model.hook_names()
        self.step: int | None = None
        self.over = False

    def before(self, step: int, state: "State") -> None:
        """Serve the step's number."""
        self.step = step
        self._handover.count_visits(self._names, step)
        self._handover.serve(STEP, step)

    def after(self, step: int, state: "State") -> None:
        """Look who still waits for a point of the step that just ended."""
        self._refuse(
            step,
            f"was asked for in step {step} after the step had passed it. Points are read in the order a step reaches "
            f"them (model.hook_names()): move this line up, or ask in the next step.",
        )

    def close(self) -> None:
        """The run is over: end the loops that wait for another step."""
        self.over = True
        self._handover.release(STEP, RUN_ENDED)
        ran = 0 if self.step is None else self.step + 1
        self._refuse(None, f"was asked for when the run was over; it had {ran} steps.")

    def _refuse(self, step: int | None, why: str) -> None:
        """Raise, on the line that waits for a point, that it waits in vain."""
        self._handover.refuse_late(step, lambda place: HookOrderError(f"{place!r} {why}"))


@runtime_checkable
class Owner(Protocol):
    """The open run that steps belong to."""

    @property
    def planned(self) -> int:
        """Steps planned."""

    @property
    def server(self) -> StepServer | None:
        """Offers the steps; None before the block runs."""

    @property
    def running(self) -> bool:
        """Whether the block is running."""


class Steps:
    """Which steps a block visits: all, or a selection.

    ``t.steps[8:]``, ``t.steps[::2]``, ``t.steps[[0, 5]]``, ``t.steps[-1]`` and ``t.steps.at(0.5)`` select. Negative
    numbers and fractions count from the number of steps planned; a run that ends early ends the loop. Iterating waits
    for each step in turn and gives its number.
    """

    def __init__(self, owner: Owner, chosen: Sequence[int] | None = None) -> None:
        self._owner, self._selected = owner, chosen is not None
        self._chosen = list(range(owner.planned)) if chosen is None else list(chosen)

    def __len__(self) -> int:
        """Steps selected; of ``t.steps`` itself, those planned."""
        return len(self._chosen)

    def __repr__(self) -> str:
        return f"Steps({self._chosen})"

    def __getitem__(self, key: Any) -> "Steps":
        """A selection, visited in ascending order.

        Raises:
            SettingError: a step that the run does not have, something else than numbers of steps, an empty list, or a
                selection of a selection.
        """
        total = self._owner.planned
        if self._selected:
            raise SettingError(f"t.steps{self._chosen} is a selection already; select from t.steps itself.")
        if isinstance(key, slice):
            return Steps(self._owner, sorted(_sliced(key, total)))
        wanted = list(key) if isinstance(key, Iterable) and not isinstance(key, str) and _sized(key) else [key]
        if not wanted:
            raise SettingError("t.steps[[]] names no step, so its loop would never run; leave the loop out.")
        return Steps(self._owner, sorted({_number(step, total) for step in wanted}))

    def at(self, *fractions: float) -> "Steps":
        """The steps at fractions of the run: 0 is the first, 1 the last."""
        for fraction in fractions:
            if not 0 <= fraction <= 1:
                raise SettingError(f"a fraction of the run lies between 0 and 1; got {fraction}.")
        return self[[round(fraction * (self._owner.planned - 1)) for fraction in fractions]]

    def __iter__(self) -> Iterator[int]:
        server = self._owner.server
        if server is None or not self._owner.running:
            raise HookOrderError("t.steps can be walked only inside the `with sinklens.trace(...)` block.")
        for step in self._chosen:
            if server.step is not None and (step < server.step or (server.over and step == server.step)):
                where = "is over" if server.over else f"is at step {server.step}"
                raise HookOrderError(
                    f"step {step} was asked for, but the run {where} already; steps are visited in order, "
                    f"each in one loop. Put both loops' statements into one loop over t.steps."
                )
            if server.over or (step != server.step and wait_for(STEP, step) is RUN_ENDED):
                return
            yield step
        if self._chosen and not server.over:  # what follows the loop belongs after its last step, not into it
            wait_for(STEP, self._chosen[-1] + 1)

    def __enter__(self) -> Any:
        raise HookOrderError("`with t.iter[...]:` is no loop over steps; write `for step in t.steps[...]:`.")

    def __exit__(self, *_: object) -> None: ...


_AT = "Steps are whole numbers; fractions of the run are t.steps.at(0.5)."


def _sized(key: Any) -> bool:
    """Whether `key` is a list of steps, not a number in a tensor or array without axes."""
    return getattr(key, "ndim", 1) > 0


def _whole(value: Any) -> int:
    """`value` as a number.

    Raises:
        SettingError: it is none, or True or False.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise SettingError(f"t.steps takes numbers of steps, not {bool(value)}; a mask selects nothing. {_AT}")
    try:
        return operator.index(value)
    except TypeError:
        raise SettingError(f"step {value!r} does not exist. {_AT}") from None


def _number(step: Any, total: int) -> int:
    """A step counted from the start of the run."""
    number = _whole(step)
    if not -total <= number < total:
        raise SettingError(
            f"step {number} does not exist; this run has {total} steps, 0 to {total - 1} "
            f"(or -{total} to -1 from the end)."
        )
    return number % total


def _sliced(key: slice, total: int) -> range:
    """The steps of a slice.

    Raises:
        SettingError: an end that is no whole number, a stride of 0, or a start beyond the run.
    """
    start, stop, stride = (None if end is None else _whole(end) for end in (key.start, key.stop, key.step))
    if stride == 0:
        raise SettingError("a slice of steps has a stride of 1 or more; got 0.")
    if start is not None and not -total <= start <= total:
        raise SettingError(f"a slice of steps that starts at {start} is empty; this run has {total} steps.")
    return range(total)[slice(start, stop, stride)]
