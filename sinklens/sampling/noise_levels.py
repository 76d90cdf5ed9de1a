"""What samplers of networks that read a noise level share: a falling time, a closing step, a reused prediction.

The time falls in equal steps from 1 to 1e-5, and the noise level σ falls with it (`decisions.log_linear_sigma`). Every
step draws a token or the mask at every masked position, by an `exponential_race` of weights that the sampler computes;
decided positions do not change. The random numbers pass through ``denoise.hook_uniform``, where a hook can set them to
repeat a run.

Pitfall: a run ends when no position is masked. The published code goes through its remaining steps, which change
nothing.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.sampling import decisions
from sinklens.sampling.parts import Steps
from sinklens.sampling.state import State

LAST_TIME = 1e-5


class StepTime(NamedTuple):
    """The times of a step, as 0-dimensional float32 tensors.

    Attributes:
        time: when it begins.
        until: when it ends; in the closing step, the 0 of a canvas without noise.
        closing: whether it is the closing step.
    """

    time: Float[Tensor, ""]
    until: Float[Tensor, ""]
    closing: bool

    @property
    def sigma(self) -> Float[Tensor, ""]:
        """The noise level when it begins."""
        return decisions.log_linear_sigma(self.time)

    @property
    def decrease(self) -> Float[Tensor, ""]:
        """By how much the noise level falls."""
        return self.sigma - decisions.log_linear_sigma(self.until)


@dataclass(frozen=True)
class FallingTime(Steps):
    """A time that falls from 1 to 1e-5.

    Attributes:
        steps: updates of the complete generation; default `gen_length`. `noise_removal` adds one step.
        noise_removal: end with a step that decides every position that is still masked.
    """

    sets_time: ClassVar = True
    noise_removal: bool = True

    @property
    def most_steps(self) -> int:
        return self.steps + self.noise_removal

    def schedule(self) -> Iterator[StepTime]:
        """The times of all steps."""
        times, length = torch.linspace(1, LAST_TIME, self.steps + 1), (1 - LAST_TIME) / self.steps
        for time in times[:-1]:
            yield StepTime(time, time - length, closing=False)
        if self.noise_removal:
            yield StepTime(times[-1], torch.zeros(()), closing=True)

    def denoise(self, state: State) -> Iterator[None]:
        last = LastPrediction()
        for times in state.while_undecided(self.schedule()):
            yield
            state.time = times.sigma.to(state.canvas.device).expand(len(state.canvas))
            canvas = state.begin_step()
            where = (canvas == state.mask_id) & state.computed()
            logits = last.logits(state, canvas, where)
            weights = self.weights(state, logits, times)
            if times.closing:
                weights[:, state.mask_id] = 0
            if self.draws(times):
                drawn = decisions.exponential_race(weights, state.uniform(where, weights.shape[-1], weights.dtype))
            else:
                drawn = weights.argmax(dim=-1)
            proposed = state.propose_drawn(
                where, drawn, canvas, partial(decisions.token_probabilities, logits, state.mask_id)
            )
            state.commit(where & (proposed != state.mask_id), proposed)

    @abstractmethod
    def weights(
        self, state: State, logits: Float[Tensor, "masked vocab"], times: StepTime
    ) -> Float[Tensor, "masked vocab"]:
        """The weights of a step's draw at the masked positions; the mask's are not read in the closing step."""

    def draws(self, times: StepTime) -> bool:
        """Whether the step draws its tokens; otherwise it takes those with the largest weight."""
        return True


class LastPrediction:
    """The logits of the last pass, used again while the canvas, and any time that the network reads, stay the same.

    While anything is watched, every step has its pass, which computes the same logits unless a hook changes them.
    """

    def __init__(self) -> None:
        self._read: list[Tensor] = []

    def logits(
        self, state: State, canvas: Int[Tensor, "batch pos"], where: Bool[Tensor, "batch pos"]
    ) -> Float[Tensor, "masked vocab"]:
        """As `State.logits`."""
        read = [canvas, where]
        if state.tree.timed and state.time is not None:
            read.append(state.time)
        same = len(self._read) == len(read) and all(map(torch.equal, self._read, read))
        watched = state.tree.is_watched or state.tree.denoise.hook_logits.watched
        if watched or state.keys is not None or not same:  # a policy plans on passes that run
            self._logits, self._read = state.logits(canvas, where), read
        state.active = where.any(dim=1)
        return self._logits.clone()
