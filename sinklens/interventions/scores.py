"""What rules choose places by: the scores of the step before, or of another run, and the kinds of tokens.

In a diffusion run they are the column sums of ``hook_sink_scores``. In an autoregressive run they are the last token's
attention, which is computed here from its query, all keys and the additive mask.

Limitation: in an autoregressive run, that last row ignores edits that later hooks make to ``hook_attn_mask``, to the
scores or to the pattern. List interventions on the mask before this one.
"""

import json
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, TrackError, require
from sinklens.hooks.attention.normalizers import normalizer_of
from sinklens.hooks.forward_pass import ForwardPass
from sinklens.hooks.points import Point
from sinklens.interventions.controls import KeyScores
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, RunContext, Snapshot, layer_of, row_key
from sinklens.sinks.detectors import Detector
from sinklens.sinks.kinds import PlaceState, kind_codes, kinds_of_tokens, state_codes
from sinklens.sinks.strongest import in_only, needs_text
from sinklens.sinks.track import SinkTrack, build_track


class ScoredStep(NamedTuple):
    """The scores of a step, by which keys are chosen.

    Attributes:
        scores: by layer; empty if there are none.
        canvas: the canvas that they belong to.
        starts: by layer, the first text position with a score, where a window hides those before it.
        track: the recorded step that they come from, if any.
        there: keys that have a score; None for all except padding.
    """

    scores: dict[int, KeyScores]
    canvas: Snapshot | None = None
    starts: dict[int, int] = {}  # noqa: RUF012
    track: SinkTrack | None = None
    there: Bool[Tensor, "batch key"] | None = None


class StepScores:
    """The scores of some layers. A row that waits for others keeps those of the last step that worked on it.

    Attributes:
        now: by layer, the scores of the step that ran last, on the device where keys are chosen.
    """

    def __init__(self, model: "Model", run: RunContext, layers: Iterable[int]) -> None:
        self._run, self._layers, self._scale = run, sorted(layers), model.cfg.d_head**-0.5
        self._points = [model.tree.blocks[layer].attn.hook_sink_scores for layer in self._layers]
        if run.sums is not None and not run.causal:
            run.sums.layers |= set(self._layers)
        self.now: dict[int, KeyScores] = {}
        self._parts: dict[str, Tensor] = {}

    def begin(self, canvas: Snapshot | None) -> ScoredStep:
        """Begin a step; returns the scores of the step before, whose canvas was `canvas`."""
        sums = self._run.sums
        if sums is not None and not self._run.causal:
            layers = zip(self._layers, self._points, strict=True)
            found = {layer: sums.latest[point] for layer, point in layers if point in sums.latest}
            self.now = {layer: self._complete(self.now.get(layer), *one) for layer, one in found.items()}
            starts = {layer: start for layer, one in found.items() if (start := one.forward_pass.keys.start)}
            return ScoredStep(self.now, canvas, starts)
        before, self.now = self.now, {}
        return ScoredStep(before, canvas)

    def first(self) -> Pairs:
        """Hooks to list before those that use the scores."""
        layers = self._layers if self._run.causal else ()
        return [(f"blocks.{layer}.attn.hook_rot_{part}", self._keep_part) for layer in layers for part in "qk"]

    def last(self) -> Pairs:
        """Hooks to list after them, which see the attention as it was used."""
        return [(f"blocks.{layer}.attn.hook_attn_mask", self._last_row) for layer in self._layers if self._run.causal]

    def _complete(
        self, before: Float[Tensor, "batch head _"] | None, value: Float[Tensor, "_ head _"], described: ForwardPass
    ) -> Float[Tensor, "batch head key"]:
        """Scores of a layer over the text from its first column, on the device where keys are chosen."""
        value, start = value[self._run.rows], described.keys.start
        value = torch.nn.functional.pad(value, (start, 0)) if start else value
        value = value.to(self._run.real.device)
        active = None if described.active is None else described.active[self._run.rows]
        if active is not None and before is not None and before.shape == value.shape and len(value) > 1:
            value = torch.where(active.to(value.device)[:, None, None], value, before)
        return value

    def _keep_part(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._parts[str(hook.name)[-1]] = value

    def _last_row(self, value: Float[Tensor, "batch head query key"], hook: Point) -> None:
        """The attention of the last token, from its query, all keys and the mask as it was used."""
        query, key = self._parts["q"][:, -1].float(), self._parts["k"].float()
        key = key.repeat_interleave(query.shape[1] // key.shape[2], dim=2)
        scores = torch.einsum("bhd,bkhd->bhk", query, key) * self._scale + value[:, :, -1].float()
        real = self._run.real[:, : scores.shape[-1]].to(scores.device)
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        counts = real.sum(dim=1)[:, None, None]  # uniform attention is 1, as in column sums
        weights = normalizer_of(self._run.tree.hf)(scores[:, :, None], counts[..., None])[:, :, 0]
        self.now[layer_of(hook)] = (weights * counts).to(self._run.real.device)


def recorded(source: SinkTrack, place: int, layers: list[int], device: torch.device) -> ScoredStep:
    """The data recorded at one index of the step axis; rows that had ended by then have no score there."""
    track = source.isel(step=place, layer=layers)
    token, score = track.data["token_id"].to_numpy()[:, 0], torch.from_numpy(track.scores().to_numpy()[:, 0])
    there = ~score.isnan().all(dim=2).all(dim=1) & torch.from_numpy(source.running.to_numpy()[:, [place]])
    if not bool(there.any()):
        return ScoredStep({})
    length = int(there.any(dim=0).nonzero().max()) + 1  # how many an autoregressive run has decoded
    known = (~score.isnan()).any(dim=2).any(dim=0)  # [layer, pos]
    starts = dict(zip(layers, known.long().argmax(dim=1).tolist(), strict=True))
    score, there = score[..., :length].nan_to_num(0.0).to(device), there[:, :length].to(device)
    undecided = torch.from_numpy(track.data["masked"].to_numpy()[:, 0, :length]).to(device)
    canvas = Snapshot(torch.from_numpy(token[:, :length]).to(device), undecided)
    return ScoredStep({layer: score[:, at] for at, layer in enumerate(layers)}, canvas, starts, track, there)


def check_source(source: SinkTrack, run: RunContext) -> None:
    (rows, length), cfg = run.real.shape, run.tree.cfg
    sizes = {"batch": rows, "pos": length, "layer": cfg.n_layers, "head": cfg.n_heads}
    there = {axis: source.data.sizes[axis] for axis in sizes}
    kinds = ["autoregressive" if causal else "diffusion" for causal in (source.causal, run.causal)]
    require(
        source.causal == run.causal and there == sizes,
        f"source is a run of kind {kinds[0]} with {there}, this run {kinds[1]} with {sizes}; record it with this "
        f"model and these prompts, as many at a time (a sweep runs batch_size= prompts together).",
    )


def check_prompts(source: SinkTrack, run: RunContext, ids: Int[Tensor, "batch pos"]) -> None:
    """Check that each row has the source's prompt, either as given or as it is on the canvas."""
    length = run.prompt_length
    recorded = torch.from_numpy(source.data["token_id"].isel(step=0).to_numpy()[:, :length]).to(ids)
    real = torch.from_numpy(source.data["is_real"].to_numpy()[:, :length])
    either = (real | run.real[:, :length].cpu()).to(ids.device) & (recorded >= 0)  # a row may be missing here
    for row in ((recorded != ids[:, :length]) & either).any(dim=1).nonzero()[:, 0].tolist():
        require(
            row_key(recorded[row].cpu()[real[row]].tolist()) == run.row_keys[row],
            f"source was recorded with another prompt in row {row}; record it with the prompts of this run, in "
            f"the same order.",
        )


def detected(
    detector: "Detector",
    scores: Float[Tensor, "batch layer head key"],
    seen: ScoredStep,
    run: RunContext,
    canvas: Snapshot,
) -> Bool[Tensor, "batch layer head key"]:
    """What a detector finds in the scores of a step.

    Every key counts as visible to every query whose attention the scores hold: in an autoregressive run that is only
    the newest query, not a column of the pattern.

    Args:
        scores: NaN at keys that do not exist.
        seen: the step that they come from.

    Raises:
        SettingError: the detector needs more than scores, and there is no recorded track.
    """
    track = _track_of(scores.float()[:, None].cpu().numpy(), run, canvas) if seen.track is None else seen.track
    try:
        with warnings.catch_warnings():  # not at every step: the end of the run tells of a rule that found nothing
            warnings.filterwarnings("ignore", "epsilon = .* can never be met")
            found = track.detect(detector).to_numpy()[:, 0, ..., : canvas.ids.shape[1]]
    except TrackError as error:
        raise SettingError(
            f"{detector!r} cannot be used here: {error} Within an intervention it sees only the scores; record the "
            f"other quantities in an earlier run and pass it as source=run.sinks."
        ) from error
    return torch.from_numpy(found).to(canvas.ids.device)


def _track_of(scores: Float[np.ndarray, "batch 1 layer head key"], run: RunContext, canvas: Snapshot) -> SinkTrack:
    """A track of one step."""
    ids, masked = (part.cpu().numpy()[:, None] for part in canvas[:2])
    blocks = run.tree.attention_blocks
    attrs = {
        "model": str(run.tree.cfg.model_name),
        "causal": 0,
        "prompt_length": run.prompt_length,
        "vocabulary": json.dumps(run.vocabulary(np.unique(ids).tolist())),
        "special": json.dumps(run.special),
        "settings": run.settings,
        "block_length": 0 if blocks is None else blocks.length,
    }
    real = run.real[:, : ids.shape[2]].cpu().numpy()
    track = build_track(scores, ids, masked, np.zeros_like(masked), real, np.full(real.shape, -1), attrs)
    if canvas.computed is None:
        return track
    computed = canvas.computed.cpu().numpy()[:, None]  # units other than "sum" divide by the number of queries
    return SinkTrack(track.data.assign(computed=(("batch", "step", "pos"), computed)))


def kinds_now(run: RunContext, canvas: Snapshot, reason: str) -> Int[Tensor, "batch pos"]:
    """The `Kind` of each position's token.

    Args:
        reason: the setting that needs it, for the error.

    Raises:
        SettingError: the model has no tokenizer.
    """
    ids, masked = (part.cpu().numpy()[:, None] for part in (canvas.ids, canvas.undecided))
    real = run.real[:, : ids.shape[2]].cpu().numpy()
    tokens = np.unique(ids[real[:, None] & (ids >= 0)]).tolist()
    try:
        known = kinds_of_tokens(tokens, run.special, run.vocabulary(tokens))
    except TrackError as error:
        raise SettingError(f"{reason} needs the text of tokens: {error}") from error
    codes = kind_codes(ids, masked, real, run.prompt_length, known)[:, 0]
    return torch.from_numpy(codes.astype(np.int64)).to(canvas.ids.device)


def states_now(run: RunContext, canvas: Snapshot) -> Int[Tensor, "batch pos"]:
    """The `PlaceState` of each position; MISSING on padding and where nothing is decoded yet."""
    ids, masked = (part.cpu().numpy()[:, None] for part in (canvas.ids, canvas.undecided))
    exists = run.real[:, None, : ids.shape[2]].cpu().numpy() & (ids >= 0)
    return torch.from_numpy(state_codes(masked, exists, run.prompt_length)[:, 0]).to(canvas.ids.device)


def of_kind(names: Sequence[str], run: RunContext, canvas: Snapshot, reason: str) -> Bool[Tensor, "batch pos"]:
    """Positions whose state or token kind is among `names`, which may begin with "not "."""
    states = states_now(run, canvas).cpu().numpy()
    codes = kinds_now(run, canvas, reason).cpu().numpy() if needs_text(names) else None
    return torch.from_numpy(in_only(names, states, codes) & (states != int(PlaceState.MISSING))).to(canvas.ids.device)
