"""Replace what keys say, not how much attention they receive.

A query's output is z = Σ_j A[j] v_j. Masking key j removes A[j], so the other weights grow; `ReplaceValues` keeps every
weight of the layer and replaces v_j by zero, by the mean value of the row, or by a donor's. If that costs as much as
masking, the message of the key is missed, not the attention that it absorbs. Keys are chosen per query head, even where
heads share v_j through a common key/value head: z changes by Σ_{j chosen} A[j] (v'_j − v_j), added at ``hook_z``. This
equals an edit of the value itself where all heads of a key/value head choose the key.

Pitfall: attention is unchanged only in the layer itself. The changed outputs change the queries and keys of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.names import ENCODER
from sinklens.hooks.points import Point
from sinklens.interventions.donors import MATCHED, Donors, Draws
from sinklens.interventions.places import AtKeys, Places, Reach, chosen_keys
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, RunContext, layer_of
from sinklens.utils.arguments import Seed, plainly_shown


@dataclass(frozen=True, kw_only=True)
class ReplaceValues(AtKeys):
    """Replace the values of keys, and leave the attention to them unchanged; `AblateValues` makes it.

    z_i = Σ_j A[i, j] v'_j, where v'_j is the replacement for the chosen keys of a head, and v_j for the others. The
    layers that it changes use explicit attention. Interventions on ``hook_v`` and ``hook_pattern`` must be listed
    before it.

    Attributes:
        by: "mean", the mean value of the row's keys that the query can see; "zero", as if the attention to the keys
            were dropped; or "resample", the value of a matching position in `reference`.
        reference: `Donors` of ``hook_v``, for "resample".
        match: what a donor's position must have in common; see `Donors`.
        seed: of resampling.
        where, positions, queries: which keys; see `AtKeys`.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True

    by: Literal["mean", "zero", "resample"] = "mean"
    reference: Donors | None = None
    match: Sequence[str] = MATCHED
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.by == "resample") == (self.reference is not None),
            "by='resample' and reference=donors(model, prompts, names) belong together.",
        )

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        places = Places(self, model, run, of="keys")
        draws = None if self.reference is None else Draws(self.reference, self.match, self.seed, run)
        values, changes = _Values(run, model.block_length, draws), dict[int, Tensor]()

        def compute(pattern: Float[Tensor, "batch head query key"], hook: Point) -> None:
            changes.pop(layer_of(hook), None)
            if (found := places.keys_at(hook, pattern, self.queries)) is not None and found.keys.any():
                changes[layer_of(hook)] = values.change(hook, pattern, found.keys, self.by)

        def change(z: Float[Tensor, "batch pos head d_head"], hook: Point) -> Tensor | None:
            difference = changes.pop(layer_of(hook), None)
            return None if difference is None else (z.float() + difference).to(z.dtype)

        prefixes = (ENCODER, "") if model.tree.architecture.encoder else ("",)  # the text before, and the canvas
        kept = [(f"{one}blocks.{layer}.attn.hook_v", values.keep) for one in prefixes for layer in places.layers]
        computed = [(f"blocks.{layer}.attn.hook_pattern", compute) for layer in places.layers]
        changed = [(f"blocks.{layer}.attn.hook_z", change) for layer in places.layers]
        return [*([] if draws is None else draws.first()), *kept, *places.around(computed), *changed]


@plainly_shown
def AblateValues(
    top_k: int | None = None,
    *,
    by: Literal["mean", "zero", "resample"] = "mean",
    reference: Donors | None = None,
    match: Sequence[str] = MATCHED,
    seed: Seed = 0,
    where: Any = None,
    queries: Reach = "each",
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    **which: Any,
) -> ReplaceValues:
    """Replace the values of keys, and leave the attention to them unchanged.

        AblateValues(where="newline", by="zero")
        AblateValues(top_k=1, source=base)  # the strongest keys of another run

    Args:
        top_k: number of keys per head; or pass `where` or ``detector=``.
        by, reference, match: what replaces the values; see `ReplaceValues`.
        seed: seed of random keys and of resampling.
        where: takes all keys there, at the same step, instead of keys chosen by score; see `AtPositions`.
        queries: as in `MaskKeys`; by default, in an autoregressive run, each token sees the replaced values of its
            step.
        steps, layers, heads: where it acts.
        positions: keys that may be chosen.
        **which: which keys, as in `MaskSinks`.
    """
    return ReplaceValues(
        **chosen_keys(top_k, where, positions, which | ({"seed": seed} if where is None else {})),
        by=by, reference=reference, match=match, seed=seed, queries=queries, steps=steps, layers=layers, heads=heads,
    )  # fmt: skip


class _Values:
    """The values of all keys of a run, by layer; with a key/value cache, a pass computes only the newest."""

    def __init__(self, run: RunContext, block_length: int | None, draws: Draws | None) -> None:
        self._run, self._draws, self._kept = run, draws, dict[int, Tensor]()
        self._block = 1 if run.causal else block_length  # queries see the keys up to the end of their block

    def keep(self, value: Float[Tensor, "batch pos kv_head d_head"], hook: Point) -> None:
        """The hook function of ``hook_v``."""
        first = hook.forward_pass.first(value.shape[1])
        earlier = [self._kept[layer_of(hook)][:, :first]] if first else []
        self._kept[layer_of(hook)] = torch.cat([*earlier, value.detach()], dim=1)

    def change(
        self,
        hook: Point,
        pattern: Float[Tensor, "batch head query key"],
        keys: Bool[Tensor, "batch #head #query key"],
        by: str,
    ) -> Float[Tensor, "batch query head d_head"]:
        """The change of z if the attention to `keys` goes to their replacement instead of their values."""
        moved, place = torch.where(keys, pattern, 0.0).float(), slice(hook.key_positions.start, hook.key_positions.stop)
        values = self._of_heads(self._kept[layer_of(hook)].float(), moved.shape[1])[:, place]
        lost = torch.einsum("bhqk,bkhd->bqhd", moved, values)
        if by == "zero":
            return -lost
        if by == "mean":
            means = self._means(values, hook)
            means = means[:, -moved.shape[2] :] if means.shape[1] > 1 else means
            return moved.sum(dim=-1).transpose(1, 2)[..., None] * means - lost
        assert self._draws is not None
        wanted = torch.nn.functional.pad(keys.flatten(1, 2).any(dim=1), (place.start, 0))
        new = self._draws.values(hook, f"blocks.{layer_of(hook)}.attn.hook_v", wanted, values.dtype)[:, place]
        return torch.einsum("bhqk,bkhd->bqhd", moved, self._of_heads(new, moved.shape[1])) - lost

    def _of_heads(self, values: Float[Tensor, "batch key kv_head d_head"], heads: int) -> Tensor:
        return values.repeat_interleave(heads // values.shape[2], dim=2)

    def _means(
        self, values: Float[Tensor, "batch key head d_head"], hook: Point
    ) -> Float[Tensor, "batch #key head d_head"]:
        """The mean value of the keys that each query can see; never of padding."""
        place, gone = slice(hook.key_positions.start, hook.key_positions.stop), hook.forward_pass.gone
        real = hook.forward_pass.real[:, place].to(values.device)
        seen = real if gone is None else real & ~gone[:, layer_of(hook)].to(real.device)
        weights = seen[..., None, None].to(values)
        if self._block is None:
            return (values * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        sums, counts = (values * weights).cumsum(dim=1), weights.cumsum(dim=1).clamp(min=1)
        start, number = real.long().argmax(dim=1, keepdim=True), (real.cumsum(dim=1) - 1).clamp(min=0)
        last = (start + (number // self._block + 1) * self._block - 1).clamp(max=values.shape[1] - 1)
        return (sums / counts).gather(1, last[..., None, None].expand_as(sums))
