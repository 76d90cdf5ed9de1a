"""Interventions that hide keys from queries. All act on ``hook_attn_mask``, so attention stays fused.

`MaskKeys` hides the keys of a rule, or all others; `MaskSinks`, `HideKeys` and `KeepKeys` are shorthands for it. The
additive mask of a hidden key is −∞, so under softmax the remaining attention of each query still sums to 1; a query
with no key left has an all-zero row.

*Sinks of the previous step.* `MaskSinks` and `KeepKeys` act at step t on the sinks of step t − 1, as the paper does
(Rulli et al., 2510.15731, Sec. 4.3); they do nothing at step 0. In a diffusion run the scores of step t − 1 are its
column sums. In an autoregressive run they are the attention of its last token (times the number of keys, so that
uniform attention is 1 here too), and the keys are masked only for the token decoded at step t, with or without a
key/value cache. With ``queries="all"`` they are masked for every token of the pass of step t, which then must recompute
all of them (``use_cache=False``): the information that earlier tokens pass to the newest changes as well.

Pitfall: a key that was masked at step t − 1 received no attention there, so it is not a sink, and at step t other keys
are masked instead. With ``source=`` set to a run without masking, the keys are those of the unmasked model. A head
whose pattern was all zero at step t − 1 has no strongest key, so none of its keys is masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.attention.masks import MaskHook
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtKeys, Places, Reach, chosen_keys, index_mask
from sinklens.model import Model
from sinklens.runs.identity import fingerprint
from sinklens.runs.intervention import Pairs, RunContext, layer_of, within
from sinklens.runs.result import Generation
from sinklens.utils.arguments import plainly_shown

Distance = Annotated[int, Ge(0)]
POINT = "attn.hook_attn_mask"


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class MaskKeys(AtKeys):
    """Hide keys from queries, or hide all keys except these and nearby ones.

    Query i no longer sees key j if j is one of the keys; with `keep`, unless j is one of them or |i − j| ≤ window.

    Attributes:
        where, positions, queries: which keys, and for which queries; see `AtKeys`.
        keep: False hides the keys; True hides the others. Where a rule has no scores to go by, nothing is hidden.
        window: with `keep`, the distance up to which every query sees its neighbors; 0 is the query itself.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True

    keep: bool = False
    window: Distance = 0

    def keys(self, run: "Generation") -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that a run with this intervention in its hooks recorded (`Generation.chosen`).

        None at steps at which a row only waits for its batch.

        Raises:
            SettingError: a run without this intervention, or without sinks.
        """
        listed = [choice for choice in run.chosen if isinstance(choice.of, MaskKeys)]
        found = next((choice for choice in listed if fingerprint(choice.of) == fingerprint(self)), None)
        if found is None or run.sinks is None:
            raise SettingError(
                "the run did not record the keys of this intervention; list it in hooks= of the run, and leave "
                "record_sinks on."
            )
        score = run.sinks.data["score"]
        layers = np.isin(np.arange(score.sizes["layer"]), within("layer", self.layers, score.sizes["layer"]))
        places = found.places.to_numpy()[:, : score.sizes["step"]] & layers[:, None, None]
        scored = score.notnull().any("head").to_numpy()[:, :, :, None]
        return score.copy(data=np.broadcast_to(places & scored, score.shape))

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        places = Places(self, model, run, of="keys")

        def keep(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            found = places.keys_at(hook, value, self.queries)
            if found is None:
                return None
            distance = hook.forward_pass.distances(value.device)
            hidden = ~found.keys & (distance.abs() > self.window) & found.rows[:, None, :, None]
            hidden = hidden & index_mask(places.heads, value.shape[1], value.device)[:, None, None]
            if model.causal:  # later keys are hidden anyway, and so is padding
                hidden = hidden & (distance <= 0)
            if not run.single:
                stop = run.forward_pass.keys.stop
                hidden = hidden & run.real[:, None, None, stop - value.shape[-1] : stop].to(value.device)
            return value.masked_fill(hidden, -torch.inf) if bool(hidden.any()) else None

        act = keep if self.keep else Hide(places, self.queries)
        return places.around([(f"blocks.{layer}.{POINT}", act) for layer in places.layers])


class Hide(MaskHook):
    """The hook function that hides the keys at `places`."""

    def __init__(self, places: Places, queries: Reach) -> None:
        self._places, self._queries = places, queries

    def __call__(self, value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
        anywhere = self._places.anywhere(hook)
        found = None if anywhere is False else self._places.keys_at(hook, value, self._queries)
        if found is None or not (anywhere or bool(found.keys.any())):
            return None
        return value.masked_fill(found.keys, -torch.inf)

    def of_layers(
        self, zeros: Float[Tensor, "batch head 1 key"], points: Sequence[Point]
    ) -> list[Float[Tensor, "batch head 1 key"] | None] | None:
        if self._places.nowhere(points[0]):
            return [None] * len(points)
        found = self._places.of_layers(points[0])
        if found is None or found.layers is None:
            return None
        keys = found.mask.transpose(0, 1)[..., None, :].to(zeros.device)
        hidden = [
            one if any_key else None
            for one, any_key in zip(zeros.masked_fill(keys, -torch.inf), found.layers, strict=True)
        ]
        return [hidden[layer_of(point)] for point in points] if len(hidden) > 1 else hidden * len(points)


def MaskSinks(
    top_k: int | None = None,
    *,
    where: Any = None,
    queries: Reach = "newest",
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    **which: Any,
) -> MaskKeys:
    """At step t, mask attention to the sinks of step t − 1 (Rulli et al., 2510.15731, Sec. 4.3).

        MaskSinks(detector=EpsilonOverMean())  # every sink of every head, by the paper's definition
        MaskSinks(5)  # the five strongest keys of every head, sinks or not
        MaskSinks(5, pick="same_mass")  # its control: keys that are no sinks and receive as much attention

    Caveat: a hidden key draws no attention, so at the next step it is no sink and is not hidden: the same key is hidden
    at about every second step. ``source=run, same_step=True`` hides at every step the keys that an unmasked run had
    there. If a detector finds nothing, the run is unchanged, bit for bit, and an `InterventionWarning` says so.

    Args:
        top_k: number of keys per head; 1 if none of `top_k`, `detector` and `where` is given.
        where: hides all keys there, at the same step, instead of keys chosen by score; see `AtPositions`.
        queries: as in `MaskKeys`.
        steps, layers, heads: where it acts.
        positions: keys that may be chosen.
        **which: which keys: ``detector=``, ``pick=``, ``only=``, ``same_step=``, ``source=``, ``seed=`` and
            ``persistent=`` of `Where`.
    """
    return MaskKeys(
        **chosen_keys(top_k, where, positions, which, usual=1), queries=queries, steps=steps, layers=layers, heads=heads
    )


def KeepKeys(
    top_k: int | None = None,
    *,
    window: int = 0,
    where: Any = None,
    positions: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    **which: Any,
) -> MaskKeys:
    """Keep only attention to the strongest keys of step t − 1 and to neighbors: can sinks stand in for the context?

    Nothing is masked at step 0. A head whose pattern was all zero at step t − 1 has no strongest key and keeps only its
    neighbors.

    Args:
        top_k: number of keys kept per head; 8 if none of `top_k`, `detector` and `where` is given.
        window: as in `MaskKeys`.
        where, steps, layers, heads, positions, **which: as in `MaskSinks`.
    """
    return MaskKeys(
        **chosen_keys(top_k, where, positions, which, usual=8), keep=True, window=window, steps=steps, layers=layers,
        heads=heads,
    )  # fmt: skip


def HideKeys(
    *,
    positions: Sequence[int],
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> MaskKeys:
    """Hide keys at fixed positions from every query, at every chosen step, the first included.

        HideKeys(positions=[0])  # the first token; keys that follow the scores need MaskSinks
        HideKeys(positions=[0, -1], layers=[2], heads=[3])  # the first and the last, from one head

    Args:
        positions: the keys to hide, not counting padding.
        steps, layers, heads: where it acts.
    """
    return MaskKeys(positions=positions, queries="each", steps=steps, layers=layers, heads=heads)
