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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.controls import Pick
from sinklens.interventions.previous_sinks import PreviousSinks, planned_steps
from sinklens.interventions.selection import Scope, Selection, as_tuple
from sinklens.runs.intervention import (
    Distances,
    Intervention,
    Pairs,
    Queries,
    RunContext,
    place_mask,
    refuse_empty,
    whole_numbers,
    within,
)
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation
    from sinklens.sinks.detectors import Detector

Reach = Literal["newest", "all"]
ITSELF: Literal["itself"] = "itself"


def track_of(source: "SinkTrack | Generation | Literal['itself'] | None") -> SinkTrack | None:
    """The sinks that `source` recorded; None for "itself".

    Raises:
        SettingError: `source` recorded no sinks, or is not a run.
    """
    if isinstance(source, str) and source == ITSELF:
        return None
    found = source if isinstance(source, SinkTrack) else getattr(source, "sinks", None)
    if not isinstance(found, SinkTrack):
        raise SettingError(
            f"source must be another run or its sinks; got {source!r}. A run made with record_sinks=False has none; "
            f"repeat it without that setting."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class OnSinks(Intervention):
    """Base class of interventions at step t on the sinks of step t − 1; subclasses define what happens to them.

    Attributes:
        top_k: number of strongest keys per head; the paper masks 1, 5 and 10.
        detector: selects keys instead of `top_k` (pass ``top_k=None``); detectors of scores, or any detector with
            `source`. It sees the chosen layers with all their heads.
        scope: one set per "head", per "layer" (scores averaged over its heads), or for the "model" (averaged over the
            chosen layers too).
        pick: "strongest"; or other keys as a control: "weakest"; "random", possibly also the strongest; or keys that
            are all weaker than the strongest: "random_rest"; "same_mass", random keys that together receive the same
            attention; "same_kind", random keys with the same kinds of token; "nearest", the nearest positions; or
            "permuted", the strongest keys of another head.
        only: states ("prompt", "masked", "committed") or token kinds of the keys, any of them; "not digit", for
            example, leaves out digits.
        same_step: use the sinks of step t itself, from an unmasked pass before it; doubles the work, diffusion only.
        source: "itself", or another run of the same prompts, or its `sinks`: uses the sinks of that run at step t − 1
            (at step t with `same_step`), by its recorded column sums, and nothing at steps that it lacks for the run or
            for a row. A part of a track holds the steps listed in its ``step`` coordinate.
        seed: seed of random keys.
        persistent: draw random keys once per run instead of at every step, as controls of sinks that last.
        queries: in an autoregressive run, whether the "newest" token or "all" tokens are affected.
        positions: keys that may be chosen.

    Raises:
        SettingError: settings that exclude each other; a `top_k` above the number of positions, once the run reaches
            that step; a source of other prompts or another model.
    """

    top_k: int | None = 1
    detector: "Detector | None" = None
    scope: Scope = "head"
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    same_step: bool = False
    source: "SinkTrack | Generation | Literal['itself']" = ITSELF
    seed: int = 0
    persistent: bool = False
    queries: str = "newest"

    def __post_init__(self) -> None:
        if self.queries not in get_args(Reach):
            raise SettingError(f"queries must be one of {', '.join(get_args(Reach))}; got {self.queries!r}.")
        _check_places(self, self.same_step)
        _ = self.selection, track_of(self.source)

    @property
    def selection(self) -> Selection:
        """How the keys are chosen."""
        only = as_tuple(self.only)
        return Selection(self.top_k, self.detector, self.pick, self.scope, only, self.seed, self.persistent)

    def chosen(self, model: "Model", run: RunContext | None) -> PreviousSinks:
        """The keys of one run."""
        every_query = self.queries == "all"
        return PreviousSinks(self, model, run, self.selection, self.same_step, track_of(self.source), every_query)


@dataclass(frozen=True, kw_only=True)
class MaskSinks(OnSinks):
    """At step t, mask attention to the sinks of step t − 1 (Rulli et al., 2510.15731, Sec. 4.3).

    The additive mask of the chosen keys is −∞, so under softmax the remaining attention of each query still sums to 1;
    a query with no key left has an all-zero row. If a detector finds nothing, the run is unchanged, bit for bit.

    Attributes:
        top_k, detector, scope, pick, only, same_step, source, seed, persistent, queries, positions: which keys, and for
            which queries; see `OnSinks`.
    """

    on_canvas: ClassVar[bool] = True

    def keys(self, track: SinkTrack) -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that were masked in the diffusion run that `track` recorded with this intervention in its hooks.

        For a part of a track, those of the steps whose previous step is also in the part.

        Raises:
            SettingError: for other controls than the weakest keys, kinds or states, a source or `same_step`, which a
                track does not determine.
        """
        if (
            self.pick not in ("strongest", "weakest")
            or self.only
            or track_of(self.source) is not None
            or self.same_step
            or track.causal
        ):
            raise SettingError(
                "a track determines the masked keys only where they follow from its scores alone: not with random "
                "keys or other controls, only=, source= or same_step=, and not in an autoregressive run."
            )
        real, steps = torch.from_numpy(track.data["is_real"].to_numpy()), track.data["step"].to_numpy().tolist()
        found = np.zeros(track.data["score"].shape, dtype=bool)
        layers = within("layer", self.layers, found.shape[2])
        heads = within("head", self.heads, found.shape[3])
        for step in within("step", self.steps, planned_steps(track)):
            if step not in steps or step - 1 not in steps:
                continue
            before = track.isel(step=steps.index(step - 1)).scores()
            scores = torch.from_numpy(before.fillna(0.0).to_numpy()[:, 0])
            known = torch.from_numpy(before.notnull().any("head").to_numpy()[:, 0])
            now = torch.from_numpy(track.data["score"].notnull().any("head").to_numpy()[:, steps.index(step)])
            for group in _alike(known, layers):
                by_layer, there = {layer: scores[:, layer] for layer in group}, real & known[:, group[0]]
                chosen = self.selection.choose(by_layer, there, None, None, step, place_mask(self.positions, real))
                for layer, keys in chosen.items():
                    present = keys & now[:, layer, None]
                    found[:, steps.index(step), layer, heads] = present.numpy()[:, heads]
        return track.data["score"].copy(data=found)

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """See `Intervention.hooks_for`."""
        chosen = self.chosen(model, run)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = chosen.at(hook, value)
            if found is None or not found.any():
                return None
            return value.masked_fill(found.keys, -torch.inf)

        return chosen.pairs(forbid)


def _alike(known: Bool[Tensor, "batch layer pos"], layers: Sequence[int]) -> list[list[int]]:
    """Groups of `layers` that have scores at the same positions."""
    groups: list[list[int]] = []
    for layer in layers:
        group = next((group for group in groups if torch.equal(known[:, group[0]], known[:, layer])), None)
        if group is None:
            groups.append([layer])
        else:
            group.append(layer)
    return groups


@dataclass(frozen=True, kw_only=True)
class KeepKeys(Intervention):
    """Keep only attention to the strongest keys of step t − 1 and to neighbours: can sinks stand in for the context?

    Query i sees key j if j is one of the kept keys, or |i − j| ≤ window. Everything else is as in `MaskSinks`; nothing
    is masked at step 0. A head whose pattern was all zero at step t − 1 has no strongest key and keeps only its
    neighbours.

    Attributes:
        top_k: number of keys kept per head.
        window: distance up to which every query sees its neighbours; 0 is the query itself.
        pick: "strongest"; or other keys as a control, as in `MaskSinks`.
        scope, only, same_step, source, seed, persistent: as in `MaskSinks`.
        positions: keys that may be kept because of their score.
    """

    on_canvas: ClassVar[bool] = True

    top_k: int | None = 8
    detector: "Detector | None" = None
    window: int = 0
    scope: Scope = "head"
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    same_step: bool = False
    source: "SinkTrack | Generation | Literal['itself']" = ITSELF
    seed: int = 0
    persistent: bool = False

    def __post_init__(self) -> None:
        _check_window(self.window)
        _check_places(self, self.same_step)
        _ = self.selection, track_of(self.source)

    @property
    def selection(self) -> Selection:
        """How the keys are chosen."""
        only = as_tuple(self.only)
        return Selection(self.top_k, self.detector, self.pick, self.scope, only, self.seed, self.persistent)

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """See `Intervention.hooks_for`."""
        chosen = PreviousSinks(self, model, run, self.selection, self.same_step, track_of(self.source))
        distances = Distances()

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = chosen.at(hook, value)
            if found is None:
                return None
            distance = distances.of(value)
            seen = found.keys | (distance.abs() <= self.window) | ~found.rows[:, None, :, None]
            return without(value, seen, distance, chosen.heads, model, run)

        return [*distances.pairs(chosen.layers), *chosen.pairs(forbid)]


@dataclass(frozen=True, kw_only=True)
class WindowAttention(Intervention):
    """Query i sees only keys j with i − left ≤ j ≤ i + right (and, in a causal model, none after it).

    ``right=0`` alone makes a diffusion model attend causally, ``left=0`` alone only forwards.

    Attributes:
        width: distance in positions to both sides, 0 or more; instead of `left` and `right`.
        left, right: distance to earlier and to later positions, 0 or more; None does not restrict that side.
        always: positions that every query also sees, e.g. the first four (StreamingLLM, 2309.17453); counted like
            `positions`, so without padding.
        positions: queries that are restricted.

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

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """See `Intervention.hooks_for`."""
        if bool(model.config.is_causal) and self.width is None and self.left is None:
            raise SettingError(
                f"right={self.right} changes nothing in an autoregressive model, whose queries see no later key; give "
                f"left=, or use a diffusion model."
            )
        layers, heads, touched = self.chosen_layers(model), self.chosen_heads(model), Queries(self, run)
        distances = Distances()
        always = None if run is None else place_mask(self.always, run.real)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            distance = distances.of(value)
            queries, keys = distance.shape
            rows = touched.of(hook.step, queries, value.device)
            if rows is None:
                return None
            if run is None or always is None:
                free = place_mask(self.always, value.new_ones(1, keys).bool())
            else:
                free = always[:, text_of_keys(run, keys)]
            seen = self._within(distance) | free[:, None].to(value.device) | ~rows[:, :, None]
            return without(value, seen[:, None], distance, heads, model, run)

        return [*distances.pairs(layers), *((f"blocks.{layer}.attn.hook_attn_mask", forbid) for layer in layers)]

    def _within(self, distance: Int[Tensor, "query key"]) -> Bool[Tensor, "query key"]:
        """Whether key − query is in the window."""
        left, right = (self.left, self.right) if self.width is None else (self.width, self.width)
        inside = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            inside &= distance >= -left
        return inside if right is None else inside & (distance <= right)


def without(
    value: Tensor, seen: Tensor, distance: Tensor, heads: Sequence[int], model: "Model", run: RunContext | None
) -> Float[Tensor, "batch head query key"] | None:
    """The additive mask `value` with keys not `seen` by `heads` set to −∞; None if there are none."""
    restricted = torch.zeros(value.shape[1], dtype=torch.bool, device=value.device)
    restricted[list(heads)] = True
    hidden = restricted[:, None, None] & ~seen
    if bool(model.config.is_causal):  # later keys are hidden anyway, and so is padding
        hidden = hidden & (distance <= 0)
    if run is not None:
        hidden = hidden & run.real[:, None, None, text_of_keys(run, value.shape[-1])].to(value.device)
    return value.masked_fill(hidden, -torch.inf) if bool(hidden.any()) else None


def text_of_keys(run: RunContext, keys: int) -> slice:
    """The text positions of the keys of a pass."""
    length = run.tree.watch.length
    return slice(0, keys) if length is None else slice(length - keys, length)


def _check_window(width: object) -> None:
    if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 0:
        raise SettingError(f"a window must be an integer number of positions, 0 or more; got {width!r}.")


def _check_places(what: Intervention, same_step: bool) -> None:
    """Reject restrictions that leave nothing to do."""
    refuse_empty(what)
    if what.steps is not None and not same_step and set(whole_numbers("step", what.steps)) == {0}:
        raise SettingError(
            f"{type(what).__name__} acts on the sinks of the previous step, so steps=[0] alone has no effect. Name a "
            f"later step, or pass same_step=True."
        )
