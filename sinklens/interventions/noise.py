"""Fixed random draws, for DiffusionGemma and for networks that are conditioned on the noise level.

The same seed already repeats a run. `FixedNoise` repeats the draws of another program, or those of a run under other
settings. DiffusionGemma draws tokens: those with which each canvas begins, those of every step, and those that replace
the rejected ones. The samplers of MDLM, SEDD, Duo, GIDD and BD3-LM draw uniform numbers, and choose tokens with them.

Caveat: a draw belongs to a step. If an intervention makes a canvas end earlier or later, the draws of the following
canvases shift with it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.runs.intervention import Intervention, Pairs, RunContext

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
        uniform: numbers from 0 to 1 that each step's tokens are drawn with, at all positions of the canvas
            (``denoise.hook_uniform``): one for each token of the vocabulary, or for GIDD one. None leaves them random.
    """

    needs_run: ClassVar[str] = (
        "FixedNoise sets the draws of a run of DiffusionGemma, or of a network conditioned on the noise level; it has "
        "no effect in a single pass or for other models."
    )

    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("steps", "layers", "heads", "positions")

    starts: Int[Tensor, "canvas batch pos"] | None = None
    sampled: Int[Tensor, "step batch pos"] | None = None
    renoised: Int[Tensor, "step batch pos"] | None = None
    uniform: Float[Tensor, "step batch pos *token"] | None = None

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """The hooks of the sampler's points.

        Raises:
            SettingError: a single pass, a model without these points, a restriction, or nothing given.
        """
        architecture = model.tree.architecture
        if not architecture.encoder and not architecture.time:
            raise SettingError(self.needs_run)
        tokens = {"starts": self.starts, "sampled": self.sampled, "renoised": self.renoised}
        allowed = list(tokens) if architecture.encoder else ["uniform"]
        given = {name: draws for name, draws in {**tokens, "uniform": self.uniform}.items() if draws is not None}
        if not given or not given.keys() <= set(allowed):
            raise SettingError(
                f"FixedNoise takes {' or '.join(f'{name}=' for name in allowed)} for {model.family} models; got "
                f"{', '.join(f'{name}=' for name in given) or 'none'}."
            )
        points = {"sampled": "hook_candidates", "renoised": "hook_renoise", "uniform": "hook_uniform"}
        pairs: Pairs = [(f"denoise.{points[name]}", _Draws(draws)) for name, draws in given.items() if name in points]
        if self.starts is not None:
            pairs.append(("denoise.hook_canvas", _Starts(self.starts, run.prompt_length)))
        return pairs


class _Draws:
    """Returns the draws of the current step."""

    def __init__(self, draws: Tensor) -> None:
        self._draws = draws

    def __call__(self, value: Tensor, hook: "Point") -> Tensor:
        step = hook.step or 0
        if step >= len(self._draws):
            raise SettingError(f"FixedNoise has draws for {len(self._draws)} steps, and the run is at step {step}.")
        draws = self._draws[step].to(value)
        return draws[..., None] if draws.ndim < value.ndim else draws


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
