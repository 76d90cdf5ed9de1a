"""Which keys the study `caching` leaves stale, and what that costs on the canvases of the exact run.

A run is divided into *episodes* of `every` steps. The first step of an episode computes everything, and the keys are
chosen from its scores; in the others they are stale, always the same ones. So all keys of an episode have the same age,
whichever they are: sinks that last do not get older than keys drawn at random.

Keys are chosen by layer among the *candidates*: positions that are decided when the episode begins. A step has to
compute the others, to decide them; where logits predict the next position, also those before them.

Pitfall: keys of the first layer depend on nothing but their own token, so they are never out of date.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.interventions.controls import largest, nearest, rest_of, same_kind, same_mass
from sinklens.runs.result import Generation
from sinklens.sinks.detectors import Detector
from sinklens.sinks.kinds import kinds

CHANGES = {"stale": "these keys stale, all others fresh", "fresh": "these keys fresh, all other decided ones stale"}
CONTROLS = {
    "same_mass": "random keys with as much attention",
    "same_kind": "random keys of the same kinds of token",
    "nearest": "the nearest keys",
    "random": "as many random keys",
}
KEYS = {"none": "no key", "sink": "sinks", "sink_of_kind": "sinks with another key of their kind", **CONTROLS}
TREATED = {control: "sink_of_kind" if control == "same_kind" else "sink" for control in CONTROLS}
"""The sinks that each control is compared with: `same_kind` has no key for a sink without another key of its kind."""
EVERYWHERE = "all"

Sets = dict[str, Bool[np.ndarray, "step layer pos"]]


class Staleness(NamedTuple):
    """What one run leaves stale.

    Attributes:
        change: of `CHANGES`.
        choice: of `KEYS`.
        layer: the only layer with stale keys, or `EVERYWHERE`.
    """

    change: str
    choice: str
    layer: str


def conditions(layers: int) -> list[Staleness]:
    """Every choice of keys in all layers; sinks, keys of the same mass and none also in single layers."""
    everywhere = [Staleness(*names, EVERYWHERE) for names in product(CHANGES, KEYS)]
    single = [Staleness(*names) for names in product(CHANGES, ("none", "sink", "same_mass"), layer_names(layers))]
    return [one for one in [*everywhere, *single] if one[:2] != ("stale", "none")]  # that is the exact run


def layer_names(layers: int) -> list[str]:
    """The layers whose keys can be out of date."""
    return [str(layer) for layer in range(1, layers)]


def candidates(run: Generation, every: int) -> Bool[np.ndarray, "step pos"]:
    """Positions of a run of one prompt whose keys may be stale; none in the first step of an episode."""
    undecided = run.undecided[0].numpy()
    needed = undecided.copy()
    if run.model.family_record.shift:
        needed[:, :-1] |= undecided[:, 1:]
    steps = np.arange(run.steps_run)
    allowed = ~needed[steps - steps % every] & run.real[0].numpy()
    return allowed & (steps % every > 0)[:, None]


def chosen_keys(run: Generation, allowed: Bool[np.ndarray, "step pos"], sink: Detector, every: int, seed: int) -> Sets:
    """The keys of `KEYS` at every step, from the scores of the step that begins the episode.

    A position counts as a sink of a layer if it is one in any head; its mass is the mean of its scores over heads.
    Controls are weaker than every sink of the layer (`sinklens.interventions.controls`).

    Args:
        run: an exact run of one prompt.
        allowed: `candidates`.
    """
    assert run.sinks is not None
    scores, found = run.sinks.scores().to_numpy()[0], run.sinks.detect(sink).to_numpy()[0].any(axis=2)
    codes = torch.from_numpy(kinds(run.sinks).to_numpy()[0].astype(np.int64))
    sets = {name: np.zeros((run.steps_run, *found.shape[1:]), dtype=bool) for name in KEYS}
    for start in range(0, run.steps_run - 1, every):
        inside = slice(start + 1, start + every)
        mass = torch.from_numpy(np.nan_to_num(scores[start]).mean(axis=1, keepdims=True))
        free = torch.from_numpy(allowed[start + 1])[None, None].expand_as(mass)
        sinks = torch.from_numpy(found[start])[:, None] & free
        kind = codes[start].expand(len(mass), 1, -1)
        for name, keys in _all_sets(mass, sinks, free, kind, _noise(run, start, mass.shape, seed)).items():
            sets[name][inside] = keys[:, 0].numpy()
    return sets


def _all_sets(
    mass: Float[Tensor, "layer 1 pos"],
    sinks: Bool[Tensor, "layer 1 pos"],
    free: Bool[Tensor, "layer 1 pos"],
    kind: Int[Tensor, "layer 1 pos"],
    order: Float[Tensor, "layer 1 pos"],
) -> dict[str, Bool[Tensor, "layer 1 pos"]]:
    """The keys of every entry of `KEYS` but "none"; controls are taken in descending `order`."""
    rest = rest_of(mass, sinks, free)
    of_kind = same_kind(order, sinks, rest, kind)
    return {
        "sink": sinks,
        "sink_of_kind": same_kind(mass, of_kind, sinks, kind),  # as many of each kind, the strongest first
        "same_mass": same_mass(order, mass, sinks, rest),
        "same_kind": of_kind,
        "nearest": nearest(mass, sinks, rest),
        "random": largest(order, rest, sinks.sum(dim=-1, keepdim=True)),
    }


def _noise(run: Generation, start: int, shape: Sequence[int], seed: int) -> Tensor:
    """Random numbers that depend on the seed, the prompt and the step alone."""
    digest = hashlib.sha256(repr(run.canvas[0, 0].tolist()).encode()).digest()
    rng = np.random.default_rng([seed, start, int.from_bytes(digest[:8], "little")])
    return torch.from_numpy(rng.random(tuple(shape)).astype(np.float32))


def fresh_keys(
    condition: Staleness, sets: Mapping[str, Bool[np.ndarray, "step layer pos"]], allowed: Bool[np.ndarray, "step pos"]
) -> Bool[np.ndarray, "step layer pos"]:
    """What a condition computes, for `sinklens.sampling.Planned`."""
    keys = sets[condition.choice]
    stale = keys if condition.change == "stale" else allowed[:, None] & ~keys
    if condition.layer != EVERYWHERE:
        stale = stale & (np.arange(stale.shape[1]) == int(condition.layer))[:, None]
    return ~stale


def costs(
    base: Mapping[int, Float[Tensor, "masked vocab"]], changed: Sequence[Mapping[int, Float[Tensor, "masked vocab"]]]
) -> tuple[Float[np.ndarray, "run step"], Float[np.ndarray, "run step"]]:
    """KL divergence of each changed run from the base run, Σ_v p(v) log(p(v) / q(v)), and the share of positions whose
    most likely token differs; means over the undecided positions whose logits every run has, NaN without one.

    Args:
        base, changed: `MaskedLogits.kept` on the same canvases.
    """
    kl, other = (np.full((len(changed), len(base)), np.nan) for _ in range(2))
    for step, logits in base.items():
        runs = torch.stack([kept[step] for kept in changed]).double()
        known = ~runs.isnan().any(dim=-1).any(dim=0)
        p, q = logits.double()[known].log_softmax(-1), runs[:, known].log_softmax(-1)
        if len(p):
            parts = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
            kl[:, step] = parts.sum(-1).mean(-1).numpy()
            other[:, step] = (p.argmax(-1) != q.argmax(-1)).double().mean(-1).numpy()
    return kl, other
