"""Interventions on chosen keys: hide them, or hold the attention that they receive.

`HideKeys` acts on ``hook_attn_mask``, so attention stays fused. `HoldSinks` acts on ``hook_pattern``, so the layers it
changes use explicit attention.

Caveat: holding a column of the pattern changes the others too, since the rest of each row is scaled to keep its sum.
Compare with `FreezePattern`, which repeats the complete rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.controls import largest
from sinklens.interventions.kept_patterns import KeptPatterns
from sinklens.interventions.masking import hiding
from sinklens.interventions.places import Places, head_mask
from sinklens.runs.intervention import Intervention, Pairs, RunContext, refuse, refuse_empty, within
from sinklens.utils.integers import as_integer

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class HideKeys(Intervention):
    """Hide keys at fixed positions from every query, at every chosen step, the first included.

    The additive mask of the keys is −∞, so under softmax the remaining attention of each query still sums to 1; a query
    with no key left has an all-zero row.

    Attributes:
        positions: the keys to hide, not counting padding; required.

    Raises:
        SettingError: no positions.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_empty(self)
        if self.positions is None:
            raise SettingError("HideKeys needs positions=, the keys to hide: without any key no query could attend.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        return hiding(Places(self, model, run, of="keys"), "each")


@dataclass(frozen=True, kw_only=True)
class HoldSinks(Intervention):
    """Hold the attention to the strongest keys of step `at` in all later steps (of `steps`): does their motion matter?

    With S the `top_k` keys of a head with the largest column sums at step `at`, and A the pattern of step t > at:
    A'[i, j] = A_at[i, j] for j in S. The other keys of row i are scaled by one factor, so that the row keeps its sum.
    For diffusion models only, since the patterns of an autoregressive run grow with the text.

    Attributes:
        at: the step whose attention to its strongest keys is held; negative values count from the end.
        top_k: number of keys per head.

    Raises:
        SettingError: `top_k` below 1, an autoregressive model, or a step that computes other positions than step `at`,
            under a cache policy or with cached blocks.
    """

    needs_run: ClassVar[str] = (
        "HoldSinks repeats attention of an earlier step of a diffusion run; use it in generate or trace with a "
        "diffusion model."
    )

    at: int
    top_k: int = 1

    def __post_init__(self) -> None:
        refuse(self, "positions")
        refuse_empty(self)
        if (as_integer(self.top_k) or 0) < 1:
            raise SettingError(f"top_k must be a number of keys, 1 or more; got {self.top_k!r}.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if run.causal:
            raise SettingError(self.needs_run)
        layers, heads, in_step = self.chosen_layers(model), self.chosen_heads(model), self.step_test(run)
        at = within("step", [self.at], run.steps)[0]
        kept = KeptPatterns("HoldSinks", at)
        columns: dict[str, Bool[Tensor, "batch head 1 key"]] = {}

        def hold(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            name, step = str(hook.name), hook.step or 0
            if step == at:
                kept.keep(value, hook)
                columns[name] = self._strongest(value, run, hook, heads)
            if step <= at or not in_step(step):
                return None
            return _held(value, kept.of(value, hook), columns[name])

        return [(f"blocks.{layer}.attn.hook_pattern", hold) for layer in layers]

    def _strongest(
        self, pattern: Float[Tensor, "batch head query key"], run: RunContext, hook: Point, heads: list[int]
    ) -> Bool[Tensor, "batch head 1 key"]:
        """The strongest keys of the chosen heads, by the computed queries that are not padding."""
        now, keys = hook.forward_pass, hook.key_positions
        first, computed = now.first(pattern.shape[2]), now.computed
        counted = run.real if computed is None else run.real & computed.to(run.real.device)
        queries = counted[:, first : first + pattern.shape[2]].to(pattern.device)
        scores = (pattern.float() * queries[:, None, :, None]).sum(dim=2)
        number = torch.full((len(scores), 1, 1), self.top_k, device=scores.device)
        allowed = run.real[:, keys.start : keys.stop].to(scores.device)
        return (largest(scores, allowed[:, None], number) & head_mask(heads, scores.shape[1], scores.device)[:, None])[
            :, :, None
        ]


def _held(
    value: Float[Tensor, "batch head query key"],
    kept: Float[Tensor, "batch head query key"],
    columns: Bool[Tensor, "batch head 1 key"],
) -> Float[Tensor, "batch head query key"]:
    """`value` with the `columns` of `kept`; the other keys of a row are scaled to keep the row's sum."""
    held, rest = torch.where(columns, kept, 0.0), torch.where(columns, 0.0, value)
    left = (value.sum(dim=-1, keepdim=True) - held.sum(dim=-1, keepdim=True)).clamp(min=0.0)
    scaled = rest * (left / rest.sum(dim=-1, keepdim=True).clamp(min=1e-30))
    return torch.where(columns.any(dim=-1, keepdim=True), held + scaled, value)
