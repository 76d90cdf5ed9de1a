"""How a trace block and the sampler keep step.

Before each step the sampler serves the step's number at a location of its own, `STEP`; a block that loops over
`Steps` waits there. After the last step it is served `OVER`, so the loop ends and the statements after it run.

One way this fails: nnsight would serve a point that a block asks for too late from the *next* step, silently. At the
end of every step `StepServer` looks who still waits for a point, and raises on the line that asked.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nnsight.intervention.interleaver import Event, Mediator

from sinklens.errors import HookOrderError, SettingError
from sinklens.model import Model

if TYPE_CHECKING:
    from sinklens.sampling.state import State
    from sinklens.tracing import Trace

STEP = "denoise.step"
OVER = object()  # served at STEP instead of a number when the run has ended


class StepServer:
    """Offers every step's number to the blocks that wait for it, and finds those that wait in vain."""

    def __init__(self, model: Model) -> None:
        self._interleaver = model.interleaver
        self._root = model.path + "."
        self._names = {f"{model.path}.{name}": name for name in model.hook_names()}
        self._step: int | None = None

    def before(self, step: int, state: "State") -> None:
        """Serve the step's number."""
        self._step = step
        self._interleaver.handle(STEP, step)

    def after(self, step: int, state: "State") -> None:
        """Look who still waits for a point of the step that just ended."""
        self._refuse(
            f"was asked for in step {step} after the step had passed it. Points are read in the order a step reaches "
            f"them (model.hook_names()): move this line up, or ask in the next step."
        )

    def close(self) -> None:
        """The run is over: end the loops that wait for another step."""
        while STEP in self._interleaver.parked:
            self._interleaver.handle(STEP, OVER)
        ran = 0 if self._step is None else self._step + 1
        self._refuse(f"was asked for when the run was over; it had {ran} steps.")

    def _refuse(self, why: str) -> None:
        """Raise, on the line that waits for a point, that it waits in vain.

        nnsight's own ``t.iter`` pins what it asks for to a later visit; its loops end by nnsight's own rules.
        """
        for mediator in self._interleaver.mediators:
            pending = mediator.pending
            if pending is None or pending.event is Event.BARRIER or mediator.iteration:
                continue
            if pending.provider is not None and pending.provider.startswith(self._root):
                place = self._names.get(pending.provider.rpartition(".")[0], pending.provider)
                mediator.worker.throw(HookOrderError(f"{place!r} {why}"))


class Steps:
    """Which steps a block visits: all, or a selection.

    ``t.steps[8:]``, ``t.steps[::2]``, ``t.steps[[0, 5]]``, ``t.steps[-1]`` and ``t.steps.at(0.5)`` select. Negative
    numbers and fractions count from the number of steps planned; a run that ends early ends the loop. Iterating waits
    for each step in turn and gives its number.
    """

    def __init__(self, owner: "Trace", chosen: Sequence[int] | None = None) -> None:
        self._owner = owner
        self._chosen = list(range(len(self))) if chosen is None else list(chosen)

    def __len__(self) -> int:
        """Steps planned."""
        return self._owner._denoising.settings.steps

    def __getitem__(self, key: int | slice | Sequence[int]) -> "Steps":
        """A selection, visited in ascending order.

        Raises:
            SettingError: a step that the run does not have.
        """
        total = len(self)
        if isinstance(key, slice):
            return Steps(self._owner, sorted(range(total)[key]))
        wanted = [key] if isinstance(key, int) else list(key)
        for step in wanted:
            if not isinstance(step, int) or not -total <= step < total:
                raise SettingError(
                    f"step {step!r} does not exist; this run has {total} steps, 0 to {total - 1} "
                    f"(or -{total} to -1 from the end)."
                )
        return Steps(self._owner, sorted({step % total for step in wanted}))

    def at(self, *fractions: float) -> "Steps":
        """The steps at fractions of the run: 0 is the first, 1 the last."""
        for fraction in fractions:
            if not 0 <= fraction <= 1:
                raise SettingError(f"a fraction of the run lies between 0 and 1; got {fraction}.")
        return self[[round(fraction * (len(self) - 1)) for fraction in fractions]]

    def __iter__(self) -> Iterator[int]:
        mediator = Mediator.current("t.steps") if self._owner._denoising.model.interleaver.interleaving else None
        if mediator is None:
            raise HookOrderError("t.steps can be walked only inside the `with sinklens.trace(...)` block.")
        for step in self._chosen:
            now = self._owner.step
            if now is not None and step < now:
                raise HookOrderError(
                    f"step {step} was asked for, but the run is at step {now} already; steps are visited in order, "
                    f"each in one loop. Put both loops' statements into one loop over t.steps."
                )
            if step != now and self._wait(mediator, step) is OVER:
                return
            yield step
        if self._chosen:  # what follows the loop belongs after its last step, not into it
            self._wait(mediator, self._chosen[-1] + 1)

    @staticmethod
    def _wait(mediator: Mediator, step: int) -> Any:
        """Pause the block until `step` begins or the run is over."""
        mediator.iteration = step  # asked for unpinned, the same visit would be served again and again
        served = Mediator.value(STEP)
        mediator.iteration = None
        return served
