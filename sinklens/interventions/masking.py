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
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.previous_sinks import PreviousSinks, planned_steps
from sinklens.interventions.selection import Pick, Scope, Selection, as_tuple
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
class MaskSinks(Intervention):
    """At step t, mask attention to the sinks of step t − 1 (Rulli et al., 2510.15731, Sec. 4.3).

    The additive mask of the chosen keys is −∞, so under softmax the remaining attention of each query still sums to 1;
    a query with no key left has an all-zero row. If a detector finds nothing, the run is unchanged, bit for bit.

    Attributes:
        top_k: number of strongest keys per head; the paper masks 1, 5 and 10.
        detector: selects keys instead of `top_k` (pass ``top_k=None``); detectors of scores, or any detector with
            `source`. It sees the chosen layers with all their heads.
        scope: one set per "head", per "layer" (scores averaged over its heads), or for the "model" (averaged over the
            chosen layers too).
        pick: "strongest"; or as controls the same number of "random" or of the "weakest" keys.
        only: states ("prompt", "masked", "committed") or token kinds that may be masked.
        same_step: use the sinks of step t itself, from an unmasked pass before it; doubles the work, diffusion only.
        source: "itself", or another run of the same prompts, or its `sinks`: masks the sinks of that run at step t − 1
            (at step t with `same_step`), by its recorded column sums, and nothing at steps that it lacks for the run or
            for a row. A part of a track holds the steps listed in its ``step`` coordinate.
        seed: seed of random keys.
        queries: in an autoregressive run, whether the keys are masked for the "newest" token or for "all".
        positions: keys that may be masked.

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
    queries: str = "newest"

    def __post_init__(self) -> None:
        if self.queries not in get_args(Reach):
            raise SettingError(f"queries must be one of {', '.join(get_args(Reach))}; got {self.queries!r}.")
        _check_places(self, self.same_step)
        _ = self.selection, track_of(self.source)

    @property
    def selection(self) -> Selection:
        """How the keys are chosen."""
        return Selection(self.top_k, self.detector, self.pick, self.scope, as_tuple(self.only), self.seed)

    def keys(self, track: SinkTrack) -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that were masked in the diffusion run that `track` recorded with this intervention in its hooks.

        For a part of a track, those of the steps whose previous step is also in the part.

        Raises:
            SettingError: for random keys, kinds or states, a source or `same_step`, which a track does not determine.
        """
        if self.pick == "random" or self.only or track_of(self.source) is not None or self.same_step or track.causal:
            raise SettingError(
                "a track determines the masked keys only where they follow from its scores alone: not with random "
                "keys, only=, source= or same_step=, and not in an autoregressive run."
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
            by_layer = {layer: scores[:, layer] for layer in layers}
            chosen = self.selection.choose(by_layer, real, None, None, step, among=place_mask(self.positions, real))
            for layer, keys in chosen.items():
                found[:, steps.index(step), layer, heads] = keys.numpy()[:, heads]
        return track.data["score"].copy(data=found)

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """See `Intervention.hooks_for`."""
        every_query = self.queries == "all"
        chosen = PreviousSinks(self, model, run, self.selection, self.same_step, track_of(self.source), every_query)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = chosen.at(hook, value)
            if found is None or not found.any():
                return None
            return value.masked_fill(found.keys, -torch.inf)

        return chosen.pairs(forbid)


@dataclass(frozen=True, kw_only=True)
class KeepKeys(Intervention):
    """Keep only attention to the strongest keys of step t − 1 and to neighbours: can sinks stand in for the context?

    Query i sees key j if j is one of the kept keys, or |i − j| ≤ window. Everything else is as in `MaskSinks`; nothing
    is masked at step 0. A head whose pattern was all zero at step t − 1 has no strongest key and keeps only its
    neighbours.

    Attributes:
        top_k: number of keys kept per head.
        window: distance up to which every query sees its neighbours; 0 is the query itself.
        pick: "strongest"; or as controls "random" or "weakest" keys.
        scope, only, same_step, source, seed: as in `MaskSinks`.
        positions: keys that may be kept because of their score.
    """

    top_k: int | None = 8
    detector: "Detector | None" = None
    window: int = 0
    scope: Scope = "head"
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    same_step: bool = False
    source: "SinkTrack | Generation | Literal['itself']" = ITSELF
    seed: int = 0

    def __post_init__(self) -> None:
        _check_window(self.window)
        _check_places(self, self.same_step)
        _ = self.selection, track_of(self.source)

    @property
    def selection(self) -> Selection:
        """How the keys are chosen."""
        return Selection(self.top_k, self.detector, self.pick, self.scope, as_tuple(self.only), self.seed)

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
            return _without(value, seen, distance, chosen.heads, model, run)

        return [*distances.pairs(chosen.layers), *chosen.pairs(forbid)]


@dataclass(frozen=True, kw_only=True)
class WindowAttention(Intervention):
    """Query i sees only keys j with |i − j| ≤ width (and, in a causal model, none after it).

    Attributes:
        width: distance in positions, 0 or more.
        always: positions that every query also sees, e.g. the first four (StreamingLLM, 2309.17453); counted like
            `positions`, so without padding.
        positions: queries that are restricted.
    """

    width: int
    always: Sequence[int] = ()

    def __post_init__(self) -> None:
        refuse_empty(self)
        _check_window(self.width)

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """See `Intervention.hooks_for`."""
        layers, heads, touched = self.chosen_layers(model), self.chosen_heads(model), Queries(self, run)
        distances = Distances()
        always = None if run is None else place_mask(self.always, run.real)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            distance = distances.of(value)
            queries, keys = distance.shape
            rows = touched.of(hook.step, queries, value.device)
            if rows is None:
                return None
            free = place_mask(self.always, value.new_ones(1, keys).bool()) if always is None else always[:, :keys]
            seen = (distance.abs() <= self.width) | free[:, None].to(value.device) | ~rows[:, :, None]
            return _without(value, seen[:, None], distance, heads, model, run)

        return [*distances.pairs(layers), *((f"blocks.{layer}.attn.hook_attn_mask", forbid) for layer in layers)]


def _without(
    value: Tensor, seen: Tensor, distance: Tensor, heads: Sequence[int], model: "Model", run: RunContext | None
) -> Float[Tensor, "batch head query key"] | None:
    """The additive mask `value` with keys not `seen` by `heads` set to −∞; None if there are none."""
    restricted = torch.zeros(value.shape[1], dtype=torch.bool, device=value.device)
    restricted[list(heads)] = True
    hidden = restricted[:, None, None] & ~seen
    if bool(model.config.is_causal):  # later keys are hidden anyway, and so is padding
        hidden = hidden & (distance <= 0)
    if run is not None:
        hidden = hidden & run.real[:, None, None, : value.shape[-1]].to(value.device)
    return value.masked_fill(hidden, -torch.inf) if bool(hidden.any()) else None


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
