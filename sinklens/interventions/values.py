"""Replace what sinks say, not how much attention they receive.

A query's output is z = Σ_j A[j] v_j. Masking key j removes A[j], so the other weights grow; `AblateSinkValues` keeps
every weight of the layer and replaces v_j by the mean value of the row, or by zero. If that costs as much as masking,
the message of the key is missed, not the attention that it absorbs. Values are replaced per query head, even where
heads share v_j through a common key/value head: z changes by Σ_{j chosen} A[j] (v̄ − v_j), added at ``hook_z``.

Pitfall: attention is unchanged only in the layer itself. The changed outputs change the queries and keys of the next.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.masking import OnSinks
from sinklens.runs.intervention import Pairs, RunContext, layer_of

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class AblateSinkValues(OnSinks):
    """At step t, replace the values of the sinks of step t − 1, and leave the attention to them unchanged.

    z_i = Σ_j A[i, j] v'_j, with v'_j the replacement for the chosen keys of a head, else v_j. The layers that it
    changes use explicit attention. Interventions on ``hook_v`` and ``hook_pattern`` must be listed before it.

    Attributes:
        by: "mean", the mean value of the row's keys (in an autoregressive model, of those that the query can see); or
            "zero", as if the attention to the keys were dropped.
        top_k, detector, scope, pick, only, same_step, source, seed, persistent, queries, positions: which keys, and for
            which queries; see `OnSinks`.
    """

    by: Literal["mean", "zero"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in ("mean", "zero"):
            raise SettingError(f"by must be 'mean' or 'zero'; got {self.by!r}.")

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """See `Intervention.hooks_for`."""
        chosen = self.chosen(model, run)
        assert run is not None, "PreviousSinks rejects a single pass"
        values, changes = _Values(run), dict[int, Tensor]()

        def compute(pattern: Float[Tensor, "batch head query key"], hook: Point) -> None:
            changes.pop(layer_of(hook), None)
            found = chosen.at(hook, pattern)
            if found is not None and found.any():
                moved = torch.where(found.keys, pattern, 0.0).float()
                changes[layer_of(hook)] = values.change(layer_of(hook), moved, self.by)

        def change(z: Float[Tensor, "batch pos head d_head"], hook: Point) -> Tensor | None:
            difference = changes.pop(layer_of(hook), None)
            return None if difference is None else (z.float() + difference).to(z.dtype)

        kept = [(f"blocks.{layer}.attn.hook_v", values.keep) for layer in chosen.layers]
        changed = [(f"blocks.{layer}.attn.hook_z", change) for layer in chosen.layers]
        return [*kept, *chosen.pairs(compute, "hook_pattern"), *changed]


class _Values:
    """The values of all keys of a run, by layer; with a key/value cache, a pass computes only the newest."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._kept = run, dict[int, Tensor]()

    def keep(self, value: Float[Tensor, "batch pos kv_head d_head"], hook: Point) -> None:
        """The hook function of ``hook_v``."""
        first = self._run.first(int(hook.step or 0), value.shape[1])
        earlier = [self._kept[layer_of(hook)][:, :first]] if first else []
        self._kept[layer_of(hook)] = torch.cat([*earlier, value.detach()], dim=1)

    def change(
        self, layer: int, moved: Float[Tensor, "batch head query key"], by: str
    ) -> Float[Tensor, "batch query head d_head"]:
        """The change of z if the attention `moved` goes to the replacement instead of the keys' values."""
        values = self._kept[layer].float()
        values = values.repeat_interleave(moved.shape[1] // values.shape[2], dim=2)
        lost = torch.einsum("bhqk,bkhd->bqhd", moved, values)
        if by == "zero":
            return -lost
        return moved.sum(dim=-1).transpose(1, 2)[..., None] * self._means(values)[:, -moved.shape[2] :] - lost

    def _means(self, values: Float[Tensor, "batch key head d_head"]) -> Float[Tensor, "batch #key head d_head"]:
        """The mean value of the keys that are not padding: of all, or in a causal model of those up to each query."""
        real = self._run.real[:, : values.shape[1], None, None].to(values)
        if self._run.causal:
            return (values * real).cumsum(dim=1) / real.cumsum(dim=1).clamp(min=1)
        return (values * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
