"""Keys chosen by their scores: the strongest, those of a detector, or others as a control (controls.py).

`Selection.choose` works on one step: scores [batch, head, key] of each layer, and the keys that may be taken. The heads
of a layer or the complete model may share a set; scores are then averaged first. `where.Where` is the rule that finds
the scores of a run.

Caveat: the number of keys that exist differs between rows of a padded batch. Where fewer than `top_k` keys may be
taken, all of them are, and padding never is. Where all scores are 0, because a head's pattern is all zero, there is no
strongest key, and none is taken.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, TrackError
from sinklens.interventions import controls
from sinklens.interventions.controls import DRAWN, PICKS, ChosenKeys, KeyScores, Pick
from sinklens.interventions.kinds_now import kinds_now, of_kind
from sinklens.runs.control_keys import ControlCount
from sinklens.runs.intervention import RunContext, Snapshot
from sinklens.sinks.strongest import check_only
from sinklens.sinks.track import SinkTrack, build_track, require_detector
from sinklens.utils.integers import as_integer, check_seed_of

if TYPE_CHECKING:
    from sinklens.runs.result import Generation
    from sinklens.sinks.detectors import Detector

Scope = Literal["head", "layer", "model"]
ITSELF: Literal["itself"] = "itself"


class _Step(NamedTuple):
    """What keys are chosen from at one step.

    Attributes:
        scores: by layer, pooled as `scope` says.
        real: keys that exist.
        allowed: those that may be taken.
        run, canvas: the run, and the canvas that the scores belong to.
        step: the step that the keys are for.
        track: the recorded step that the scores come from, if any.
    """

    scores: dict[int, KeyScores]
    real: Bool[Tensor, "batch key"]
    allowed: Bool[Tensor, "batch key"]
    run: RunContext | None
    canvas: Snapshot | None
    step: int
    track: SinkTrack | None

    def number(self, top_k: int | None) -> Int[Tensor, "batch 1 1"]:
        """`top_k` for each row."""
        return torch.full((len(self.allowed), 1, 1), int(top_k or 0), device=self.allowed.device)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which keys of a step are chosen, and by the scores of which run and step.

    Attributes:
        top_k: number of strongest keys per head; None if `detector` chooses them. The paper masks 1, 5 and 10.
        detector: finds the keys in a one-step track; its strength is not used.
        scope: one set per "head", per "layer" (scores averaged over its heads), or for the "model".
        pick: "strongest", or other keys as a control:
            "weakest": as many of the weakest;
            "random": as many random keys that are weaker than all of the strongest;
            "random_any": as many random keys of any strength, possibly the strongest themselves;
            "same_mass": random keys of that rest, as many as together receive the attention of the strongest;
            "same_kind": for each of the strongest a random key of that rest with the same kind of token;
            "nearest": for each of the strongest the nearest position of that rest;
            "permuted": the strongest keys of another head, the same head throughout the run.
        only: states ("prompt", "masked", "committed") or token kinds that may be taken, any of them; "not digit", for
            example, leaves out digits.
        seed: seed of random keys, which depend only on the seed, the row's prompt, the step, the layer and the head.
        persistent: draw random keys once per run, not at every step: a key is replaced only while it may not be taken,
            as when it becomes one of the strongest. In an autoregressive run keys of the prompt are taken first,
            because only they exist at every step.
        same_step: use the scores of step t itself, from an unmasked pass before it; doubles the work, diffusion only.
        source: "itself", or another run of the same prompts, or its `sinks`: uses the scores of that run at step t − 1
            (at step t with `same_step`), by its recorded column sums, and nothing at steps that it lacks for the run or
            for a row. A part of a track holds the steps listed in its ``step`` coordinate.
    """

    top_k: int | None = None
    detector: "Detector | None" = None
    scope: Scope = "head"
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    seed: int = 0
    persistent: bool = False
    same_step: bool = False
    source: "SinkTrack | Generation | Literal['itself']" = ITSELF

    def __post_init__(self) -> None:
        self.check_rule()

    @property
    def only_names(self) -> tuple[str, ...]:
        """`only` as a tuple."""
        return as_tuple(self.only)

    def check_rule(self) -> None:
        """Reject settings that exclude each other.

        Raises:
            SettingError: neither or both of `top_k` and `detector`, an unknown name, a control without its scope, an
                invalid seed, or a source without sinks.
        """
        if self.top_k is not None and self.detector is not None:
            raise SettingError("pass either top_k, a number of keys per head, or detector, not both.")
        if self.top_k is None and self.detector is None:
            raise SettingError(
                "no keys are named; pass top_k, a number of keys per head, or detector; an intervention also takes "
                "where=. positions= alone only restricts which of them count."
            )
        if self.detector is not None:
            require_detector(self.detector)
        count = as_integer(self.top_k)
        if self.top_k is not None and (count is None or count < 0):
            raise SettingError(f"top_k must be a number of keys, 0 or more; got {self.top_k}.")
        if self.pick not in PICKS:
            renamed = " It is now called 'random'." if self.pick == "random_rest" else ""
            raise SettingError(f"pick must be one of {', '.join(PICKS)}; got {self.pick!r}.{renamed}")
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
        check_only(self.only_names)
        check_seed_of(self)
        _ = self.track

    @property
    def track(self) -> SinkTrack | None:
        """The recorded scores; None for those of the run itself.

        Raises:
            SettingError: `source` recorded no sinks, or is not a run.
        """
        if isinstance(self.source, str) and self.source == ITSELF:
            return None
        found = self.source if isinstance(self.source, SinkTrack) else getattr(self.source, "sinks", None)
        if not isinstance(found, SinkTrack):
            raise SettingError(
                f"source must be another run or its sinks; got {self.source!r}. A run made with record_sinks=False has "
                f"none; repeat it without that setting."
            )
        return found

    def is_default(self) -> bool:
        """Whether all but `top_k`, `detector` and `seed` have their default values."""
        return all(
            getattr(self, field.name) == field.default
            for field in fields(Selection)
            if field.name not in ("top_k", "detector", "source", "seed")
        ) and (isinstance(self.source, str) and self.source == ITSELF)

    def choose(
        self,
        layers: dict[int, KeyScores],
        real: Bool[Tensor, "batch key"],
        run: RunContext | None,
        canvas: Snapshot | None,
        step: int,
        among: "Bool[Tensor, 'batch key'] | None" = None,
        track: SinkTrack | None = None,
        counted: ControlCount | None = None,
        heads: Sequence[int] | None = None,
    ) -> dict[int, ChosenKeys]:
        """The chosen keys of every layer.

        Args:
            layers: scores by layer.
            real: keys that exist, i.e. are not padding.
            run, canvas: the run, and the canvas of the step that the scores belong to; needed by `only` and by
                detectors; random keys need the run too.
            step: the step that the keys are for; random keys depend on it.
            among: keys that may be taken; None for all that exist.
            track: the recorded step that the scores come from, for detectors that need more than scores.
            counted: counts the keys of a control and those that it controls for, in `heads` (all heads for None).

        Raises:
            SettingError: `top_k` exceeds the number of keys that exist, or a detector or `only` needs unknown data.
        """
        longest = int(real.sum(dim=1).max())
        if self.top_k is not None and self.top_k > longest:
            raise SettingError(
                f"top_k = {self.top_k}, but at step {step} there are {longest} positions; choose at most that many."
            )
        allowed = real if among is None else real & among
        now = _Step(self._pooled(layers), real, allowed, run, canvas, step, track)
        if names := self.only_names:
            now = now._replace(allowed=allowed & of_kind(names, _need(run), _need(canvas), f"only={list(names)}"))
        if self.detector is None and self.pick in ("strongest", "weakest", "random_any"):
            found = taken = self._plain(now)
        else:
            found = self._found(now)
            taken = found if self.pick == "strongest" else self._control(now, found)
        if counted is not None and self.pick != "strongest":
            for layer, keys in taken.items():
                self._count(found[layer], keys, counted, slice(None) if heads is None else list(heads))
        return taken

    def count_in(self, run: RunContext, name: str) -> ControlCount | None:
        """Begin to count the keys of a control in a run of the intervention `name`; None for the strongest keys."""
        return None if self.pick == "strongest" else run.controls.begin(f"{name}(pick={self.pick!r})")

    def _count(self, found: ChosenKeys, taken: ChosenKeys, counted: ControlCount, heads: Any) -> None:
        """Count the keys of a layer and those that they control for."""
        requested, picked = found[:, heads].sum(dim=-1), taken[:, heads].sum(dim=-1)
        if self.pick == "permuted":  # as many keys over all heads
            short = torch.zeros_like(requested, dtype=torch.bool)
        else:
            short = (picked == 0) & (requested > 0) if self.pick == "same_mass" else picked < requested
        counted.add(requested, picked, short)

    def _plain(self, now: _Step) -> dict[int, ChosenKeys]:
        """`top_k` keys of each head: the strongest, the weakest, or random ones."""
        number = now.number(self.top_k)
        if self.pick != "random_any":
            return self._picked_at_once(now, number)
        return {layer: self._picked(scores, now, number, layer) for layer, scores in now.scores.items()}

    def _found(self, now: _Step) -> dict[int, ChosenKeys]:
        """The strongest keys, or those of the detector, whatever `pick` is."""
        if self.detector is None:
            return replace(self, pick="strongest", persistent=False)._plain(now)
        known = {layer: scores.masked_fill(~now.real[:, None], torch.nan) for layer, scores in now.scores.items()}
        detected = self._detected(known, _need(now.run), _need(now.canvas), now.track)
        return {layer: keys & now.allowed[:, None] for layer, keys in detected.items()}

    def _control(self, now: _Step, found: dict[int, ChosenKeys]) -> dict[int, ChosenKeys]:
        """The control of the strongest keys `found`."""
        if self.pick == "permuted":
            return controls.permuted(found, _need(now.run).row_keys, self.seed)
        same_kind = self.pick == "same_kind"
        known = kinds_now(_need(now.run), _need(now.canvas), f"pick={self.pick!r}") if same_kind else None
        taken = {}
        for layer, scores in now.scores.items():
            keys, number = found[layer], found[layer].sum(dim=-1, keepdim=True)
            rest = controls.rest_of(scores, keys, now.allowed[:, None])
            if self.pick in ("random_any", "weakest"):
                taken[layer] = self._picked(scores, now, number, layer)
            elif self.pick == "nearest":
                taken[layer] = controls.nearest(scores, keys, rest)
            else:
                order = self._noise(scores, _need(now.run), now.step, layer)
                if self.pick == "same_mass":
                    taken[layer] = controls.same_mass(order, scores, keys, rest)
                elif known is not None:
                    taken[layer] = controls.same_kind(order, keys, rest, known)
                else:
                    taken[layer] = controls.largest(order, rest, number)
        return taken

    def _pooled(self, layers: dict[int, KeyScores]) -> dict[int, KeyScores]:
        if self.scope == "head":
            return layers
        means = {layer: scores.mean(dim=1, keepdim=True) for layer, scores in layers.items()}
        if self.scope == "model":
            mean = torch.stack(list(means.values())).mean(dim=0)
            means = dict.fromkeys(means, mean)
        return {layer: mean.expand_as(layers[layer]) for layer, mean in means.items()}

    def _picked_at_once(self, now: _Step, number: Int[Tensor, "batch heads 1"]) -> dict[int, ChosenKeys]:
        """`_picked` of all layers as one batch: on a GPU, thirty short sorts are slower than one long one."""
        count, rows = len(now.scores), len(now.allowed)
        stacked = now._replace(allowed=now.allowed.repeat(count, 1))
        found = self._picked(torch.cat(list(now.scores.values())), stacked, number.repeat(count, 1, 1), 0)
        return dict(zip(now.scores, found.split(rows), strict=True))

    def _picked(self, scores: KeyScores, now: _Step, number: Int[Tensor, "batch heads 1"], layer: int) -> ChosenKeys:
        """The first `number` keys of each head in the order given by `pick`; only allowed keys are taken."""
        attends = (scores != 0).any(dim=-1, keepdim=True)
        if self.pick == "random_any":
            scores = self._noise(scores, _need(now.run), now.step, layer)
        elif self.pick == "weakest":
            scores = -scores
        return controls.largest(scores, now.allowed[:, None], number) & attends

    def _noise(self, scores: KeyScores, run: RunContext, step: int, layer: int) -> KeyScores:
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

    def _track(self, layers: dict[int, KeyScores], run: RunContext, canvas: Snapshot) -> SinkTrack:
        """A track of one step, for detectors and token kinds.

        Every key counts as visible to every query whose attention the scores hold: in an autoregressive run that is
        only the newest query, not a column of the pattern.
        """
        keys = canvas.ids.shape[1]
        ids, masked = (part.cpu().numpy()[:, None] for part in canvas[:2])
        blocks = run.tree.attention_blocks
        scores = torch.stack([scores.float() for scores in layers.values()], dim=1)[:, None].cpu().numpy()
        attrs = {
            "model": str(run.tree.cfg.model_name),
            "causal": 0,
            "prompt_length": run.prompt_length,
            "vocabulary": json.dumps(run.vocabulary(np.unique(ids).tolist())),
            "special": json.dumps(run.special),
            "settings": run.settings,
            "block_length": 0 if blocks is None else blocks.length,
        }
        real = run.real[:, :keys].cpu().numpy()
        track = build_track(scores, ids, masked, np.zeros_like(masked), real, np.full(real.shape, -1), attrs)
        if canvas.computed is None:
            return track
        computed = canvas.computed.cpu().numpy()[:, None]  # units other than "sum" divide by the number of queries
        return SinkTrack(track.data.assign(computed=(("batch", "step", "pos"), computed)))

    def _detected(
        self, layers: dict[int, KeyScores], run: RunContext, canvas: Snapshot, track: SinkTrack | None
    ) -> dict[int, ChosenKeys]:
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


def _with_scores(track: SinkTrack, layers: dict[int, KeyScores]) -> SinkTrack:
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
    """`only` as a tuple, from one name or several.

    Raises:
        SettingError: it is neither.
    """
    if not isinstance(only, Iterable):
        raise SettingError(f"give a name or a list of names; got {only!r}.")
    return (only,) if isinstance(only, str) else tuple(only)
