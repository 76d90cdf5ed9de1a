"""Interventions that forbid attention to some keys. All act on ``hook_attn_mask`` and stay on fused attention.

*Sinks of the previous step.* `MaskSinks` and `KeepKeys` act at step t on the sinks of step t − 1, as the paper does
(Rulli et al., 2510.15731, Sec. 4.3); nothing is done at step 0. In a diffusion run the scores of step t − 1 are its
column sums; in an autoregressive run they are the attention of its last token (times the number of keys, so that
uniform attention is 1 here too), and the keys are forbidden to the token decoded at step t alone, with a key/value
cache or without.

One way this surprises: a key that was masked at step t − 1 received nothing there, so it is no sink, and at step t
others are masked in its place. With ``source=`` a run without masking, the sets are those of the unmasked model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.base import (
    Canvas,
    Intervention,
    Pairs,
    Surroundings,
    layer_of,
    position_mask,
    within,
)
from sinklens.interventions.selection import Keys, Pick, Scope, Scores, Selection, as_tuple
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.sinks.detectors import Detector


@dataclass(frozen=True, kw_only=True)
class MaskSinks(Intervention):
    """At step t, no attention to the sinks of step t − 1 (Rulli et al., 2510.15731, Sec. 4.3).

    The additive mask of the chosen keys is −∞, so the remaining attention of each query still sums to 1; a query with
    no key left attends to nothing. A detector that finds nothing leaves the run as it was, bit for bit.

    Attributes:
        top_k: the strongest keys of each head; the paper masks 1, 5 and 10.
        detector: decides instead of `top_k` (give ``top_k=None``); detectors of scores, or any with `source`.
        scope: a set per "head", per "layer" (scores averaged over its heads), or for the "model" (over the chosen
            layers too).
        pick: "strongest"; or as controls the same number of "random" or of the "weakest" keys.
        only: states ("prompt", "masked", "committed") or token kinds that may be masked.
        same_step: the sinks of step t itself, from an unmasked pass before it; twice the work, diffusion only.
        source: a recorded run of the same prompts; its sinks of step t − 1 (of step t with `same_step`) are masked.
        seed: of random keys.
        positions: keys that may be masked.

    Raises:
        SettingError: settings that exclude each other; `top_k` above the number of positions when a run gets there.
    """

    top_k: int | None = 1
    detector: "Detector | None" = None
    scope: Scope = "head"
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    same_step: bool = False
    source: SinkTrack | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.selection

    @property
    def selection(self) -> Selection:
        """How keys are chosen."""
        return Selection(self.top_k, self.detector, self.pick, self.scope, as_tuple(self.only), self.seed)

    def keys(self, track: SinkTrack) -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys that were masked in the diffusion run that `track` recorded with this intervention in its hooks.

        Raises:
            SettingError: for random keys, kinds or states, a source or `same_step`, which a track alone does not tell.
        """
        if self.pick == "random" or self.only or self.source is not None or self.same_step or track.causal:
            raise SettingError("the keys can be told from a track where they follow from the scores alone.")
        real = torch.from_numpy(track.data["real"].to_numpy())
        found = np.zeros(track.data["score"].shape, dtype=bool)
        layers = within("layer", self.layers, found.shape[2])
        heads = within("head", self.heads, found.shape[3])
        for step in within("step", self.steps, track.steps):
            if step == 0:
                continue
            scores = torch.from_numpy(track.isel(step=step - 1).scores().fillna(0.0).to_numpy()[:, 0])
            allowed = real & position_mask(self.positions, real.shape[1], real.device)
            chosen = self.selection.choose({layer: scores[:, layer] for layer in layers}, allowed, None, None, step)
            for layer, keys in chosen.items():
                found[:, step, layer, heads] = keys.numpy()[:, heads]
        return track.data["score"].copy(data=found)

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        chosen = PreviousSinks(self, model, run, self.selection, self.same_step, self.source)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = chosen.at(hook, value)
            if found is None or not bool(found.keys.any()):
                return None
            return value.masked_fill(found.keys, -torch.inf)

        return chosen.pairs(forbid)


@dataclass(frozen=True, kw_only=True)
class KeepKeys(Intervention):
    """Attention to the strongest keys of step t − 1 and to the neighbours alone: can a context be compressed to sinks?

    Query i sees key j if j is among the kept keys, or |i − j| ≤ window. Everything else is as in `MaskSinks`; nothing
    is forbidden at step 0.

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
    source: SinkTrack | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_window(self.window)
        _ = self.selection

    @property
    def selection(self) -> Selection:
        """How keys are chosen."""
        return Selection(self.top_k, self.detector, self.pick, self.scope, as_tuple(self.only), self.seed)

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        chosen = PreviousSinks(self, model, run, self.selection, self.same_step, self.source)
        places = Places(model, run)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            found = chosen.at(hook, value)
            if found is None:
                return None
            near = places.distance(value.shape[-1]).abs() <= self.window
            others = torch.ones(value.shape[1], dtype=torch.bool, device=value.device)
            others[chosen.heads] = False
            seen = found.keys | near | others[:, None, None] | ~found.rows[:, None]
            return value.masked_fill(~seen, -torch.inf)

        return [*places.pairs(chosen.layers), *chosen.pairs(forbid)]


@dataclass(frozen=True, kw_only=True)
class WindowAttention(Intervention):
    """Query i sees keys j with |i − j| ≤ width alone (and, of a causal model, none after it).

    Attributes:
        width: distance in positions, 0 or more.
        always: positions that every query sees as well, e.g. the first four (StreamingLLM, 2309.17453).
        positions: queries that are restricted.
    """

    width: int
    always: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check_window(self.width)

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        layers, heads, in_step = self.chosen_layers(model), self.chosen_heads(model), self.step_test(run)
        places = Places(model, run)

        def forbid(value: Tensor, hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            keys = value.shape[-1]
            distance = places.distance(keys)
            seen = (distance.abs() <= self.width) | position_mask(self.always, keys, value.device)
            rows = position_mask(self.positions, keys, value.device)[keys - len(distance) :]
            free = torch.ones(value.shape[1], dtype=torch.bool, device=value.device)
            free[heads] = False
            return value.masked_fill(~(seen | ~rows[:, None] | free[:, None, None]), -torch.inf)

        return [*places.pairs(layers), *((f"blocks.{layer}.attn.hook_attn_mask", forbid) for layer in layers)]


class Places:
    """How many queries a pass has: an additive mask of one row for all queries does not tell."""

    def __init__(self, model: "Model", run: Surroundings | None) -> None:
        self._queries = 0
        self._device = model.cfg.device

    def pairs(self, layers: Sequence[int]) -> Pairs:
        """The hooks that count; they belong before those that ask."""
        return [(f"blocks.{layer}.attn.hook_rot_q", self._count) for layer in layers]

    def _count(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._queries, self._device = value.shape[1], value.device

    def distance(self, keys: int) -> Int[Tensor, "query key"]:
        """Key position minus query position; queries are the last ones."""
        queries = torch.arange(keys - self._queries, keys, device=self._device)
        return torch.arange(keys, device=self._device)[None, :] - queries[:, None]


class Chosen(NamedTuple):
    """Keys that a pass treats apart.

    Attributes:
        keys: [batch, head, query, key], or one row for all queries.
        rows: queries that they hold for; the others are left alone.
    """

    keys: Bool[Tensor, "batch head query key"]
    rows: Bool[Tensor, " query"]


class PreviousSinks:
    """The keys chosen by the scores of the step before, in one run.

    Args:
        place: whose steps, layers, heads and positions hold.
    """

    def __init__(
        self,
        place: Intervention,
        model: "Model",
        run: Surroundings | None,
        selection: Selection,
        same_step: bool,
        source: SinkTrack | None,
    ) -> None:
        if run is None:
            raise SettingError(
                f"{type(place).__name__} acts on the sinks of an earlier step, and a single pass has none; use it in "
                f"sinklens.trace or sinklens.generate."
            )
        self.layers, self.heads = place.chosen_layers(model), place.chosen_heads(model)
        self._in_step, self._positions = place.step_test(run), place.positions
        self._run, self._selection, self._same_step, self._source = run, selection, same_step, source
        self._canvas = Canvas()
        self._now: dict[int, Scores] = {}
        self._chosen: tuple[int, dict[int, Keys]] | None = None
        self._scale = model.cfg.d_head**-0.5
        self._query: Tensor | None = None
        self._key: Tensor | None = None
        self._history: dict[int, dict[int, Keys]] = {}
        if same_step and source is None and run.causal:
            raise SettingError("same_step needs a second pass over the canvas, which autoregressive runs do not make.")
        if source is not None:
            self._check_source(source)

    def _check_source(self, source: SinkTrack) -> None:
        rows, length = self._run.real.shape
        sizes = source.data.sizes
        cfg = self._run.tree.cfg
        here = {"batch": rows, "pos": length, "layer": cfg.n_layers, "head": cfg.n_heads}
        for axis, size in here.items():
            if sizes[axis] != size:
                raise SettingError(
                    f"source holds {sizes[axis]} along {axis}, this run {size}; record it with this model and prompts."
                )

    def pairs(self, forbid: Any) -> Pairs:
        """All hooks: what is watched, and `forbid` on every chosen layer's mask."""
        found: Pairs = [("denoise.hook_canvas", self._begin)]
        for layer in self.layers:
            at = f"blocks.{layer}.attn"
            if self._run.causal and self._source is None:
                found += [(f"{at}.hook_rot_q", self._keep_query), (f"{at}.hook_rot_k", self._keep_key)]
            found.append((f"{at}.hook_attn_mask", forbid))
            if self._source is None and not self._same_step:
                found.append((f"{at}.hook_attn_mask", self._last_row) if self._run.causal
                             else (f"{at}.hook_sink_scores", self._keep_scores))  # fmt: skip
        return found

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        """A step begins: what was collected are the scores of the step before."""
        self._canvas.hook(value, hook)
        step = int(hook.step or 0)
        scores, canvas = self._scores_for(step, value)
        self._now = {}
        self._chosen = None
        if not scores or not self._in_step(step):
            return
        keys = next(iter(scores.values())).shape[-1]
        allowed = self._run.real[:, :keys] & position_mask(self._positions, keys, value.device)
        found = self._selection.choose(scores, allowed, self._run, canvas, step)
        kept = {layer: self._heads_only(mask) for layer, mask in found.items()}
        self._chosen = step, kept
        self._history[step] = kept

    def _scores_for(self, step: int, ids: Tensor) -> tuple[dict[int, Scores], Tensor | None]:
        if self._source is not None:
            at = step if self._same_step else step - 1
            if not 0 <= at < self._source.steps:
                return {}, None
            score = self._source.isel(step=at).scores().to_numpy()[:, 0]
            token = self._source.data["token_id"].isel(step=at).to_numpy()
            exists = int((token >= 0).any(axis=0).sum()) if self._run.causal else token.shape[1]
            found = torch.from_numpy(score[..., :exists]).nan_to_num(0.0).to(ids.device)
            return {layer: found[:, layer] for layer in self.layers}, torch.from_numpy(token[:, :exists]).to(ids.device)
        if self._same_step:
            names = [f"blocks.{layer}.attn.hook_sink_scores" for layer in self.layers]
            seen = self._run.tree.look(ids, self._run.real, names)
            return {layer: seen[name] for layer, name in zip(self.layers, names, strict=True)}, ids
        return self._now, self._canvas.before

    def _heads_only(self, mask: Keys) -> Keys:
        if len(self.heads) == mask.shape[1]:
            return mask
        kept = torch.zeros_like(mask)
        kept[:, self.heads] = mask[:, self.heads]
        return kept

    def at(self, hook: Point, value: Tensor) -> "Chosen | None":
        """The chosen keys of this layer and step; None if nothing is to be done in this pass."""
        layer = layer_of(hook)
        queries = 1 if self._query is None else self._query.shape[1]
        if self._run.causal and queries > 1:
            return self._rows(layer, queries, value)
        if self._chosen is None:
            return None
        keys = self._chosen[1][layer]
        rows = torch.ones(1, dtype=torch.bool, device=value.device)
        return Chosen(torch.nn.functional.pad(keys, (0, value.shape[-1] - keys.shape[-1]))[:, :, None], rows)

    def _rows(self, layer: int, queries: int, value: Tensor) -> "Chosen | None":
        """In a causal pass over several tokens, each is forbidden what it was when it was decoded."""
        keys = value.shape[-1]
        found = torch.zeros(*value.shape[:2], queries, keys, dtype=torch.bool, device=value.device)
        rows = torch.zeros(queries, dtype=torch.bool, device=value.device)
        for step, chosen in self._history.items():
            row = self._run.prompt_length - 1 + step - (keys - queries)
            if 0 <= row < queries:
                found[:, :, row, : chosen[layer].shape[-1]] = chosen[layer]
                rows[row] = True
        return Chosen(found, rows) if bool(rows.any()) else None

    def _keep_scores(self, value: Scores, hook: Point) -> None:
        self._now[layer_of(hook)] = value

    def _keep_query(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._query = value

    def _keep_key(self, value: Float[Tensor, "batch key kv_head d_head"], hook: Point) -> None:
        self._key = value

    def _last_row(self, value: Float[Tensor, "batch head query key"], hook: Point) -> None:
        """The attention of the last token, from its query, all keys and the mask as it was used."""
        assert self._query is not None
        assert self._key is not None
        query, key = self._query[:, -1].float(), self._key.float()
        key = key.repeat_interleave(query.shape[1] // key.shape[2], dim=2)
        scores = torch.einsum("bhd,bkhd->bhk", query, key) * self._scale + value[:, :, -1].float()
        scores = scores.masked_fill(~self._run.real[:, None, : scores.shape[-1]], -torch.inf)
        counts = self._run.real[:, : scores.shape[-1]].sum(dim=1)[:, None, None]  # uniform attention is 1, as in sums
        self._now[layer_of(hook)] = scores.softmax(dim=-1).nan_to_num(0.0) * counts


def _check_window(width: int) -> None:
    if width < 0:
        raise SettingError(f"a window is 0 positions wide or more; got {width}.")
