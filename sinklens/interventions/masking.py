"""Interventions that mask attention to some keys. All act on ``hook_attn_mask``, so attention stays fused.

*Sinks of the previous step.* `MaskSinks` and `KeepKeys` act at step t on the sinks of step t − 1, as the paper does
(Rulli et al., 2510.15731, Sec. 4.3); they do nothing at step 0. In a diffusion run the scores of step t − 1 are its
column sums. In an autoregressive run they are the attention of its last token (times the number of keys, so that
uniform attention is 1 here too), and the keys are masked only for the token decoded at step t, with or without a
key/value cache. With ``queries="all"`` they are masked for every token of the pass of step t, which then must recompute
all of them (``use_cache=False``): the information that earlier tokens pass to the newest changes as well.

Pitfall: a key that was masked at step t − 1 received no attention there, so it is not a sink, and at step t other keys
are masked instead. With ``source=`` set to a run without masking, the sets are those of the unmasked model. A head
whose pattern was all zero at step t − 1 has no strongest key, so none of its keys is masked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtKeys, AtPositions, Places, check_reach, head_mask
from sinklens.interventions.scores import recorded
from sinklens.interventions.where import Where
from sinklens.runs.identity import fingerprint
from sinklens.runs.intervention import (
    Pairs,
    RunContext,
    place_mask,
    refuse_empty,
    whole_numbers,
    within,
)
from sinklens.sinks.track import SinkTrack
from sinklens.utils.integers import as_integer

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation


@dataclass(frozen=True, kw_only=True)
class OnSinks(AtKeys):
    """Base class of interventions at step t on the sinks of step t − 1; subclasses define what happens to them.

    Attributes:
        top_k, detector, scope, pick, only, seed, persistent: which keys; see `Selection`. With a detector, `where` or
            neither, pass ``top_k=None``.
        same_step, source: the step and the run of their scores; see `Selection`.
        where: all keys there, at the same step, instead of those chosen by score; see `AtPositions`.
        queries: in an autoregressive run, the "newest" token; "each" token, the prompt's included, by the keys of the
            step that it belongs to; or "all" tokens, by the keys of the newest one.
        positions: keys that may be chosen.

    Raises:
        SettingError: settings that exclude each other; a `top_k` above the number of positions, once the run reaches
            that step; a source of other prompts or another model.
    """

    top_k: int | None = 1
    queries: str = "newest"

    def __post_init__(self) -> None:
        check_reach(self.queries)
        _check_places(self)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MaskSinks(OnSinks):
    """At step t, mask attention to the sinks of step t − 1 (Rulli et al., 2510.15731, Sec. 4.3).

    The additive mask of the chosen keys is −∞, so under softmax the remaining attention of each query still sums to 1;
    a query with no key left has an all-zero row. If a detector finds nothing, the run is unchanged, bit for bit.

    Attributes:
        top_k, detector, scope, pick, only, same_step, source, seed, persistent, where, queries, positions: which keys,
            and for which queries; see `OnSinks`.
    """

    on_canvas: ClassVar[bool] = True

    def keys(self, track: "SinkTrack | Generation") -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that were masked in a run with this intervention in its hooks.

        Args:
            track: the run, which recorded them (`Generation.chosen`); or its sinks, which determine them in a diffusion
                run without controls whose rows do not wait for each other. Of a part of a track, those of the steps
                whose previous step is also in the part.

        Raises:
            SettingError: a run without this intervention or without sinks. A track alone: for other controls than the
                weakest keys, kinds or states, a source or `same_step`, which a track does not determine.
        """
        if not isinstance(track, SinkTrack):
            return self._recorded(track)
        other = self.pick not in ("strongest", "weakest") or self.track is not None or self.where is not None
        if other or self.only or self.same_step or track.causal:
            raise SettingError(
                "a track determines the masked keys only where they follow from its scores alone: not with random keys "
                "or other controls, only=, source=, where= or same_step=, and not in an autoregressive run. Pass the "
                "run, which recorded them."
            )
        score = track.data["score"]
        real, steps = torch.from_numpy(track.data["is_real"].to_numpy()), score["step"].to_numpy().tolist()
        among, found = place_mask(self.positions, real), torch.zeros(score.shape, dtype=torch.bool)
        layers, heads = within("layer", self.layers, found.shape[2]), within("head", self.heads, found.shape[3])
        for step in within("step", self.steps, planned_steps(track)):
            if step in steps and step - 1 in steps:
                seen = recorded(track, steps.index(step - 1), layers, real.device)
                keys = Where.like(self).taken(seen, real, among, step)
                chosen = torch.zeros(len(real), len(layers), *found.shape[3:], dtype=torch.bool)
                chosen[:, :, heads, : keys.shape[-1]] = keys[:, :, heads]
                found[:, steps.index(step), layers] = chosen
        return score.copy(data=found.numpy() & _scored(score))

    def _recorded(self, run: "Generation") -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that `run` recorded, of those that have a score there."""
        listed = [choice for choice in run.chosen if isinstance(choice.of, MaskSinks)]
        found = next((choice for choice in listed if fingerprint(choice.of) == fingerprint(self)), None)
        if found is None or run.sinks is None:
            raise SettingError(
                "the run did not record what this MaskSinks masked; list it in hooks= of the run, and leave "
                "record_sinks on."
            )
        score = run.sinks.data["score"]
        layers = np.isin(np.arange(score.sizes["layer"]), within("layer", self.layers, score.sizes["layer"]))
        places = found.places.to_numpy()[:, : score.sizes["step"]] & layers[:, None, None]
        return score.copy(data=places & _scored(score))

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        return hiding(self.key_places(model, run), self.queries)


def hiding(places: Places, queries: str) -> Pairs:
    """The hooks that hide the keys of `places` from queries."""

    def hide(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
        found = places.keys_at(hook, value, queries)
        return None if found is None or not found.any() else value.masked_fill(found.keys, -torch.inf)

    points = [(f"blocks.{layer}.attn.hook_attn_mask", hide) for layer in places.layers]
    return places.around(points)


@dataclass(frozen=True, kw_only=True)
class KeepKeys(AtKeys):
    """Keep only attention to the strongest keys of step t − 1 and to neighbors: can sinks stand in for the context?

    Query i sees key j if j is one of the kept keys, or |i − j| ≤ window. Everything else is as in `MaskSinks`; nothing
    is masked at step 0. A head whose pattern was all zero at step t − 1 has no strongest key and keeps only its
    neighbors.

    Attributes:
        top_k: number of keys kept per head.
        window: distance up to which every query sees its neighbors; 0 is the query itself.
        pick: "strongest"; or other keys as a control, as in `MaskSinks`.
        detector, scope, only, same_step, source, seed, persistent, where: as in `MaskSinks`.
        positions: keys that may be kept because of their score.
    """

    on_canvas: ClassVar[bool] = True

    top_k: int | None = 8
    window: int = 0

    def __post_init__(self) -> None:
        _check_window(self.window)
        _check_places(self)
        super().__post_init__()

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        places = self.key_places(model, run)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = places.keys_at(hook, value, "newest")
            if found is None:
                return None
            distance = hook.forward_pass.distances(value.device)
            seen = found.keys | (distance.abs() <= self.window) | ~found.rows[:, None, :, None]
            return without(value, seen, distance, places.heads, model, run)

        points = [(f"blocks.{layer}.attn.hook_attn_mask", forbid) for layer in places.layers]
        return places.around(points)


@dataclass(frozen=True, kw_only=True)
class WindowAttention(AtPositions):
    """Query i sees only keys j with i − left ≤ j ≤ i + right (and, in a causal model, none after it).

    ``right=0`` alone makes a diffusion model attend causally, ``left=0`` alone only forwards.

    Attributes:
        width: distance in positions to both sides, 0 or more; instead of `left` and `right`.
        left, right: distance to earlier and to later positions, 0 or more; None does not restrict that side.
        always: positions that every query also sees, e.g. the first four (StreamingLLM, 2309.17453); counted like
            `positions`, so without padding.
        positions, where: queries that are restricted.

    Raises:
        SettingError: neither `width` nor a side is given, or both; or `right` alone, in a causal model.
    """

    on_canvas: ClassVar[bool] = True

    width: int | None = None
    left: int | None = None
    right: int | None = None
    always: Sequence[int] = ()

    def __post_init__(self) -> None:
        refuse_empty(self)
        sides = [side for side in (self.left, self.right) if side is not None]
        if (self.width is None) == (not sides):
            raise SettingError(
                f"pass either width (a distance to both sides), or left, right or both; got width={self.width}, "
                f"left={self.left}, right={self.right}."
            )
        for size in sides if self.width is None else [self.width]:
            _check_window(size)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if model.causal and self.width is None and self.left is None:
            raise SettingError(
                f"right={self.right} changes nothing in an autoregressive model, whose queries see no later key; give "
                f"left=, or use a diffusion model."
            )
        places, heads = Places(self, model, run), self.chosen_heads(model)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            distance = hook.forward_pass.distances(value.device)
            rows = places.of_queries(hook, len(distance), value.device)
            if rows is None:
                return None
            always = place_mask(self.always, hook.forward_pass.real)[:, text_of_keys(run, value.shape[-1])]
            seen = (self._within(distance) | always[:, None].to(value.device))[:, None] | ~rows[..., None]
            return without(value, seen, distance, heads, model, run)

        return places.around([(f"blocks.{layer}.attn.hook_attn_mask", forbid) for layer in places.layers])

    def _within(self, distance: Int[Tensor, "query key"]) -> Bool[Tensor, "query key"]:
        """Whether key − query is in the window."""
        left, right = (self.left, self.right) if self.width is None else (self.width, self.width)
        inside = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            inside &= distance >= -left
        return inside if right is None else inside & (distance <= right)


def without(
    value: Tensor, seen: Tensor, distance: Tensor, heads: Sequence[int], model: "Model", run: RunContext
) -> Float[Tensor, "batch head query key"] | None:
    """The additive mask `value` with keys not `seen` by `heads` set to −∞; None if there are none."""
    hidden = head_mask(heads, value.shape[1], value.device)[:, None, None] & ~seen
    if model.causal:  # later keys are hidden anyway, and so is padding
        hidden = hidden & (distance <= 0)
    if not run.single:
        hidden = hidden & run.real[:, None, None, text_of_keys(run, value.shape[-1])].to(value.device)
    return value.masked_fill(hidden, -torch.inf) if bool(hidden.any()) else None


def text_of_keys(run: RunContext, keys: int) -> slice:
    """The text positions of the keys of a pass."""
    stop = run.forward_pass.keys.stop
    return slice(stop - keys, stop)


def _check_window(width: object) -> None:
    number = as_integer(width)
    if number is None or number < 0:
        raise SettingError(f"a window must be an integer number of positions, 0 or more; got {width!r}.")


def _check_places(what: AtKeys) -> None:
    """Reject restrictions that leave nothing to do."""
    refuse_empty(what)
    same_step = what.same_step or what.where is not None
    if what.steps is not None and not same_step and set(whole_numbers("step", what.steps)) == {0}:
        raise SettingError(
            f"{type(what).__name__} acts on the sinks of the previous step, so steps=[0] alone has no effect. Name a "
            f"later step, or pass same_step=True."
        )


def _scored(score: Float[xr.DataArray, "batch step layer head pos"]) -> np.ndarray:
    """The keys of each step and layer that have a score in any head."""
    return np.broadcast_to(score.notnull().any("head").to_numpy()[:, :, :, None], score.shape)


def planned_steps(track: SinkTrack) -> int:
    """Number of steps planned for the run of `track`, the base of negative indices; if unknown, the recorded number."""
    planned = json.loads(track.data.attrs.get("settings", "{}")).get("steps")
    return int(track.data["step"].to_numpy().max()) + 1 if planned is None else int(planned)
