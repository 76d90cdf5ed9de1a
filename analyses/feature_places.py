"""Where features fire in a run, and what that has to do with its sinks; used by the study `features`.

A sink is a position that a detector finds in any head of one layer. Sinks prefer some kinds of token (digits,
in the shipped models) and some places, and features follow both. So the firing at sinks is compared with that of other
positions of the same step and kind, and with that of the *same* position at steps at which it is not a sink.

Caveat: a position that is a sink at every step has no step to compare it with; only positions whose state as a sink
changes say whether a feature follows the sink or the place.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from sinklens.features import SAE, read_features
from sinklens.sinks.kinds import kinds

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


@dataclass(frozen=True)
class Seen:
    """A run in the layer whose sinks are studied.

    Attributes:
        sinks: whether a position is a sink of a head.
        strongest: position of each head's strongest key.
        kind: kind of token, as in sinklens.sinks.kinds.
        masked: undecided positions.
        real: False on padding.
    """

    sinks: Bool[np.ndarray, "batch step head pos"]
    strongest: Int[np.ndarray, "batch step head"]
    kind: Int[np.ndarray, "batch step pos"]
    masked: Bool[np.ndarray, "batch step pos"]
    real: Bool[np.ndarray, "batch pos"]

    def inside(self, scope: str) -> Bool[np.ndarray, "batch step pos"]:
        """The positions that the SAE of `scope` covers: "masked", or "decided" for every token."""
        return self.real[:, None] & (self.masked if scope == "masked" else ~self.masked)


def seen(run: "Generation", layer: int) -> Seen:
    """What `Seen` holds of a run with recorded sinks."""
    assert run.sinks is not None, "the run recorded no sinks"
    return Seen(
        run.sinks.detect().isel(layer=layer).to_numpy(),
        run.sinks.scores().isel(layer=layer).fillna(0.0).argmax("pos").to_numpy(),
        kinds(run.sinks).to_numpy(),
        run.undecided[:, :-1].numpy(),
        run.real.numpy(),
    )


def values_of(run: "Generation", sae: SAE, point: str) -> Float[np.ndarray, "batch step pos feature"]:
    """The features of a run, 0 on padding."""
    return np.nan_to_num(read_features(run, sae, point).to_numpy())


def by_step_and_kind(kind: Int[np.ndarray, "step pos"]) -> Int[np.ndarray, "step pos"]:
    """One number per step and kind of token."""
    return np.arange(len(kind))[:, None] * (kind.max() + 1) + kind


def by_place(kind: Int[np.ndarray, "step pos"]) -> Int[np.ndarray, "step pos"]:
    """One number per position and kind of token, the same at all steps."""
    return np.arange(kind.shape[1]) * (kind.max() + 1) + kind


def contrast(
    fires: Bool[np.ndarray, "step pos feature"],
    sinks: Bool[np.ndarray, "step pos"],
    inside: Bool[np.ndarray, "step pos"],
    stratum: Int[np.ndarray, "step pos"],
) -> tuple[Float[np.ndarray, " feature"], int]:
    """Share of sinks at which a feature fires, minus that of other places of the same stratum.

    Every sink whose stratum has other places counts once; only places `inside` count.

    Returns:
        The mean difference (NaN without any such sink), and the number of such sinks.
    """
    total, count = np.zeros(fires.shape[-1]), 0
    for number in np.unique(stratum[sinks & inside]):
        here = inside & (stratum == number)
        at, others = here & sinks, here & ~sinks
        if others.any():
            total += at.sum() * (fires[at].mean(axis=0) - fires[others].mean(axis=0))
            count += int(at.sum())
    return (total / count if count else total * np.nan), count


def moves(
    fires: Bool[np.ndarray, "step pos feature"],
    sinks: Bool[np.ndarray, "step head pos"],
    strongest: Int[np.ndarray, "step head"],
    inside: Bool[np.ndarray, "step pos"],
) -> tuple[Float[np.ndarray, " feature"], Float[np.ndarray, " feature"], int]:
    """Whether features follow a sink that moves, from one step to the next.

    A move is a change of a head's strongest key that is a sink before and after. Only places that the SAE covers at
    both steps count.

    Returns:
        Mean rise of firing at the new place and mean fall at the old place (NaN without any), and the number of moves.
    """
    gained, lost, count = [], [], 0
    for step in range(len(fires) - 1):
        for head in range(strongest.shape[1]):
            old, new = strongest[step, head], strongest[step + 1, head]
            if old == new or not (sinks[step, head, old] and sinks[step + 1, head, new]):
                continue
            changes = fires[step + 1].astype(int) - fires[step]
            covered = inside[step] & inside[step + 1]
            gained += [changes[new]] if covered[new] else []
            lost += [-changes[old]] if covered[old] else []
            count += 1
    missing = np.full(fires.shape[-1], np.nan)
    return *(np.mean(part, axis=0) if part else missing for part in (gained, lost)), count  # type: ignore[return-value]
