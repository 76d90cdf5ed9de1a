"""The scores that a rule chooses by: those of the step before, collected during the run, or those of another run.

In a diffusion run they are the column sums of ``hook_sink_scores``. In an autoregressive run they are the last token's
attention, which is computed here from its query, all keys and the additive mask.

Limitation: in an autoregressive run, that last row ignores edits that later hooks make to ``hook_attn_mask``, to the
scores or to the pattern. List interventions on the mask before this one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.attention.normalizers import normalizer_of
from sinklens.hooks.points import Point
from sinklens.interventions.controls import KeyScores
from sinklens.runs.intervention import Pairs, RunContext, Snapshot, layer_of, row_key
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model


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
        now: by layer, those of the step that runs, on the device where keys are chosen.
        starts: by layer, the first text position that is a key, where a window hides others.
    """

    def __init__(self, model: "Model", run: RunContext, layers: Iterable[int]) -> None:
        self._run, self._layers, self._scale = run, sorted(layers), model.cfg.d_head**-0.5
        self.now: dict[int, KeyScores] = {}
        self.starts: dict[int, int] = {}
        self._before: dict[int, KeyScores] = {}
        self._query: Tensor | None = None
        self._key: Tensor | None = None

    def begin(self, canvas: Snapshot | None) -> ScoredStep:
        """Begin a step; returns the scores of the step before, whose canvas was `canvas`."""
        self._before, starts = self.now, self.starts
        self.now, self.starts = {}, {}
        return ScoredStep(self._before, canvas, starts)

    def first(self) -> Pairs:
        """Hooks to list before those that use the scores."""
        found: Pairs = []
        for layer in self._layers if self._run.causal else ():
            at = f"blocks.{layer}.attn"
            found += [(f"{at}.hook_rot_q", self._keep_query), (f"{at}.hook_rot_k", self._keep_key)]
        return found

    def last(self) -> Pairs:
        """Hooks to list after them, which see the attention as it was used."""
        point, keep = ("hook_attn_mask", self._last_row) if self._run.causal else ("hook_sink_scores", self._keep)
        return [(f"blocks.{layer}.attn.{point}", keep) for layer in self._layers]

    def _keep(self, value: KeyScores, hook: Point) -> None:
        layer, start, active = layer_of(hook), hook.forward_pass.keys.start, hook.forward_pass.active
        if start:
            self.starts[layer] = start
            value = torch.nn.functional.pad(value, (start, 0))
        value, before = value.to(self._run.real.device), self._before.get(layer)  # layers may be on several devices
        if active is not None and before is not None and before.shape == value.shape and len(value) > 1:
            value = torch.where(active.to(value.device)[:, None, None], value, before)
        self.now[layer] = value

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
        self.now[layer_of(hook)] = (weights * counts).to(self._run.real.device)


def recorded(source: SinkTrack, place: int, layers: list[int], device: torch.device) -> ScoredStep:
    """The data recorded at one index of the step axis; rows that had ended by then have no score there."""
    track = source.isel(step=place, layer=layers)
    token, score = track.data["token_id"].to_numpy()[:, 0], torch.from_numpy(track.scores().to_numpy()[:, 0])
    there = ~score.isnan().all(dim=2).all(dim=1)
    if not bool(there.any()):
        return ScoredStep({})
    length = int(there.any(dim=0).nonzero().max()) + 1  # how many an autoregressive run has decoded
    known = (~score.isnan()).any(dim=2).any(dim=0)  # [layer, pos]
    starts = dict(zip(layers, known.long().argmax(dim=1).tolist(), strict=True))
    score, there = score[..., :length].nan_to_num(0.0).to(device), there[:, :length].to(device)
    undecided = torch.from_numpy(track.data["masked"].to_numpy()[:, 0, :length]).to(device)
    canvas = Snapshot(torch.from_numpy(token[:, :length]).to(device), undecided)
    return ScoredStep({layer: score[:, at] for at, layer in enumerate(layers)}, canvas, starts, track, there)


def check_second_pass(run: RunContext) -> None:
    if run.causal:
        raise SettingError("same_step needs a second pass over the canvas; it is available in diffusion runs only.")
    if run.tree.architecture.encoder:
        raise SettingError(
            "same_step needs a second pass over the canvas, which lacks the self-conditioning of the step in a "
            "model with an encoder; use the sinks of the previous step."
        )


def check_source(source: SinkTrack, run: RunContext) -> None:
    if source.causal != run.causal:
        kinds = ["autoregressive" if causal else "diffusion" for causal in (source.causal, run.causal)]
        raise SettingError(
            f"source is a run of another kind of model, {kinds[0]}, and this run is {kinds[1]}; record it with "
            f"this model."
        )
    (rows, length), cfg = run.real.shape, run.tree.cfg
    for axis, size in {"batch": rows, "pos": length, "layer": cfg.n_layers, "head": cfg.n_heads}.items():
        if source.data.sizes[axis] != size:
            raise SettingError(
                f"source has {source.data.sizes[axis]} along {axis}, this run {size}; record it with this model "
                f"and these prompts."
            )


def check_prompts(source: SinkTrack, run: RunContext, ids: Int[Tensor, "batch pos"]) -> None:
    """Check that each row has the source's prompt, either as given or as it is on the canvas."""
    length = run.prompt_length
    recorded = torch.from_numpy(source.data["token_id"].isel(step=0).to_numpy()[:, :length]).to(ids)
    real = torch.from_numpy(source.data["is_real"].to_numpy()[:, :length])
    either = (real | run.real[:, :length].cpu()).to(ids.device) & (recorded >= 0)  # a row may be missing here
    for row in ((recorded != ids[:, :length]) & either).any(dim=1).nonzero()[:, 0].tolist():
        if row_key(recorded[row].cpu()[real[row]].tolist()) != run.row_keys[row]:
            raise SettingError(
                f"source was recorded with another prompt in row {row}; record it with the prompts of this run, in "
                f"the same order."
            )


def by_start(scores: dict[int, KeyScores], starts: dict[int, int]) -> dict[int, dict[int, KeyScores]]:
    """The layers whose keys begin at the same text position."""
    grouped: dict[int, dict[int, KeyScores]] = {}
    for layer, values in scores.items():
        grouped.setdefault(starts.get(layer, 0), {})[layer] = values
    return grouped


def place_of(track: SinkTrack, step: int) -> int | None:
    """Index of a run's step on the step axis of `track`, which may hold only some steps; None if it is missing."""
    places = (track.data["step"].to_numpy() == step).nonzero()[0]
    return int(places[0]) if len(places) else None
