"""Which keys of a head an intervention takes: by score, by a detector, or others as a control (controls.py).

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, TrackError
from sinklens.interventions import controls
from sinklens.interventions.controls import DRAWN, PICKS, Keys, Pick, Scores
from sinklens.runs.intervention import RunContext, Snapshot
from sinklens.sinks.kinds import kinds
from sinklens.sinks.strongest import check_only, in_only, needs_text
from sinklens.sinks.track import SinkTrack, build_track, require_detector

if TYPE_CHECKING:
    from sinklens.sinks.detectors import Detector

Scope = Literal["head", "layer", "model"]


@dataclass(frozen=True)
class Selection:
    """How keys are chosen.

    Attributes:
        top_k: number of keys per head; None if `detector` chooses them.
        detector: finds them in a one-step track; its strength is not used.
        pick: "strongest", or other keys as a control:
            "weakest": as many of the weakest; "random": as many random keys, possibly among the strongest;
            "random_rest": as many random keys that are weaker than all of the strongest;
            "same_mass": random keys of that rest, as many as together receive the attention of the strongest;
            "same_kind": for each of the strongest a random key of that rest with the same kind of token;
            "nearest": for each of the strongest the nearest position of that rest;
            "permuted": the strongest keys of another head, the same head throughout the run.
        scope: one set per head, per layer, or for the model.
        only: states ("prompt", "masked", "committed") or token kinds that may be taken, any of them; "not digit", for
            example, leaves out digits.
        seed: seed of random keys, which depend only on the seed, the row's prompt, the step, the layer and the head.
        persistent: draw random keys once per run, not at every step: a key is replaced only while it may not be taken,
            as when it becomes one of the strongest. In an autoregressive run keys of the prompt are taken first,
            because only they exist at every step.
    """

    top_k: int | None
    detector: "Detector | None"
    pick: Pick
    scope: Scope
    only: tuple[str, ...]
    seed: int
    persistent: bool = False

    def __post_init__(self) -> None:
        if (self.top_k is None) == (self.detector is None):
            raise SettingError("pass either top_k, a number of keys per head, or detector, not both.")
        if self.detector is not None:
            require_detector(self.detector)
        if self.top_k is not None and not _is_count(self.top_k):
            raise SettingError(f"top_k must be a number of keys, 0 or more; got {self.top_k}.")
        if self.pick not in PICKS:
            raise SettingError(f"pick must be one of {', '.join(PICKS)}; got {self.pick!r}.")
        if self.scope not in ("head", "layer", "model"):
            raise SettingError(f"scope must be 'head', 'layer' or 'model'; got {self.scope!r}.")
        if self.pick == "permuted" and self.scope != "head":
            raise SettingError(
                f"pick='permuted' exchanges sets of keys between heads, but scope={self.scope!r} makes all sets equal; "
                f"use scope='head'."
            )
        if self.persistent and self.pick not in DRAWN:
            raise SettingError(
                f"persistent=True needs random keys, pick={' or '.join(map(repr, DRAWN))}; pick={self.pick!r} draws "
                f"none. Leave it out."
            )
        check_only(self.only)

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
        if self.detector is None and self.pick in ("strongest", "weakest", "random"):
            number = torch.full((len(allowed), 1, 1), int(self.top_k or 0), device=allowed.device)
            return self._plain(pooled, allowed, number, run, step)
        found = self._found(pooled, real, allowed, run, canvas, step, track)
        return found if self.pick == "strongest" else self._control(pooled, found, allowed, run, canvas, step)

    def _plain(
        self,
        layers: dict[int, Scores],
        allowed: Bool[Tensor, "batch key"],
        number: Int[Tensor, "batch heads 1"],
        run: RunContext | None,
        step: int,
    ) -> dict[int, Keys]:
        """`number` keys of each head: the strongest, the weakest, or random ones."""
        if self.pick != "random":
            return self._picked_at_once(layers, allowed, number, run, step)
        return {layer: self._picked(scores, allowed, number, run, step, layer) for layer, scores in layers.items()}

    def _found(
        self,
        layers: dict[int, Scores],
        real: Bool[Tensor, "batch key"],
        allowed: Bool[Tensor, "batch key"],
        run: RunContext | None,
        canvas: Snapshot | None,
        step: int,
        track: SinkTrack | None,
    ) -> dict[int, Keys]:
        """The strongest keys, or those of the detector, whatever `pick` is."""
        if self.detector is None:
            number = torch.full((len(allowed), 1, 1), int(self.top_k or 0), device=allowed.device)
            return replace(self, pick="strongest", persistent=False)._plain(layers, allowed, number, run, step)
        known = {layer: scores.masked_fill(~real[:, None], torch.nan) for layer, scores in layers.items()}
        detected = self._detected(known, _need(run), _need(canvas), track)
        return {layer: keys & allowed[:, None] for layer, keys in detected.items()}

    def _control(
        self,
        layers: dict[int, Scores],
        found: dict[int, Keys],
        allowed: Bool[Tensor, "batch key"],
        run: RunContext | None,
        canvas: Snapshot | None,
        step: int,
    ) -> dict[int, Keys]:
        """The control of the strongest keys `found`."""
        if self.pick == "permuted":
            return controls.permuted(found, _need(run).row_keys, self.seed)
        known = self._kinds(layers, _need(run), _need(canvas)) if self.pick == "same_kind" else None
        taken = {}
        for layer, scores in layers.items():
            keys, number = found[layer], found[layer].sum(dim=-1, keepdim=True)
            rest = controls.rest_of(scores, keys, allowed[:, None])
            if self.pick in ("random", "weakest"):
                taken[layer] = self._picked(scores, allowed, number, run, step, layer)
            elif self.pick == "nearest":
                taken[layer] = controls.nearest(scores, keys, rest)
            else:
                order = self._noise(scores, _need(run), step, layer)
                if self.pick == "same_mass":
                    taken[layer] = controls.same_mass(order, scores, keys, rest)
                elif known is not None:
                    taken[layer] = controls.same_kind(order, keys, rest, known)
                else:
                    taken[layer] = controls.largest(order, rest, number)
        return taken

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
        return controls.largest(scores, allowed[:, None], number) & attends

    def _noise(self, scores: Scores, run: RunContext, step: int, layer: int) -> Scores:
        """Random scores, independent of padding and of the rest of the batch; `scope` says which heads share them.

        Persistent ones are drawn for all positions of the run, so that those of a position never change.
        """
        drawn = torch.zeros(scores.shape)
        rows, heads, keys = scores.shape
        known = run.real.cpu() if self.persistent else run.real[:, :keys].cpu()
        for row in range(rows):
            place = ("run" if self.persistent else step, 0 if self.scope == "model" else layer)
            digest = hashlib.sha256(repr((self.seed, *place)).encode()).digest()
            rng = np.random.default_rng([int.from_bytes(digest[:8], "little"), run.row_keys[row]])
            sets = 1 if self.scope != "head" else heads
            noise = torch.from_numpy(rng.random((sets, int(known[row].sum()))).astype(np.float32))
            complete = torch.zeros(heads, known.shape[1])
            complete[:, known[row]] = noise.expand(heads, -1)
            if self.persistent and run.causal:
                complete[:, run.prompt_length :] -= 1.0  # after the prompt's, which exist at every step
            drawn[row] = complete[:, :keys]
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
        codes = self._kinds(layers, run, canvas).cpu().numpy() if needs_text(self.only) else None
        keep = in_only(self.only, {name: places.cpu().numpy() for name, places in states.items()}, codes)
        return torch.from_numpy(keep).to(ids.device)

    def _kinds(self, layers: dict[int, Scores], run: RunContext, canvas: Snapshot) -> Int[Tensor, "batch key"]:
        """The kind of each key's token."""
        try:
            found = kinds(self._track(layers, run, canvas)).to_numpy()[:, 0]
        except TrackError as error:
            reason = f"only={list(self.only)}" if self.only else f"pick={self.pick!r}"
            raise SettingError(f"{reason} needs the text of tokens: {error}") from error
        return torch.from_numpy(found).to(canvas.ids.device)


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
        raise SettingError(
            "detectors, only=, random keys and other controls need a run; use sinklens.trace or sinklens.generate."
        )
    return value


def as_tuple(only: "str | Sequence[str]") -> tuple[str, ...]:
    """`only` as a tuple, from one name or several."""
    return (only,) if isinstance(only, str) else tuple(only)
