"""Do sinks follow the frontier of unmasking?

A mask-based run has two moving places: the *rightmost mask*, the last position still masked when a step begins, and the
*last decided* position, the one that the step before decided (of several, the rightmost). Rulli et al. (2510.15731,
Sec. 4.2) report that Dream's sinks begin at the rightmost mask and then move left with the decisions. Here a head's
strongest key is compared with both places, at the steps at which it is a sink.

A key near a place shows nothing by itself: near the end of a run few masks are left, and any key is near some of them.
So each distance stands beside two others: to the places of *shuffled orders*, where the run's positions are decided in
another order, as many at each step; and of the *other keys* of the same head and step.

Pitfall: a difference of mean distances alone proves nothing. A sink that stays in the prompt comes "closer" whenever
the rightmost mask moves left. So `frontier` counts the sinks that are *near* a place, within one position.
"""

import numpy as np
import xarray as xr

from sinklens.analyses.runs import noise_of
from sinklens.sinks import SinkTrack
from sinklens.sinks.motion import strongest_key

PLACES = ["rightmost mask", "last decided"]
SOURCES = ["run", "shuffled orders", "other keys"]
DRAWS = 10
NEAR = 1  # positions


def places_of(track: SinkTrack) -> xr.DataArray:
    """The position of each of `PLACES` at each step, [place, batch, step]; NaN where there is none."""
    rightmost, decided = (track["pos"].where(track[name]).max("pos") for name in ("masked", "committed"))
    return xr.concat([rightmost, decided.shift(step=1)], dim="place").assign_coords(place=PLACES)


def frontier(track: SinkTrack, seed: int = 0) -> xr.Dataset:
    """How far the sinks are from the frontier of unmasking, [prompt, place, source]; NaN for an autoregressive run.

    ``distance``: mean of |p − f| in positions over the steps, layers and heads whose strongest key p is a sink, with
    f the place; ``near``: share of these with |p − f| ≤ `NEAR`; ``begins``: the same share at the first step. For
    "shuffled orders", f is that of `DRAWS` random orders; for "other keys", p is each other key of the head.

    ``follows`` [prompt, place, against]: ``near`` of the run minus that of the shuffled orders, and of the other keys.
    A sink that follows the place has both above 0.

    Args:
        seed: seed of the orders, which depend on it and on the prompt alone.
    """
    keys = strongest_key(track).where(track.detect().any("pos")).where(not track.causal)
    orders = [places_of(_shuffled(track, seed, draw)) for draw in range(DRAWS)]
    own, rest = places_of(track), track.scores().notnull()
    number = rest.sum("pos") - 1
    found = []
    for measure in (abs, lambda gap: (abs(gap) <= NEAR).where(gap.notnull())):
        run = measure(keys - own)
        shuffled = xr.concat([measure(keys - order) for order in orders], dim="draw").mean("draw")
        others = (measure(track["pos"] - own).where(rest).sum("pos") - run) / number
        found.append(
            xr.concat([run, shuffled, others.where(run.notnull())], dim="source").assign_coords(source=SOURCES)
        )
    over = ("step", "layer", "head")
    data = xr.Dataset(
        {"distance": found[0].mean(over), "near": found[1].mean(over), "begins": found[1].isel(step=0).mean(over[1:])}
    )
    follows = data["near"].sel(source="run", drop=True) - data["near"].sel(source=SOURCES[1:]).rename(source="against")
    return data.assign(follows=follows).rename(batch="prompt").drop_vars("prompt").transpose("prompt", ...)


def _shuffled(track: SinkTrack, seed: int, draw: int) -> SinkTrack:
    """The track with the positions that a row decides in another order."""
    states = {name: track[name].transpose("batch", "step", "pos").copy(deep=True) for name in ("masked", "committed")}
    for row in range(track.data.sizes["batch"]):
        decided = np.flatnonzero(track["masked"][row].any("step").to_numpy())
        order = noise_of(track["token_id"][row, 0].to_numpy(), seed, draw).permutation(decided)
        for state in states.values():
            state.values[row][:, decided] = state.values[row][:, order]
    return SinkTrack(track.data.assign(states))
