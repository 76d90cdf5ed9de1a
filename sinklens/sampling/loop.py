"""Runs a sampler and keeps the canvas of every step.

`run` is the loop under `sinklens.trace` and `sinklens.generate`. It counts steps over the complete generation, across
blocks, calls its listeners before and after each step, and returns the canvas of every step. The model computes
without gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks.forward_pass import PassKind
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.state import State
from sinklens.sinks.data import unmask_steps


@runtime_checkable
class Listener(Protocol):
    """Called around every step."""

    def before(self, step: int, state: State) -> None:
        """Called when step `step` is about to run on `state.canvas`."""

    def after(self, step: int, state: State) -> None:
        """Called when step `step` has run; `state.canvas` is its result."""


class Frame(NamedTuple):
    """A canvas of a run.

    Attributes:
        canvas: token ids.
        undecided: as in `State.undecided`.
        active: rows that the step on it works on; None before the step has run.
        time: as in `State.time`.
        kind: what the step's pass was; None before it has run.
        tied: as in `State.tied`; None before the step has run.
    """

    canvas: Int[Tensor, "batch pos"]
    undecided: Bool[Tensor, "batch pos"] | None
    active: Bool[Tensor, " batch"] | None = None
    time: Float[Tensor, " batch"] | None = None
    kind: PassKind | None = None
    tied: Int[Tensor, " batch"] | None = None


@dataclass(frozen=True)
class Trajectory:
    """The canvases of a run.

    Attributes:
        canvas: token ids that each step worked on, then those that the last step left: [batch, steps + 1, pos].
            Undecided positions hold the mask token, or -1 in an autoregressive run.
        undecided: the undecided positions of each canvas: [batch, steps + 1, pos].
        unmask_step: step at which each position got its final token; -1 for the prompt and for padding, the number of
            steps for a position that never got one. A token that a hook writes on the canvas of step s counts as
            written by the step before, s - 1.
        active: rows that each step works on, see `State.active`: [batch, steps].
        time: noise level that the network reads in each step: [batch, steps]; None for a network that reads none.
        kinds: what the pass of each step was.
        ties: how many positions each step chose although one that it left was as confident, so that another order would
            have been as right: [batch, steps]. 0 where a step does not choose the best. None in runs of the lab.
    """

    canvas: Int[Tensor, "batch step pos"]
    undecided: Bool[Tensor, "batch step pos"]
    unmask_step: Int[Tensor, "batch pos"]
    active: Bool[Tensor, "batch _"]
    time: Float[Tensor, "batch _"] | None
    kinds: tuple[PassKind, ...]
    ties: Int[Tensor, "batch _"] | None

    @property
    def steps_run(self) -> int:
        """Number of steps that ran; fewer than `Sampler.most_steps` if the run ended early."""
        return self.canvas.shape[1] - 1


def run(
    state: State,
    settings: Sampler,
    listeners: Sequence[Listener],
    keep: list[Frame],
) -> None:
    """Run all steps.

    Args:
        state: holds the initial canvas; modified in place.
        settings: the sampler.
        listeners: called before and after each step, in order.
        keep: receives the canvases as they are made, so that a stopped run keeps its finished steps.

    Raises:
        SettingError: `state.replay` does not fit this run.
    """
    keep.append(Frame(state.canvas, state.undecided))
    step = -1
    with torch.no_grad():
        for step, _ in enumerate(settings.denoise(state)):
            if step == 0 and state.replay is not None:  # not before, because a sampler may set the canvas
                _check_begun(state, settings, state.replay)
            if step > 0:
                _finish(step - 1, state, listeners, keep)
            keep[-1] = Frame(state.canvas, state.undecided)
            if state.replay is not None and step >= state.replay.shape[1] - 1:
                break  # the replayed run ended here
            state.announce(step)
            for listener in listeners:
                listener.before(step, state)
        else:
            if step >= 0:
                _finish(step, state, listeners, keep)


def _finish(step: int, state: State, listeners: Sequence[Listener], frames: list[Frame]) -> None:
    kind = state.tree.watch.forward_pass.kind
    frames[-1] = Frame(state.step_canvas, state.step_undecided, state.active, state.time, kind, state.tied)
    frames.append(Frame(state.canvas, state.undecided))
    for listener in listeners:
        listener.after(step, state)


def build_trajectory(state: State, frames: list[Frame]) -> Trajectory:
    """The trajectory of the finished steps."""
    found: list[Any] = []
    for name in ("canvas", "undecided", "active", "time", "tied"):
        kept = [value for frame in frames if (value := getattr(frame, name)) is not None]
        found.append(torch.stack(kept, dim=1).cpu() if kept else None)
    canvas, undecided, active, time, ties = found
    none = canvas.new_zeros(len(canvas), 0)  # of a run that stopped in its first step
    if undecided is None or undecided.shape != canvas.shape:
        undecided = canvas == state.mask_id
    return Trajectory(
        canvas, undecided, unmask_steps(canvas, undecided, state.real.cpu(), state.prompt_length),
        none.bool() if active is None else active, time,
        tuple(frame.kind for frame in frames if frame.kind is not None),
        none if ties is None else ties,
    )  # fmt: skip


BEGAN = "replay began from another canvas; give the same prompts and settings as the replayed run."


def check_replay(state: State, settings: Sampler, replay: Int[Tensor, "batch step pos"]) -> None:
    """Check before the run that its steps can replay these canvases; a sampler may yet fill undecided positions.

    Raises:
        SettingError: they are of other prompts or lengths, or too many.
    """
    batch, canvases, length = replay.shape
    require(
        (batch, length) == tuple(state.canvas.shape),
        f"replay holds {batch} rows of {length} positions, this run {state.canvas.shape[0]} of "
        f"{state.canvas.shape[1]}; give the same prompts and gen_length as the replayed run.",
    )
    require(
        canvases - 1 <= settings.most_steps,
        f"replay has {canvases - 1} steps, this run at most {settings.most_steps}; give the same steps.",
    )
    decided = state.canvas != state.mask_id
    require(torch.equal(replay[:, 0].to(state.canvas.device)[decided], state.canvas[decided]), BEGAN)


def _check_begun(state: State, settings: Sampler, replay: Int[Tensor, "batch step pos"]) -> None:
    """Check the canvas on which the first step works, and that later ones hold what they must."""
    canvases, length = replay.shape[1:]
    require(torch.equal(replay[:, 0].to(state.canvas.device), state.canvas), BEGAN)
    if settings.left_to_right:
        decided = state.prompt_length + torch.arange(canvases)[:, None] > torch.arange(length)
        if len(gaps := ((replay.cpu() < 0) & decided).nonzero()):
            row, step, pos = gaps[0].tolist()
            raise SettingError(
                f"replay holds no token at position {pos} of step {step} (row {row}), which an autoregressive run has "
                f"decided by then; give token ids there."
            )
