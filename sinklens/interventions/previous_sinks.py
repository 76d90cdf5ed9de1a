"""The keys selected by the scores of the previous step, for interventions that act on its sinks.

`PreviousSinks` is a finder (finders.py): it collects the scores of every step during a run and, when the next step
begins, chooses keys by them. In a diffusion run the scores are the column sums of ``hook_sink_scores``. In an
autoregressive run they are the last token's attention, which is computed here from its query, all keys and the additive
mask.

Limitation: in an autoregressive run, that last row ignores edits that later hooks make to ``hook_attn_mask``, to the
scores or to the pattern. List interventions on the mask before this one.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.normalizers import normalizer_of
from sinklens.hooks.points import Point
from sinklens.interventions.choice import KeyChoice
from sinklens.interventions.controls import Keys, Scores
from sinklens.interventions.selection import Selection
from sinklens.runs.intervention import Canvas, Pairs, RunContext, Snapshot, layer_of, row_key
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model


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
        choice: how keys are chosen, and by the scores of which run and step.
        name: the intervention's, for errors.
        layers: those that are changed, from 0; the rule sees these layers with all their heads.
        in_step: whether keys are needed at a step.
        among: keys that may be chosen.
        heads: those whose keys count; None for all.

    Attributes:
        by_layer: always True; keys differ between layers.
        past: whether the keys of a step lie before all queries that it computes, as in an autoregressive run those of
            the step before do.
    """

    by_layer = True

    def __init__(
        self,
        choice: KeyChoice,
        name: str,
        model: "Model",
        run: RunContext | None,
        layers: Sequence[int],
        in_step: Callable[[int | None], bool],
        among: Bool[Tensor, "batch pos"] | None,
        heads: Sequence[int] | None = None,
    ) -> None:
        if run is None or among is None:
            raise SettingError(
                f"{name} acts on the sinks of an earlier step, which a single pass does not have; use it in "
                f"sinklens.trace or sinklens.generate."
            )
        self.layers, self.causal = list(layers), run.causal
        self._in_step, self._among = in_step, among
        self._run, self._same_step, self._source = run, choice.same_step, choice.track
        self.past = self.causal and not (self._same_step and self._source is not None)
        self._selection, self._heads = Selection.of(choice), heads
        self._counted = self._selection.count_in(run, name)
        self._canvas = Canvas(run)
        self._now: dict[int, Scores] = {}
        self._starts: dict[int, int] = {}  # by layer: first text position that is a key, where a window hides others
        self._chosen: dict[int, dict[int, Keys]] = {}  # by step; in a diffusion run only the current step
        self._some: dict[int, bool] = {}  # by layer: whether the latest step has keys there
        self._scored_rows: dict[int, Bool[Tensor, " batch"]] = {}  # by step: rows that have scores
        self._prompts_checked = self._source is None
        self._scale = model.cfg.d_head**-0.5
        self._query: Tensor | None = None
        self._key: Tensor | None = None
        if self._source is not None:
            self._check_source(self._source)
        elif self._same_step:
            self._check_second_pass()

    def _check_second_pass(self) -> None:
        if self._run.causal:
            raise SettingError("same_step needs a second pass over the canvas; it is available in diffusion runs only.")
        if self._run.tree.architecture.encoder:
            raise SettingError(
                "same_step needs a second pass over the canvas, which lacks the self-conditioning of the step in a "
                "model with an encoder; use the sinks of the previous step."
            )

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

    def first(self) -> Pairs:
        """Hooks that choose keys when a step begins, to be listed before those that use them."""
        found: Pairs = [("denoise.hook_canvas", self._begin)]
        for layer in self.layers if self.causal else ():
            at = f"blocks.{layer}.attn"
            found += [(f"{at}.hook_rot_q", self._keep_query), (f"{at}.hook_rot_k", self._keep_key)]
        return found

    def last(self) -> Pairs:
        """Hooks that keep the scores of a step, which see the attention as it was used."""
        if self._source is not None or self._same_step:
            return []
        point, keep = ("hook_attn_mask", self._last_row) if self.causal else ("hook_sink_scores", self._keep_scores)
        return [(f"blocks.{layer}.attn.{point}", keep) for layer in self.layers]

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
        canvas = None if canvas is None else canvas.first(keys)
        real, among = self._run.real[:, :keys], self._among[:, :keys]
        among = among if there is None else among & there
        found: dict[int, Keys] = {}
        for start, layers in _by_start(scores, starts).items():
            self._refuse_unequal(len(layers) < len(scores))
            reach = torch.arange(keys, device=real.device) >= start
            found |= self._selection.choose(
                layers, real & reach, self._run, canvas, step, among=among & reach, track=track,
                counted=self._counted, heads=self._heads,
            )  # fmt: skip
        found = {layer: found[layer] for layer in scores}
        self._scored_rows[step] = (real if there is None else there).any(dim=1)
        self._chosen[step] = found
        some = torch.stack([mask.any() for mask in found.values()]).tolist()
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

    def at(self, step: int, layer: int | None) -> Keys | None:
        """The keys chosen in a layer for a step, over the text that has scores; None if there are none yet."""
        assert layer is not None, "Places.refuse_by_layer was not called"
        return self._chosen[step][layer] if step in self._chosen else None

    def rows(self, step: int) -> Bool[Tensor, " batch"]:
        """Rows that have scores for a step."""
        return self._scored_rows[step]

    def some(self, layer: int) -> bool | None:
        """Whether any key was chosen in a layer of the current step; None if not known."""
        return None if self.causal else self._some[layer]

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
