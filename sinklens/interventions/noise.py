"""Fixed random draws for a model whose canvas is random tokens.

The same seed already repeats a run. `FixedNoise` repeats the draws of another program, or those of a run under other
settings: the tokens with which each canvas begins, the tokens drawn at every step, and those that replace the rejected
ones.

Caveat: a draw belongs to a step. If an intervention makes a canvas end earlier or later, the draws of the following
canvases shift with it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.runs.intervention import Intervention, Pairs, RunContext, refuse

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class FixedNoise(Intervention):
    """Replaces a run's random draws with given ones.

    Attributes:
        starts: token ids with which each canvas begins; None leaves them random.
        sampled: token ids drawn at each position of the canvas in each step; None leaves them random.
        renoised: token ids that replace the rejected ones in each step; None leaves them random.
    """

    needs_run: ClassVar[str] = (
        "FixedNoise sets the draws of a run whose canvas is random tokens; it has no effect in a single pass or for "
        "other models."
    )

    on_canvas: ClassVar[bool] = True

    starts: Int[Tensor, "canvas batch pos"] | None = None
    sampled: Int[Tensor, "step batch pos"] | None = None
    renoised: Int[Tensor, "step batch pos"] | None = None

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """The hooks of the sampler's points.

        Raises:
            SettingError: a single pass, a model without these points, a restriction, or nothing given.
        """
        refuse(self, "steps", "layers", "heads", "positions")
        if not model.tree.architecture.encoder:
            raise SettingError(self.needs_run)
        given = {"hook_candidates": self.sampled, "hook_renoise": self.renoised}
        pairs: Pairs = [(f"denoise.{name}", _Draws(name, draws)) for name, draws in given.items() if draws is not None]
        if self.starts is not None:
            pairs.append(("denoise.hook_canvas", _Starts(self.starts, run.prompt_length)))
        if not pairs:
            raise SettingError("FixedNoise has no draws; pass starts=, sampled= or renoised=, or leave it out.")
        return pairs


class _Draws:
    """Returns the draws of the current step."""

    def __init__(self, name: str, draws: Tensor) -> None:
        self.__name__, self._draws = name, draws

    def __call__(self, value: Int[Tensor, "batch pos"], hook: "Point") -> Tensor:
        step = hook.step or 0
        if step >= len(self._draws):
            raise SettingError(f"FixedNoise has draws for {len(self._draws)} steps, and the run is at step {step}.")
        return self._draws[step].to(value)


class _Starts:
    """Puts the given tokens on a canvas in its first step."""

    def __init__(self, starts: Tensor, prompt_length: int) -> None:
        self._starts, self._prompt_length, self._length = starts, prompt_length, 0

    def __call__(self, value: Int[Tensor, "batch pos"], hook: "Point") -> Tensor | None:
        if value.shape[1] == self._length:
            return None
        self._length, size = value.shape[1], self._starts.shape[-1]
        number = (self._length - self._prompt_length) // size - 1
        if number >= len(self._starts):
            raise SettingError(f"FixedNoise has {len(self._starts)} starts, and the run is at canvas {number}.")
        changed = value.clone()
        changed[:, -size:] = self._starts[number].to(value)
        return changed
