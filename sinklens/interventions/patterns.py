"""Values held from an earlier step of a diffusion run.

`Hold` repeats the values that a point had at one step; `FreezePattern` and `HoldSinks` are short for it. The layers
whose ``hook_pattern`` changes use explicit attention.

A pass may compute a part of the canvas only, under a cache policy or with cached blocks. A held row belongs to the
canvas column of its query. It has a meaning only in a pass with the same queries and the same keys; windows of
different blocks often have the same size, so shapes alone do not show that.

Pitfall: holding a column of the pattern changes the others too, since the rest of each row is scaled to keep its sum.
Compare with `FreezePattern`, which repeats the complete rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.interventions.controls import largest
from sinklens.interventions.places import AtPositions
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, RunContext, within
from sinklens.utils.arguments import Count, plainly_shown

PATTERN = "attn.hook_pattern"


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class Hold(AtPositions):
    """Repeat the values of step `at` at a point of the layers in all later steps (of `steps`).

    With `top_k`, only the attention to the strongest keys of that step is held. With S these keys of a head, those with
    the largest column sums, and A the pattern of step t > at: A'[i, j] = A_at[i, j] for j in S. The other keys of row i
    are scaled by one factor, so that the row keeps its sum.

    Attributes:
        at: the step; negative values count from the end of the planned steps.
        point: a point of a layer, with a position axis.
        top_k: number of keys per head, for ``attn.hook_pattern``; None holds all of the value.
        positions, where: positions, of a pattern the queries, whose values are held.

    Raises:
        SettingError: an autoregressive run, whose values grow with the text; or a step that computes other positions
            than step `at`.
    """

    needs_run: ClassVar[str] = (
        "Hold repeats values of an earlier step of a diffusion run, as FreezePattern and HoldSinks do; use it in "
        "generate or trace with a diffusion model."
    )
    on_canvas: ClassVar[bool] = True

    at: int
    point: str = PATTERN
    top_k: Count | None = None

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        require(not run.causal, self.needs_run)
        require(
            self.top_k is None or self.point == PATTERN,
            f"top_k= holds attention to keys, at {PATTERN}; leave it out at {self.point}.",
        )
        at = within("step", [self.at], run.steps)[0]
        kept: dict[str, tuple[tuple[range, range], Tensor, Tensor | None]] = {}

        def keep(value: Tensor, hook: Point) -> None:
            if hook.step == at:
                columns = None if self.top_k is None else _strongest(value, self.top_k, run, hook)
                kept[str(hook.name)] = _window(value, hook), value.detach().clone(), columns

        def held(value: Tensor, hook: Point) -> Tensor | None:
            if (hook.step or 0) <= at:
                return None
            (window, then, columns), now = kept[str(hook.name)], _window(value, hook)
            require(
                window == now,
                f"Hold repeats the values of step {at}, which computed {_shown(*window)}; step {hook.step} "
                f"computes {_shown(*now)}. Choose at= and steps= among steps that compute the same positions, or "
                f"run without a cache.",
            )
            return then if columns is None else _with_columns(value, then, columns)

        keeps = [(f"blocks.{layer}.{self.point}", keep) for layer in self.chosen_layers(model)]
        return [*keeps, *self.edits(model, run, self.point, held)]


def FreezePattern(*, at: int, **places: Any) -> Hold:
    """Reuse the attention pattern of step `at` in all later steps (of `steps`): how much does attention adapt?

    Args:
        at: the step whose pattern is kept; negative values count from the end of the planned steps.
        **places: ``steps=``, ``layers=``, ``heads=``, and ``positions=`` and ``where=`` of the queries whose attention
            is frozen.
    """
    return Hold(at=at, **places)


def HoldSinks(
    *,
    at: int,
    top_k: int = 1,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Hold:
    """Hold the attention to the strongest keys of step `at` in all later steps (of `steps`): does their motion matter?

    Args:
        at: the step whose attention to its strongest keys is held; negative values count from the end.
        top_k: number of keys per head.
        steps, layers, heads: where it acts.
    """
    return Hold(at=at, top_k=top_k, steps=steps, layers=layers, heads=heads)


def _window(value: Tensor, hook: Point) -> tuple[range, range]:
    """The canvas columns of the positions and of the keys of a value."""
    size = value.shape[names.position_axis(str(hook.name))]
    first = hook.forward_pass.first(size)
    return range(first, first + size), hook.key_positions


def _shown(queries: range, keys: range) -> str:
    return f"positions {queries.start} to {queries.stop - 1} with keys {keys.start} to {keys.stop - 1}"


def _strongest(
    pattern: Float[Tensor, "batch head query key"], top_k: int, run: RunContext, hook: Point
) -> Bool[Tensor, "batch head 1 key"]:
    """The strongest keys, by the computed queries that are not padding."""
    now, keys = hook.forward_pass, hook.key_positions
    first, computed = now.first(pattern.shape[2]), now.computed
    counted = run.real if computed is None else run.real & computed.to(run.real.device)
    queries = counted[:, first : first + pattern.shape[2]].to(pattern.device)
    scores = (pattern.float() * queries[:, None, :, None]).sum(dim=2)
    number = torch.full((len(scores), 1, 1), top_k, device=scores.device)
    return largest(scores, run.real[:, None, keys.start : keys.stop].to(scores.device), number)[:, :, None]


def _with_columns(
    value: Float[Tensor, "batch head query key"],
    kept: Float[Tensor, "batch head query key"],
    columns: Bool[Tensor, "batch head 1 key"],
) -> Float[Tensor, "batch head query key"]:
    """`value` with the `columns` of `kept`; the other keys of a row are scaled to keep the row's sum."""
    held, rest = torch.where(columns, kept, 0.0), torch.where(columns, 0.0, value)
    left = (value.sum(dim=-1, keepdim=True) - held.sum(dim=-1, keepdim=True)).clamp(min=0.0)
    scaled = rest * (left / rest.sum(dim=-1, keepdim=True).clamp(min=1e-30))
    return torch.where(columns.any(dim=-1, keepdim=True), held + scaled, value)
