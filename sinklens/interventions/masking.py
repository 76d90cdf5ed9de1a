"""Interventions that forbid attention to some keys. All act on ``hook_attn_mask`` and stay on fused attention.

*Sinks of the previous step.* `MaskSinks` and `KeepKeys` act at step t on the sinks of step t − 1, as the paper does
(Rulli et al., 2510.15731, Sec. 4.3); nothing is done at step 0. In a diffusion run the scores of step t − 1 are its
column sums; in an autoregressive run they are the attention of its last token (times the number of keys, so that
uniform attention is 1 here too), and the keys are forbidden to the token decoded at step t alone, with a key/value
cache or without. With ``queries="all"`` they are forbidden to every token of the pass of step t, which then has to
compute all of them again (``use_cache=False``): what earlier tokens say to the newest changes as well.

One way this surprises: a key that was masked at step t − 1 received nothing there, so it is no sink, and at step t
others are masked in its place. With ``source=`` a run without masking, the sets are those of the unmasked model. A
head whose pattern was all zero at step t − 1 has no strongest key, and nothing is masked for it.
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
        SettingError: it recorded none, or is no run.
    """
    if isinstance(source, str) and source == ITSELF:
        return None
    found = source if isinstance(source, SinkTrack) else getattr(source, "sinks", None)
    if not isinstance(found, SinkTrack):
        raise SettingError(
            f"source is another run or its sinks; got {source!r}. If a run has none, it was made with "
            f"record_sinks=False; make it again without that."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class MaskSinks(Intervention):
    """At step t, no attention to the sinks of step t − 1 (Rulli et al., 2510.15731, Sec. 4.3).

    The additive mask of the chosen keys is −∞, so what a softmax leaves of each query's attention still sums to 1; a
    query with no key left has an all-zero row. A detector that finds nothing leaves the run as it was, bit for bit.

    Attributes:
        top_k: the strongest keys of each head; the paper masks 1, 5 and 10.
        detector: decides instead of `top_k` (give ``top_k=None``); detectors of scores, or any with `source`. It sees
            the chosen layers, with all their heads.
        scope: a set per "head", per "layer" (scores averaged over its heads), or for the "model" (over the chosen
            layers too).
        pick: "strongest"; or as controls the same number of "random" or of the "weakest" keys.
        only: states ("prompt", "masked", "committed") or token kinds that may be masked.
        same_step: the sinks of step t itself, from an unmasked pass before it; twice the work, diffusion only.
        source: "itself", or another run of the same prompts, or its `sinks`: what that run had as sinks at step t − 1
            (at step t with `same_step`) is masked, by the column sums it recorded, and nothing in steps that it lacks,
            or that one row of it lacks. A part of a track holds the steps that its ``step`` coordinate names.
        seed: of random keys.
        queries: in an autoregressive run, whether the keys are forbidden to the "newest" token or to "all".
        positions: keys that may be masked.

    Raises:
        SettingError: settings that exclude each other; `top_k` above the number of positions when a run gets there; a
            source of other prompts or another model.
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
            raise SettingError(f"queries is one of {', '.join(get_args(Reach))}; got {self.queries!r}.")
        _check_places(self, self.same_step)
        _ = self.selection, track_of(self.source)

    @property
    def selection(self) -> Selection:
        """How keys are chosen."""
        return Selection(self.top_k, self.detector, self.pick, self.scope, as_tuple(self.only), self.seed)

    def keys(self, track: SinkTrack) -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that were masked in the diffusion run that `track` recorded with this intervention in its hooks.

        Of a part of a track, those of the steps whose step before is in it too.

        Raises:
            SettingError: for random keys, kinds or states, a source or `same_step`, which a track alone does not tell.
        """
        if self.pick == "random" or self.only or track_of(self.source) is not None or self.same_step or track.causal:
            raise SettingError("the keys can be told from a track where they follow from the scores alone.")
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
        every = self.queries == "all"
        chosen = PreviousSinks(self, model, run, self.selection, self.same_step, track_of(self.source), every)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = chosen.at(hook, value)
            if found is None or not found.any():
                return None
            return value.masked_fill(found.keys, -torch.inf)

        return chosen.pairs(forbid)


@dataclass(frozen=True, kw_only=True)
class KeepKeys(Intervention):
    """Attention to the strongest keys of step t − 1 and to the neighbours alone: can a context be compressed to sinks?

    Query i sees key j if j is among the kept keys, or |i − j| ≤ window. Everything else is as in `MaskSinks`; nothing
    is forbidden at step 0. A head whose pattern was all zero at step t − 1 has no strongest key and keeps its
    neighbours.

    Attributes:
        top_k: keys kept per head.
        window: distance of the neighbours that every query sees; 0 is the query itself.
        pick: "strongest"; or as controls "random" or "weakest" keys.
        scope, only, same_step, source, seed: as in `MaskSinks`.
        positions: keys that may be kept for their score.
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
        """How keys are chosen."""
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
    """Query i sees keys j with |i − j| ≤ width alone (and, of a causal model, none after it).

    Attributes:
        width: distance in positions, 0 or more.
        always: positions that every query sees as well, e.g. the first four (StreamingLLM, 2309.17453); counted as
            `positions` are, so padding is none of them.
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
    """The additive mask `value` with what is not `seen` by `heads` forbidden; None if that is nothing."""
    of = torch.zeros(value.shape[1], dtype=torch.bool, device=value.device)
    of[list(heads)] = True
    hidden = of[:, None, None] & ~seen
    if bool(model.config.is_causal):  # later keys are hidden anyway, and so is padding
        hidden = hidden & (distance <= 0)
    if run is not None:
        hidden = hidden & run.real[:, None, None, : value.shape[-1]].to(value.device)
    return value.masked_fill(hidden, -torch.inf) if bool(hidden.any()) else None


def _check_window(width: object) -> None:
    if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 0:
        raise SettingError(f"a window is a whole number of positions, 0 or more; got {width!r}.")


def _check_places(what: Intervention, same_step: bool) -> None:
    """Refuse restrictions that leave nothing to do."""
    refuse_empty(what)
    if what.steps is not None and not same_step and set(whole_numbers("step", what.steps)) == {0}:
        raise SettingError(
            f"{type(what).__name__} acts on the sinks of the step before, so at step 0 alone it changes nothing. Name "
            f"a later step, or give same_step=True."
        )
