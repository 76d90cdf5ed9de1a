"""The keys selected by the scores of the previous step, for interventions that act on its sinks.

`PreviousSinks` collects the scores of every step during a run and, when the next step begins, chooses keys by them. In
a diffusion run the scores are the column sums of ``hook_sink_scores``. In an autoregressive run they are the last
token's attention, which is computed here from its query, all keys and the additive mask.

Limitation: in an autoregressive run, that last row ignores edits that later hooks make to ``hook_attn_mask``, to the
scores or to the pattern. List interventions on the mask before this one.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.normalizers import normalizer_of
from sinklens.hooks.points import Point
from sinklens.interventions.selection import Keys, Scores, Selection
from sinklens.runs.intervention import (
    Canvas,
    Intervention,
    Pairs,
    RunContext,
    Snapshot,
    layer_of,
    place_mask,
    row_key,
)
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model


class Chosen(NamedTuple):
    """The keys that a pass treats differently.

    Attributes:
        keys: [batch, head, query, key], or one row for all queries.
        rows: queries of each row of the batch that they apply to; the others are unchanged.
        some: whether there are any keys; None if not known yet.
    """

    keys: Bool[Tensor, "batch head query key"]
    rows: Bool[Tensor, "batch query"]
    some: bool | None = None

    def any(self) -> bool:
        """Whether there are any keys. On a GPU, a known answer avoids waiting for the device."""
        return bool(self.keys.any()) if self.some is None else self.some


class Evidence(NamedTuple):
    """The data by which keys are chosen.

    Attributes:
        scores: scores by layer; empty if there are none yet.
        canvas: the canvas that the scores belong to.
        track: the recorded step that the scores come from, if any.
        there: keys that have a score; None for all except padding.
    """

    scores: dict[int, Scores]
    canvas: Snapshot | None = None
    track: SinkTrack | None = None
    there: Bool[Tensor, "batch key"] | None = None


class PreviousSinks:
    """The keys chosen by the scores of the step before, in one run.

    Args:
        place: intervention that defines the steps, layers, heads and (key) positions.
        every_query: in an autoregressive run, apply the keys of step t to all queries of the pass of step t.

    Attributes:
        layers, heads: as non-negative indices.
        causal: whether the run is autoregressive.
    """

    def __init__(
        self,
        place: Intervention,
        model: "Model",
        run: RunContext | None,
        selection: Selection,
        same_step: bool,
        source: SinkTrack | None,
        every_query: bool = False,
    ) -> None:
        if run is None:
            raise SettingError(
                f"{type(place).__name__} acts on the sinks of an earlier step, which a single pass does not have; use "
                f"it in sinklens.trace or sinklens.generate."
            )
        self.layers, self.heads, self.causal = place.chosen_layers(model), place.chosen_heads(model), run.causal
        self._in_step, self._among = place.step_test(run), place_mask(place.positions, run.real)
        self._run, self._selection, self._same_step, self._source = run, selection, same_step, source
        self._every_query = every_query
        self._canvas = Canvas(run)
        self._now: dict[int, Scores] = {}
        self._starts: dict[int, int] = {}  # by layer: first text position that is a key, where a window hides others
        self._chosen: dict[int, dict[int, Keys]] = {}  # by step; in a diffusion run only the current step
        self._some: dict[int, bool] = {}  # by layer: whether the latest step has keys there
        self._scored_rows: dict[int, Bool[Tensor, " batch"]] = {}  # by step: rows that have scores
        self._prompts_checked = source is None
        self._scale = model.cfg.d_head**-0.5
        self._query: Tensor | None = None
        self._key: Tensor | None = None
        if same_step and source is None and run.causal:
            raise SettingError("same_step needs a second pass over the canvas; it is available in diffusion runs only.")
        if same_step and source is None and run.tree.architecture.encoder:
            raise SettingError(
                "same_step needs a second pass over the canvas, which lacks the self-conditioning of the step in a "
                "model with an encoder; use the sinks of the previous step."
            )
        if source is not None:
            self._check_source(source)

    def _check_source(self, source: SinkTrack) -> None:
        if source.causal != self._run.causal:
            kinds = ["autoregressive" if causal else "diffusion" for causal in (source.causal, self._run.causal)]
            raise SettingError(
                f"source is a run of another kind of model, {kinds[0]}, and this run is {kinds[1]}; record it with "
                f"this model."
            )
        rows, length = self._run.real.shape
        cfg = self._run.tree.cfg
        sizes = {"batch": rows, "pos": length, "layer": cfg.n_layers, "head": cfg.n_heads}
        for axis, size in sizes.items():
            if source.data.sizes[axis] != size:
                raise SettingError(
                    f"source has {source.data.sizes[axis]} along {axis}, this run {size}; record it with this model "
                    f"and these prompts."
                )

    def _check_prompts(self, source: SinkTrack, ids: Int[Tensor, "batch pos"]) -> None:
        """Check that each row has the source's prompt, either as given or as it is on the canvas."""
        length = self._run.prompt_length
        recorded = torch.from_numpy(source.data["token_id"].isel(step=0).to_numpy()[:, :length]).to(ids)
        real = torch.from_numpy(source.data["is_real"].to_numpy()[:, :length])
        either = (real | self._run.real[:, :length].cpu()).to(ids.device) & (recorded >= 0)  # a row may be missing here
        for row in ((recorded != ids[:, :length]) & either).any(dim=1).nonzero()[:, 0].tolist():
            if row_key(recorded[row].cpu()[real[row]].tolist()) != self._run.row_keys[row]:
                raise SettingError(
                    f"source was recorded with another prompt in row {row}; record it with the prompts of this run, in "
                    f"the same order."
                )

    def pairs(self, act: Callable[..., Any], point: str = "hook_attn_mask") -> Pairs:
        """All hooks: those that collect scores, and `act` on an attention point of every chosen layer.

        `at` takes a value of that point, which must have the axes batch, head, query and key.
        """
        watching = self._source is None and not self._same_step
        found: Pairs = [("denoise.hook_canvas", self._begin)]
        for layer in self.layers:
            at = f"blocks.{layer}.attn"
            if self.causal:
                found += [(f"{at}.hook_rot_q", self._keep_query), (f"{at}.hook_rot_k", self._keep_key)]
            found.append((f"{at}.{point}", act))
            if watching and self.causal:
                found.append((f"{at}.hook_attn_mask", self._last_row))
            elif watching:
                found.append((f"{at}.hook_sink_scores", self._keep_scores))
        return found

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        """Begin a step: the scores collected so far are those of the previous step."""
        self._canvas.hook(value, hook)
        if self._source is not None and not self._prompts_checked:
            self._check_prompts(self._source, value)
            self._prompts_checked = True
        step, seen, starts = int(hook.step or 0), self._now, self._starts
        self._now, self._starts = {}, {}
        if not self.causal:
            self._chosen.clear()
            self._scored_rows.clear()
        if not self._in_step(step):
            return
        scores, canvas, track, there = self._evidence(step, value, seen)
        if not scores:
            return
        if track is not None:
            starts = _first_keys(track, self.layers)
        keys = next(iter(scores.values())).shape[-1]
        canvas = None if canvas is None else Snapshot(canvas.ids[:, :keys], canvas.undecided[:, :keys])
        real, among = self._run.real[:, :keys], self._among[:, :keys]
        among = among if there is None else among & there
        found: dict[int, Keys] = {}
        for start, layers in _by_start(scores, starts).items():
            self._refuse_unequal(len(layers) < len(scores))
            reach = torch.arange(keys, device=real.device) >= start
            found |= self._selection.choose(
                layers, real & reach, self._run, canvas, step, among=among & reach, track=track
            )
        found = {layer: found[layer] for layer in scores}
        self._scored_rows[step] = (real if there is None else there).any(dim=1)
        self._chosen[step] = {layer: self._heads_only(mask) for layer, mask in found.items()}
        some = torch.stack([mask.any() for mask in self._chosen[step].values()]).tolist()
        self._some = dict(zip(self._chosen[step], some, strict=True))

    def _refuse_unequal(self, unequal: bool) -> None:
        if unequal and self._selection.scope == "model":
            raise SettingError(
                "scope='model' pools the scores of all layers, but layers with a sliding window have different keys; "
                "use scope='layer' or 'head'."
            )

    def _evidence(self, step: int, ids: Tensor, seen: dict[int, Scores]) -> Evidence:
        if self._source is not None:
            place = place_of(self._source, step if self._same_step else step - 1)
            return Evidence({}) if place is None else self._recorded(self._source, place, ids.device)
        if self._same_step:
            names = [f"blocks.{layer}.attn.hook_sink_scores" for layer in self.layers]
            peeked = self._run.tree.peek(ids, self._run.real, names)
            here = {layer: peeked[name].to(ids.device) for layer, name in zip(self.layers, names, strict=True)}
            return Evidence(here, self._canvas.now)
        return Evidence(seen, self._canvas.before)

    def _recorded(self, source: SinkTrack, place: int, device: torch.device) -> Evidence:
        """The data recorded at one index of the step axis; rows that had ended by then have no score there."""
        track = source.isel(step=place, layer=self.layers)
        token, score = track.data["token_id"].to_numpy()[:, 0], torch.from_numpy(track.scores().to_numpy()[:, 0])
        there = ~score.isnan().all(dim=2).all(dim=1)
        if not bool(there.any()):
            return Evidence({})
        length = int(there.any(dim=0).nonzero().max()) + 1  # how many an autoregressive run has decoded
        score, there = score[..., :length].nan_to_num(0.0).to(device), there[:, :length].to(device)
        undecided = torch.from_numpy(track.data["masked"].to_numpy()[:, 0, :length]).to(device)
        canvas = Snapshot(torch.from_numpy(token[:, :length]).to(device), undecided)
        return Evidence({layer: score[:, at] for at, layer in enumerate(self.layers)}, canvas, track, there)

    def _heads_only(self, mask: Keys) -> Keys:
        if len(self.heads) == mask.shape[1]:
            return mask
        kept = torch.zeros_like(mask)
        kept[:, self.heads] = mask[:, self.heads]
        return kept

    def at(self, hook: Point, value: Tensor) -> Chosen | None:
        """The chosen keys of this layer and pass, with the additive mask `value`; None if there is nothing to do."""
        layer, step = layer_of(hook), int(hook.step or 0)
        if self.causal:
            return self._rows(layer, step, value)
        if step not in self._chosen:
            return None
        keys = self._chosen[step][layer]
        if self._run.tree.watch.length is not None:
            place = hook.key_positions
            missing = max(0, place.stop - keys.shape[-1])  # positions that are new
            keys = torch.nn.functional.pad(keys, (0, missing))[..., place.start : place.stop]
        elif keys.shape[-1] != value.shape[-1]:  # with a cache, passes have unequal numbers of keys
            keys = torch.nn.functional.pad(keys, (0, value.shape[-1] - keys.shape[-1]))
        rows = self._scored_rows[step][:, None].to(value.device)
        return Chosen(keys[:, :, None].to(value.device), rows, self._some[layer])

    def _rows(self, layer: int, step: int, value: Tensor) -> Chosen | None:
        """In a causal pass, each token keeps the masked keys of the step that decoded it, even when recomputed."""
        assert self._query is not None
        queries = self._query.shape[1]
        if self._every_query:
            return self._all_rows(layer, step, queries, value)
        found = torch.zeros(*value.shape[:2], queries, value.shape[-1], dtype=torch.bool, device=value.device)
        rows = torch.zeros(len(value), queries, dtype=torch.bool, device=value.device)
        for part in self._run.query_spans(step, queries):
            if part.step in self._chosen:
                keys = self._chosen[part.step][layer]
                found[:, :, part.stop - 1, : keys.shape[-1]] = (
                    keys  # in the prompt, only the last token decodes a token
                )
                rows[:, part.stop - 1] = self._scored_rows[part.step]
        return Chosen(found, rows) if bool(rows.any()) else None

    def _all_rows(self, layer: int, step: int, queries: int, value: Tensor) -> Chosen | None:
        """In a complete causal pass, the keys of its newest token apply to all tokens."""
        if queries < value.shape[-1]:
            raise SettingError(
                "queries='all' changes what earlier tokens computed, which a key/value cache has already stored; run "
                "with use_cache=False."
            )
        if step not in self._chosen:
            return None
        keys = self._chosen[step][layer]
        found = torch.zeros(*value.shape[:2], 1, value.shape[-1], dtype=torch.bool, device=value.device)
        found[..., : keys.shape[-1]] = keys[:, :, None]
        return Chosen(found, self._scored_rows[step][:, None].to(value.device))

    def _keep_scores(self, value: Scores, hook: Point) -> None:
        if self._run.tree.watch.length is not None:
            start = self._starts[layer_of(hook)] = hook.key_positions.start
            value = torch.nn.functional.pad(value, (start, 0))
        self._now[layer_of(hook)] = value.to(
            self._run.real.device
        )  # keys are chosen there; layers may be on other devices

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
        real = self._run.real[:, : scores.shape[-1]].to(scores.device)
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        counts = real.sum(dim=1)[:, None, None]  # uniform attention is 1, as in column sums
        weights = normalizer_of(self._run.tree.hf)(scores[:, :, None], counts[..., None])[:, :, 0]
        self._now[layer_of(hook)] = (weights * counts).to(self._run.real.device)


def _by_start(scores: dict[int, Scores], starts: dict[int, int]) -> dict[int, dict[int, Scores]]:
    """The layers whose keys begin at the same text position."""
    grouped: dict[int, dict[int, Scores]] = {}
    for layer, values in scores.items():
        grouped.setdefault(starts.get(layer, 0), {})[layer] = values
    return grouped


def _first_keys(track: SinkTrack, layers: Sequence[int]) -> dict[int, int]:
    """The first position of each layer that has a score in the one step of `track`."""
    known = track.data["score"].notnull().any(("batch", "step", "head")).to_numpy()
    return {layer: int(row.argmax()) for layer, row in zip(layers, known, strict=True)}


def place_of(track: SinkTrack, step: int) -> int | None:
    """Index of a run's step on the step axis of `track`, which may hold only some steps; None if it is missing."""
    places = (track.data["step"].to_numpy() == step).nonzero()[0]
    return int(places[0]) if len(places) else None


def planned_steps(track: SinkTrack) -> int:
    """Number of steps planned for the run of `track`, the base of negative indices; if unknown, the recorded number."""
    planned = json.loads(track.data.attrs.get("settings", "{}")).get("steps")
    return int(track.data["step"].to_numpy().max()) + 1 if planned is None else int(planned)
