"""Which keys of a head an intervention takes: by score, by a detector, or at random as a control.

Everything here works on one step: scores [batch, head, key] of each layer, and the keys that may be taken. The heads of
a layer or the complete model may share a set; scores are then averaged first.

Caveat: the number of keys that exist differs between rows of a padded batch. Where fewer than `top_k` keys may be
taken, all of them are, and padding never is. Where all scores are 0, because a head's pattern is all zero, there is no
strongest key, and none is taken.
"""

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, TrackError, nearest
from sinklens.runs.intervention import RunContext, Snapshot
from sinklens.sinks.kinds import Kind, kinds
from sinklens.sinks.track import SinkTrack, build_track, require_detector

if TYPE_CHECKING:
    from sinklens.sinks.detectors import Detector

Pick = Literal["strongest", "weakest", "random"]
Scope = Literal["head", "layer", "model"]
STATES = ("prompt", "masked", "committed")
KINDS = tuple(kind.name.lower() for kind in Kind if kind not in (Kind.MISSING, Kind.MASK))
Scores = Float[Tensor, "batch head key"]
Keys = Bool[Tensor, "batch head key"]


@dataclass(frozen=True)
class Selection:
    """How keys are chosen.

    Attributes:
        top_k: number of keys per head; None if `detector` chooses them.
        detector: finds them in a one-step track; its strength is not used.
        pick: "strongest", or as controls the same number of the "weakest" or of "random" keys.
        scope: one set per head, per layer, or for the model.
        only: states ("prompt", "masked", "committed") or token kinds that may be taken.
        seed: seed of random keys, which depend only on the seed, the row's prompt, the step, the layer and the head.
    """

    top_k: int | None
    detector: "Detector | None"
    pick: Pick
    scope: Scope
    only: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        if (self.top_k is None) == (self.detector is None):
            raise SettingError("pass either top_k, a number of keys per head, or detector, not both.")
        if self.detector is not None:
            require_detector(self.detector)
        if self.top_k is not None and not _is_count(self.top_k):
            raise SettingError(f"top_k must be a number of keys, 0 or more; got {self.top_k}.")
        if self.pick not in ("strongest", "weakest", "random"):
            raise SettingError(f"pick must be 'strongest', 'weakest' or 'random'; got {self.pick!r}.")
        if self.scope not in ("head", "layer", "model"):
            raise SettingError(f"scope must be 'head', 'layer' or 'model'; got {self.scope!r}.")
        for name in self.only:
            if name not in (*STATES, *KINDS):
                raise SettingError(
                    f"only= takes states or token kinds; {name!r} is neither. Known: {', '.join([*STATES, *KINDS])}."
                    f"{nearest(name, [*STATES, *KINDS])}"
                )

    def choose(
        self,
        layers: dict[int, Scores],
        real: Bool[Tensor, "batch key"],
        run: RunContext | None,
        canvas: Snapshot | None,
        step: int,
        among: "Bool[Tensor, 'batch key'] | None" = None,
        track: SinkTrack | None = None,
    ) -> dict[int, Keys]:
        """The chosen keys of every layer.

        Args:
            layers: scores by layer.
            real: keys that exist, i.e. are not padding.
            run, canvas: the run, and the canvas of the step that the scores belong to; needed by `only` and by
                detectors; random keys need the run too.
            step: the step that the keys are for; random keys depend on it.
            among: keys that may be taken; None for all that exist.
            track: the recorded step that the scores come from, for detectors that need more than scores.

        Raises:
            SettingError: `top_k` exceeds the number of keys that exist, or a detector or `only` needs unknown data.
        """
        pooled = self._pooled(layers)
        longest = int(real.sum(dim=1).max())
        if self.top_k is not None and self.top_k > longest:
            raise SettingError(
                f"top_k = {self.top_k}, but at step {step} there are {longest} positions; choose at most that many."
            )
        allowed = real if among is None else real & among
        if self.only:
            allowed = allowed & self._of_kind(pooled, _need(run), _need(canvas))
        if self.detector is None:
            number = torch.full((len(allowed), 1, 1), int(self.top_k or 0), device=allowed.device)
            if self.pick != "random":
                return self._picked_at_once(pooled, allowed, number, run, step)
            return {layer: self._picked(scores, allowed, number, run, step, layer) for layer, scores in pooled.items()}
        detected = self._detected(pooled, _need(run), _need(canvas), track)
        found = {layer: keys & allowed[:, None] for layer, keys in detected.items()}
        if self.pick == "strongest":
            return found
        return {
            layer: self._picked(scores, allowed, found[layer].sum(-1, keepdim=True), run, step, layer)
            for layer, scores in pooled.items()
        }

    def _pooled(self, layers: dict[int, Scores]) -> dict[int, Scores]:
        if self.scope == "head":
            return layers
        means = {layer: scores.mean(dim=1, keepdim=True) for layer, scores in layers.items()}
        if self.scope == "model":
            mean = torch.stack(list(means.values())).mean(dim=0)
            means = dict.fromkeys(means, mean)
        return {layer: mean.expand_as(layers[layer]) for layer, mean in means.items()}

    def _picked_at_once(
        self,
        layers: dict[int, Scores],
        allowed: Bool[Tensor, "batch key"],
        number: Int[Tensor, "batch heads 1"],
        run: RunContext | None,
        step: int,
    ) -> dict[int, Keys]:
        """`_picked` of all layers as one batch: on a GPU, thirty short sorts are slower than one long one."""
        count, rows = len(layers), len(allowed)
        stacked = torch.cat(list(layers.values()))
        found = self._picked(stacked, allowed.repeat(count, 1), number.repeat(count, 1, 1), run, step, 0)
        return dict(zip(layers, found.split(rows), strict=True))

    def _picked(
        self,
        scores: Scores,
        allowed: Bool[Tensor, "batch key"],
        number: Int[Tensor, "batch heads 1"],
        run: RunContext | None,
        step: int,
        layer: int,
    ) -> Keys:
        """The first `number` keys of each head in the order given by `pick`; only allowed keys are taken."""
        attends = (scores != 0).any(dim=-1, keepdim=True)
        if self.pick == "random":
            scores = self._noise(scores, _need(run), step, layer)
        elif self.pick == "weakest":
            scores = -scores
        scores = scores.masked_fill(~allowed[:, None], -torch.inf)
        most = int(number.max())
        if most == 0:
            return torch.zeros_like(scores, dtype=torch.bool)
        strongest = scores.sort(dim=-1, descending=True, stable=True).indices[..., :most]  # the first of ties
        wanted = torch.arange(strongest.shape[-1], device=scores.device) < number
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, strongest, wanted.expand_as(strongest))
        return taken & allowed[:, None] & attends

    def _noise(self, scores: Scores, run: RunContext, step: int, layer: int) -> Scores:
        """Random scores, independent of padding and of the rest of the batch; `scope` says which heads share them."""
        drawn = torch.zeros(scores.shape)
        rows, heads, keys = scores.shape
        real = run.real[:, :keys].cpu()
        for row in range(rows):
            place = (self.seed, step, 0 if self.scope == "model" else layer)
            digest = hashlib.sha256(repr(place).encode()).digest()
            rng = np.random.default_rng([int.from_bytes(digest[:8], "little"), run.row_keys[row]])
            sets = 1 if self.scope != "head" else heads
            noise = torch.from_numpy(rng.random((sets, int(real[row].sum()))).astype(np.float32))
            drawn[row][:, real[row]] = noise.expand(heads, -1)
        return drawn.to(scores.device)

    def _track(self, layers: dict[int, Scores], run: RunContext, canvas: Snapshot) -> SinkTrack:
        """A track of one step, for detectors and token kinds.

        Every key counts as visible to every query whose attention the scores hold: in an autoregressive run that is
        only the newest query, not a column of the pattern.
        """
        keys = canvas.ids.shape[1]
        ids, masked = (part.cpu().numpy()[:, None] for part in canvas)
        scores = torch.stack([scores.float() for scores in layers.values()], dim=1)[:, None].cpu().numpy()
        attrs = {
            "model": str(run.tree.cfg.model_name),
            "causal": 0,
            "prompt_length": run.prompt_length,
            "vocabulary": json.dumps(run.vocabulary(np.unique(ids).tolist())),
            "special": json.dumps(run.special),
        }
        real = run.real[:, :keys].cpu().numpy()
        return build_track(scores, ids, masked, np.zeros_like(masked), real, np.full(real.shape, -1), attrs)

    def _detected(
        self, layers: dict[int, Scores], run: RunContext, canvas: Snapshot, track: SinkTrack | None
    ) -> dict[int, Keys]:
        assert self.detector is not None
        if track is None:
            track = self._track(layers, run, canvas)
        elif self.scope != "head":
            track = _with_scores(track, layers)
        try:
            found = track.detect(self.detector).to_numpy()[:, 0, ..., : canvas.ids.shape[1]]
        except TrackError as error:
            raise SettingError(
                f"{self.detector!r} cannot be used here: {error} Within an intervention it sees only the scores; "
                f"record the other quantities in an earlier run and pass it as source=run.sinks."
            ) from error
        return {layer: torch.from_numpy(found[:, at]).to(canvas.ids.device) for at, layer in enumerate(layers)}

    def _of_kind(self, layers: dict[int, Scores], run: RunContext, canvas: Snapshot) -> Bool[Tensor, "batch key"]:
        """Keys whose state or token kind is in `only`."""
        ids, masked = canvas
        prompt = (torch.arange(ids.shape[1], device=ids.device) < run.prompt_length)[None]
        states = {"prompt": prompt & ~masked, "masked": masked, "committed": ~prompt & ~masked}
        keep = torch.zeros_like(masked)
        for name in self.only:
            if name in states:
                keep = keep | states[name]
        if any(name in KINDS for name in self.only):
            try:
                found = kinds(self._track(layers, run, canvas)).to_numpy()[:, 0]
            except TrackError as error:
                raise SettingError(f"only={list(self.only)} needs the text of tokens: {error}") from error
            wanted = [int(kind) for kind in Kind if kind.name.lower() in self.only]
            keep = keep | torch.from_numpy(np.isin(found, wanted)).to(ids.device)
        return keep


def _is_count(number: object) -> bool:
    """Whether `number` is a non-negative integer."""
    if isinstance(number, bool):
        return False
    try:
        return operator.index(number) >= 0  # type: ignore[arg-type]
    except TypeError:
        return False


def _with_scores(track: SinkTrack, layers: dict[int, Scores]) -> SinkTrack:
    """One step of `track` with other scores."""
    scores = torch.stack(list(layers.values()), dim=1)[:, None].cpu().numpy()
    missing = track.data.sizes["pos"] - scores.shape[-1]  # not decoded yet
    padded = np.pad(scores, [(0, 0)] * 4 + [(0, missing)], constant_values=np.nan)
    return SinkTrack(track.data.assign(score=(track.data["score"].dims, padded)))


Needed = TypeVar("Needed")


def _need(value: Needed | None) -> Needed:
    if value is None:
        raise SettingError("detectors, only= and random keys need a run; use sinklens.trace or sinklens.generate.")
    return value


def as_tuple(only: "str | Sequence[str]") -> tuple[str, ...]:
    """`only` as a tuple, from one name or several."""
    return (only,) if isinstance(only, str) else tuple(only)
