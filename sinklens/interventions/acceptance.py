"""Interventions on what a step accepts, for a model whose canvas is random tokens.

Such a step draws a token at every position of its canvas and accepts the positions of lowest entropy; all others are
*renoised*: they get a random token. `Accept` and `Renoise` decide this for chosen positions, whatever their entropy,
and leave the others to the sampler. All draws stay those of the run without the intervention, as long as the tokens
before them are equal: the same seed, or `FixedNoise`, pairs the two runs.

Pitfall: the last step of a canvas leaves the most likely tokens, not the accepted ones, and a canvas ends when its
predictions say so. An intervention at the last step therefore changes nothing, and neither does one under ``replay=``,
where the canvases are given.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.interventions.canvas import refuse_prompt
from sinklens.interventions.places import CANVAS, AtPositions, Places
from sinklens.runs.intervention import Canvas, Pairs, RunContext

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model

POINT = "denoise.hook_accepted"


@dataclass(frozen=True, kw_only=True)
class Acceptance(AtPositions):
    """Base class of interventions on what a step accepts; subclasses define `accepts`."""

    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")
    accepts: ClassVar[bool]
    """Whether the chosen positions are accepted."""

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """The hooks of ``denoise.hook_accepted``, and those that find positions.

        Raises:
            SettingError: a single pass, a model without this point, positions of the prompt, or see `Places`.
        """
        if run.single or POINT not in model.hook_names():
            raise SettingError(
                f"{type(self).__name__} changes which tokens a step accepts on a canvas of random tokens; a single "
                f"pass and other models do not accept any. With a mask token, use Remask or ForceTokens."
            )
        places = Places(self, model, run)
        refuse_prompt(self, run)
        canvas = Canvas(run)

        def decide(value: Bool[Tensor, "batch pos"], hook: "Point") -> Tensor | None:
            found = places.in_any_head(hook.step or 0)
            if found is None:
                return None
            assert canvas.now is not None
            stop = canvas.now.ids.shape[1]
            here = found[:, stop - value.shape[1] : stop].to(value.device)
            return value | here if self.accepts else value & ~here

        return places.around([(CANVAS, canvas.hook), (POINT, decide)])


@dataclass(frozen=True, kw_only=True)
class Accept(Acceptance):
    """Accept the token drawn at positions of the canvas in the chosen steps, however uncertain it is.

        Accept(where="committed")  # a position that was accepted once is never renoised

    Attributes:
        positions, where: positions that are accepted; without both, all of the canvas. See `Renoise`.
    """

    accepts: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Renoise(Acceptance):
    """Renoise positions of the canvas in the chosen steps, however certain their tokens are.

        Renoise(where=EpsilonOverMean())                     # the sinks of the step before
        Renoise(where=base.sinks, steps=[5])                 # those of step 5 of another run
        Renoise(where=Where(top_k=1, of=(2, 0)), steps=[5])  # the strongest key of head 2.0

    Attributes:
        positions, where: positions that are renoised; without both, all of the canvas. Positions that `where` finds in
            several layers or heads count once, and those outside the canvas of the step stay as they are: sinks of the
            prompt, in particular, without a warning.
    """

    accepts: ClassVar[bool] = False
