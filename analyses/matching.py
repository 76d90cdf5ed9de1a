"""Comparisons of positions that are alike in step, state and place: stratified ratios and differences.

A *stratum* holds the places (row, step, position) that agree in everything they are matched by. Within a stratum, n of
its N places belong to the set in question and have a events (a sink, say), the other m = N − n places have b. A stratum
without places on both sides says nothing and drops out. Over strata (Mantel and Haenszel, 1959; the difference:
Greenland and Robins, 1985):

    risk ratio       = Σ_s a m / N  /  Σ_s b n / N
    risk difference  = Σ_s (a m − b n) / N  /  Σ_s n m / N

With one stratum these are the crude ratio (a / n) / (b / m) and the crude difference a / n − b / m.

Without matching, a set of positions can seem avoided that is sought wherever there is a choice (Simpson's paradox):
masks lie in the answer, far from the start of the prompt where most sinks are.

Caveat: a stratum of step and position has one place in each row, so matching by position needs many rows. What was not
matched by can still differ: rows of different templates have different tokens at the same position (``group=``).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from sinklens.sinks.detectors import Detector
from sinklens.sinks.kinds import Kind, PlaceState, set_codes
from sinklens.sinks.track import SinkTrack

ENUMS = {"kind": Kind, "state": PlaceState}


def terms(events: Any, places: Any, other_events: Any, other_places: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a m / N, b n / N and n m / N of each stratum; 0 where it is empty."""
    total = np.maximum(np.asarray(places) + other_places, 1e-12)
    return events * other_places / total, other_events * places / total, places * other_places / total


def ratio(above: Any, below: Any) -> np.ndarray:
    """`above` / `below`; infinite where only `below` is 0, NaN where both are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.divide(above, below))


def places_of(track: "SinkTrack", detector: "Detector | None" = None) -> xr.Dataset:
    """``sinks_at`` [prompt, step, place], the sinks of all layers and heads at a place, and its codes ``kind_at`` and
    ``state_at``, NaN where none exists; places count from the answer: 0 is its first, −1 the last of the prompt.
    """
    codes = {by: set_codes(track, by)[0] for by in ENUMS}
    values = {"sinks_at": track.detect(detector).sum(("layer", "head")).to_numpy()}
    values |= {f"{by}_at": code for by, code in codes.items()}
    steps, length = codes["state"].shape[1:]
    return xr.Dataset(
        {
            name: (("prompt", "step", "place"), np.where(codes["state"] >= 0, value, np.nan).astype(np.float32))
            for name, value in values.items()
        },
        coords={"step": np.arange(steps), "place": np.arange(length) - track.prompt_length},
    )


def counts_by_stratum(data: xr.Dataset, by: str, axes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sinks and places of each set in each stratum, [prompt, set, stratum], where `axes` define the strata."""
    codes = data[f"{by}_at"].to_numpy()
    prompt, step, place = np.nonzero(~np.isnan(codes))
    labels = {"step": step, "place": place, "state": data["state_at"].to_numpy()[prompt, step, place].astype(int)}
    strata = np.zeros(len(prompt), dtype=np.int64)
    for axis in axes:
        strata = np.unique(strata * (labels[axis].max(initial=0) + 1) + labels[axis], return_inverse=True)[1]
    sinks = data["sinks_at"].to_numpy()[prompt, step, place]
    shape = (len(codes), sum(code >= 0 for code in ENUMS[by]), int(strata.max(initial=0)) + 1)
    at = np.ravel_multi_index((prompt, codes[prompt, step, place].astype(int), strata), shape)
    size = int(np.prod(shape))
    return (
        np.bincount(at, weights=sinks, minlength=size).reshape(shape),
        np.bincount(at, minlength=size).reshape(shape).astype(np.float64),
    )
