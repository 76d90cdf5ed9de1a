"""Control keys: as many keys as the strongest, matched to them by what else could explain an effect.

*Rest*: the allowed keys that are weaker than all of the strongest. Most controls draw from it, so that they never
contain a key that they control for. *Order*: random numbers per head; the keys with the largest are taken first, so an
order that does not change between steps gives keys that do not change either.

`same_mass` is drawn over the heads of a layer together, from keys that are not sinks: a head with one dominant key has
too little other attention of its own to match it.

Limitation: `same_mass` takes all such keys of a layer where its sinks hold more than half of the attention, and
`same_kind` takes fewer where the rest has too few of a kind.
"""

import hashlib
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.runs.intervention import RunContext
from sinklens.sinks.detectors import EpsilonOverMean

Pick = Literal["strongest", "weakest", "random", "random_any", "same_mass", "same_kind", "nearest"]
PICKS: tuple[Pick, ...] = get_args(Pick)
DRAWN: tuple[Pick, ...] = ("random", "random_any", "same_mass", "same_kind")
"""Picks that draw random numbers, at every step or once per run."""

KeyScores = Float[Tensor, "*batch head key"]
ChosenKeys = Bool[Tensor, "*batch head key"]


def rest_of(scores: KeyScores, found: ChosenKeys, allowed: Bool[Tensor, "*#batch #head key"]) -> ChosenKeys:
    """Allowed keys that are neither in `found` nor stronger than the weakest key there."""
    return allowed & ~found & (scores <= scores.masked_fill(~found, torch.inf).amin(dim=-1, keepdim=True))


def largest(
    order: KeyScores, allowed: Bool[Tensor, "*#batch #head key"], number: Int[Tensor, "*#batch #head 1"]
) -> ChosenKeys:
    """The `number` allowed keys of each head that are first in descending `order`; the first of ties."""
    most = min(max(1, int(number.max())), order.shape[-1])
    order = order.masked_fill(~allowed, -torch.inf)
    least = order.topk(most).values.gather(-1, (number - 1).clamp(0, most - 1).expand(*order.shape[:-1], 1))
    above, equal = order > least, order == least  # a stable sort of all keys would take several times as long
    first = equal.cumsum(dim=-1, dtype=torch.int32) <= number - above.sum(dim=-1, keepdim=True)
    return (above | (equal & first)) & allowed & (number > 0)


def same_mass(
    order: KeyScores,
    scores: KeyScores,
    found: ChosenKeys,
    allowed: ChosenKeys,
    there: Bool[Tensor, "*#batch #head key"],
) -> ChosenKeys:
    """Allowed keys that are not sinks (Eq. 3, ε = 3), over all heads of a layer, with the summed score of `found`.

    Args:
        there: the keys that exist.
    """
    total, number = (scores * there).sum(dim=-1, keepdim=True), there.sum(dim=-1, keepdim=True)
    no_sink = scores - (total - scores) / (number - 1) <= EpsilonOverMean().epsilon
    rest = allowed & ~found & no_sink & (scores > 0)  # of keys that were masked before, any number would fit
    return of_mass(*(part.flatten(2) for part in (order, scores, found, rest))).view_as(found)


def of_mass(order: KeyScores, scores: KeyScores, found: ChosenKeys, rest: ChosenKeys) -> ChosenKeys:
    """Keys of the rest in descending `order`, as many as bring their summed score nearest to that of `found`."""
    places = order.masked_fill(~rest, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    mass = (scores * rest).gather(-1, places)
    # taking a key of mass m is nearer if half of it fits
    wanted = mass.cumsum(dim=-1) - mass / 2 <= (scores * found).sum(dim=-1, keepdim=True)
    return torch.zeros_like(rest).scatter(-1, places, wanted) & rest & found.any(dim=-1, keepdim=True)


def same_kind(
    order: KeyScores, found: ChosenKeys, rest: ChosenKeys, kinds: Int[Tensor, "*#batch #head key"]
) -> ChosenKeys:
    """For each key of `found` another of the rest with the same kind of token, where there is one."""
    taken = torch.zeros_like(found)
    for kind in kinds.unique().tolist():
        of_kind = kinds == kind
        taken |= largest(order, rest & of_kind, (found & of_kind).sum(dim=-1, keepdim=True))
    return taken


def nearest(scores: KeyScores, found: ChosenKeys, rest: ChosenKeys) -> ChosenKeys:
    """For each key of `found`, strongest first, the nearest key of the rest that is still free; the earlier of two."""
    length = found.shape[-1]
    places = scores.masked_fill(~found, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    positions, taken = torch.arange(length, device=found.device), torch.zeros_like(found)
    number = found.sum(dim=-1, keepdim=True)
    for rank in range(int(number.max())):
        distance = (positions - places[..., rank : rank + 1]).abs()
        free = rest & ~taken & (number > rank)
        closest = distance.masked_fill(~free, length + 1).argmin(dim=-1, keepdim=True)
        taken |= (positions == closest) & free
    return taken


def random_order(
    like: Float[Tensor, "batch layer head key"],
    run: RunContext,
    seed: int,
    step: int | None,
    layers: list[int],
) -> Float[Tensor, "batch layer head key"]:
    """Random numbers that are independent of padding and of the rest of the batch.

    Args:
        like: has the shape of the result.
        step: the step; None for numbers that never change. Those are drawn for all positions of the run.
        layers: the layers.
    """
    drawn = torch.zeros(like.shape)
    keys, known = like.shape[3], run.real.cpu()
    known = known if step is None else known[:, :keys]
    for place, layer in enumerate(layers):
        digest = hashlib.sha256(repr((seed, "run" if step is None else step, layer)).encode()).digest()
        for row, real in enumerate(known[: len(like)]):
            rng = np.random.default_rng([int.from_bytes(digest[:8], "little"), run.row_keys[row]])
            noise = rng.random((like.shape[2], int(real.sum()))).astype(np.float32)
            complete = torch.zeros(like.shape[2], len(real))
            complete[:, real] = torch.from_numpy(noise)
            if step is None and run.causal:
                complete[:, run.prompt_length :] -= 1.0  # after the prompt's, which exist at every step
            drawn[row, place] = complete[:, :keys]
    return drawn.to(like.device)
