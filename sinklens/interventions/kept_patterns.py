"""Attention patterns of one step of a diffusion run, kept for later steps; `FreezePattern` repeats them.

A pass may compute a part of the canvas only: a *window* of queries, under a cache policy or with cached blocks. A row
of a kept pattern belongs to the canvas column of its query. It has a meaning only in a pass with the same window and
the same keys.

Pitfall: windows of different blocks often have the same size, so shapes alone do not show that rows belong to other
queries.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.runs.intervention import Pairs, RunContext, within

if TYPE_CHECKING:
    from sinklens.model import Model


class Window(NamedTuple):
    """What the pattern of a pass covers.

    Attributes:
        queries: canvas columns of the queries.
        keys: canvas columns of the keys.
    """

    queries: range
    keys: range


class KeptPatterns:
    """The patterns of one step of a run, by point.

    Args:
        name: of the intervention, for errors.
        at: the step whose patterns are kept.
    """

    def __init__(self, name: str, at: int) -> None:
        self._name, self._at = name, at
        self._kept: dict[str, tuple[Window, Tensor]] = {}

    def keep(self, value: Float[Tensor, "batch head query key"], hook: Point) -> None:
        """Keep the pattern of the current step."""
        self._kept[str(hook.name)] = self._window(value, hook), value.detach().clone()

    def of(self, value: Float[Tensor, "batch head query key"], hook: Point) -> Float[Tensor, "batch head query key"]:
        """The pattern kept at a point, whose rows and columns belong to the same positions as those of `value`.

        Raises:
            SettingError: the current step computes other positions.
        """
        (window, kept), now = self._kept[str(hook.name)], self._window(value, hook)
        if window != now:
            raise SettingError(
                f"{self._name} repeats the attention of step {self._at}, which computed {_columns(window)}; step "
                f"{hook.step} computes {_columns(now)}. Choose at= and steps= among steps that compute the same "
                f"positions, or run without a cache."
            )
        return kept

    def _window(self, value: Float[Tensor, "batch head query key"], hook: Point) -> Window:
        first = hook.forward_pass.first(value.shape[2])
        return Window(range(first, first + value.shape[2]), hook.key_positions)


def _columns(window: Window) -> str:
    queries, keys = window
    return f"positions {queries.start} to {queries.stop - 1} with keys {keys.start} to {keys.stop - 1}"


@dataclass(frozen=True, kw_only=True)
class FreezePattern(AtPositions):
    """Reuse the attention pattern of step `at` in all later steps (of `steps`): how much does attention adapt?

    For diffusion models only, since the patterns of an autoregressive run grow with the text.

    Attributes:
        at: the step whose pattern is kept; negative values count from the end of the planned steps.
        positions, where: queries whose attention is frozen.

    Raises:
        SettingError: a step that computes other positions than step `at`, under a cache policy or with cached blocks.
    """

    needs_run: ClassVar[str] = (
        "FreezePattern reuses the pattern of an earlier step of a diffusion run; use it in generate or trace with a "
        "diffusion model."
    )

    on_canvas: ClassVar[bool] = True

    at: int

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if run.causal:
            raise SettingError(self.needs_run)
        at = within("step", [self.at], run.steps)[0]
        kept = KeptPatterns("FreezePattern", at)

        def keep(value: Float[Tensor, "batch head query key"], hook: Point) -> None:
            if hook.step == at:
                kept.keep(value, hook)

        def frozen(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            return kept.of(value, hook) if (hook.step or 0) > at else None

        keeps = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in self.chosen_layers(model)]
        return [*keeps, *self.edits(model, run, "attn.hook_pattern", frozen)]
