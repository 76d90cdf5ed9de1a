"""Settings of DiffusionGemma's sampler (diffusion_gemma.py), under the names of transformers' generation config.

Passing ``gen_length`` does not change the number of steps per canvas: every canvas takes up to ``max_denoising_steps``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinklens.errors import SettingError
from sinklens.sampling.settings import SamplerSettings, is_finite, require, require_integer, require_nonnegative

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DiffusionGemmaSettings(SamplerSettings):
    """DiffusionGemma's sampler (transformers' ``DiffusionGemmaForBlockDiffusion.generate``; bound of 2505.24857).

    Attributes:
        gen_length: number of answer positions, a multiple of `canvas_length`.
        canvas_length: positions that are denoised together; the checkpoint's value fits its training.
        max_denoising_steps: largest number of steps per canvas.
        entropy_bound: a step accepts the positions of lowest entropy as long as the entropies of those before add up to
            at most this, in nats.
        t_min, t_max: the temperature falls linearly from `t_max` in a canvas's first step towards `t_min`.
        stability_threshold: a row's canvas is finished if the most likely tokens did not change for this many steps,
            and its entropy is below `confidence_threshold`; 0 leaves the decision to the entropy.
        confidence_threshold: mean entropy per position, in nats.
        pad_token_id: replaces the tokens that follow an end token; None keeps them.
        start_canvas: token ids of the first canvas, [batch, canvas_length] or one row for all; None draws them. Kept as
            rows of numbers.
    """

    gen_length: int = 256
    canvas_length: int = 256
    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    pad_token_id: int | None = None
    start_canvas: Any = None

    def __post_init__(self) -> None:
        for name in ("gen_length", "canvas_length", "max_denoising_steps"):
            require_integer(name, getattr(self, name))
        self._check_length()
        positive = is_finite(self.entropy_bound) and self.entropy_bound > 0
        require(positive, f"entropy_bound must be a finite number above 0; got {self.entropy_bound!r}.")
        falling = is_finite(self.t_min) and is_finite(self.t_max) and 0 <= self.t_min < self.t_max
        require(falling, f"t_min and t_max must satisfy 0 <= t_min < t_max; got {self.t_min!r} and {self.t_max!r}.")
        steps = self.stability_threshold
        valid = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
        require(valid, f"stability_threshold must be an integer of at least 0; got {steps!r}.")
        require_nonnegative("confidence_threshold", self.confidence_threshold)
        if self.start_canvas is not None:
            object.__setattr__(self, "start_canvas", self._rows(self.start_canvas))

    @property
    def canvases(self) -> int:
        """Number of canvases."""
        return self.gen_length // self.canvas_length

    @property
    def steps(self) -> int:
        """Largest number of steps of the complete generation."""
        return self.canvases * self.max_denoising_steps

    def temperature(self, step: int) -> float:
        """The temperature of step `step` of a canvas, counted from 0."""
        left = (self.max_denoising_steps - step) / self.max_denoising_steps
        return self.t_min + (self.t_max - self.t_min) * left

    def _check_length(self) -> None:
        length, canvas = self.gen_length, self.canvas_length
        below, above = length // canvas * canvas, -(-length // canvas) * canvas
        fitting = f"{below} or {above}" if below else str(above)
        require(
            length % canvas == 0,
            f"gen_length {length} is not a multiple of canvas_length {canvas}, and only complete canvases are "
            f"generated; choose {fitting}.",
        )

    def _rows(self, given: Any) -> Rows:
        """`given`, an array or nested lists, as rows of token ids."""
        listed = given.tolist() if hasattr(given, "tolist") else given
        rows = [listed] if isinstance(listed, Sequence) and listed and isinstance(listed[0], int) else listed
        try:
            found = tuple(tuple(int(token) for token in row) for row in rows)
        except (TypeError, ValueError):
            found = ()
        if not found or any(len(row) != self.canvas_length for row in found):
            raise SettingError(
                f"start_canvas must be token ids [batch, {self.canvas_length}], or one row of {self.canvas_length}; "
                f"got {given!r:.80}."
            )
        return found
