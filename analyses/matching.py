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

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from sinklens.errors import TrackError
from sinklens.sinks.kinds import set_codes

if TYPE_CHECKING:
    from sinklens.sinks.detectors import Detector
    from sinklens.sinks.track import SinkTrack

MATCHED_BY = ("step", "state", "position")


def risk_ratio(
    events: Float[np.ndarray, "*rest stratum"],
    places: Float[np.ndarray, "*rest stratum"],
    other_events: Float[np.ndarray, "*rest stratum"],
    other_places: Float[np.ndarray, "*rest stratum"],
) -> Float[np.ndarray, "*rest"]:
    """The Mantel–Haenszel ratio of the rates of two groups; see the module. NaN where neither group has an event.

    Args:
        events, places: a and n of each stratum.
        other_events, other_places: b and m.
    """
    above, below, _ = terms(events, places, other_events, other_places)
    return ratio(above.sum(axis=-1), below.sum(axis=-1))


def risk_difference(
    events: Float[np.ndarray, "*rest stratum"],
    places: Float[np.ndarray, "*rest stratum"],
    other_events: Float[np.ndarray, "*rest stratum"],
    other_places: Float[np.ndarray, "*rest stratum"],
) -> Float[np.ndarray, "*rest"]:
    """The Mantel–Haenszel difference of the rates of two groups, as in `risk_ratio`; NaN without a shared stratum."""
    above, below, weight = terms(events, places, other_events, other_places)
    return ratio((above - below).sum(axis=-1), weight.sum(axis=-1))


def terms(events: Any, places: Any, other_events: Any, other_places: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a m / N, b n / N and n m / N of each stratum; 0 where it is empty."""
    total = np.maximum(np.asarray(places) + other_places, 1e-12)
    return events * other_places / total, other_events * places / total, places * other_places / total


def ratio(above: Any, below: Any) -> np.ndarray:
    """`above` / `below`; infinite where only `below` is 0, NaN where both are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.divide(above, below))


def strata(
    track: "SinkTrack", matched: Sequence[str] = MATCHED_BY, group: Sequence[Hashable] | None = None
) -> tuple[Int[np.ndarray, "batch step pos"], dict[str, np.ndarray]]:
    """Numbers of the strata of every place, −1 where none exists, and the labels of the strata by name.

    The position counts from the answer: 0 is its first, −1 the last of the prompt.

    Args:
        group: what each row shares with others, such as its template: adds the label "group", the number of the group.

    Raises:
        TrackError: `matched` names something other than step, state and position, or `group` has another length than
            the batch.
    """
    if isinstance(matched, str) or set(matched) - set(MATCHED_BY):
        raise TrackError(f"matched must be a list that holds any of step, state, position; got {matched!r}.")
    states, _ = set_codes(track, "state")
    step, position = np.arange(states.shape[1]), np.arange(states.shape[2]) - track.prompt_length
    every = {"step": step[:, None], "state": states, "position": position}
    if group is not None:
        if isinstance(group, str) or len(group) != len(states):
            raise TrackError(f"group has one label for each of the {len(states)} rows of the track; got {group!r:.60}.")
        every["group"] = np.unique([str(label) for label in group], return_inverse=True)[1][:, None, None]
        matched = [*matched, "group"]
    labels = np.stack([np.broadcast_to(every[name], states.shape)[states >= 0] for name in matched or ["step"]])
    labels = labels if matched else labels * 0
    distinct, number = np.unique(labels, axis=1, return_inverse=True)
    found = np.full(states.shape, -1)
    found[states >= 0] = number.reshape(-1)
    return found, dict(zip(matched, distinct, strict=False))


def matched_enrichment(
    track: "SinkTrack",
    detector: "Detector | None" = None,
    by: str = "kind",
    matched: Sequence[str] = MATCHED_BY,
    group: Sequence[Hashable] | None = None,
) -> xr.Dataset:
    """Whether sinks prefer a kind of token over the others at comparable places, pooled over rows.

    The variables, [kind] each:

    - ``ratio``: the `risk_ratio` of places of the kind against all other places of the same stratum, 1 if sinks are as
      frequent on both. The events are the sinks of all layers and heads. NaN where no stratum has both, or sinks.
    - ``sinks``, ``positions``: number of sinks and places of the kind; ``matched_sinks``, ``matched_positions``: those
      in strata that also have other places, which alone determine the ratio.

    Unlike `kinds.enrichment`, which compares with all positions, this compares with the positions of other kinds.

    Args:
        detector: definition of a sink; by default the paper's.
        by: "kind" or "state".
        matched: any of "step", "state" (masked, committed, prompt) and "position" (counted from the answer); [] for the
            crude ratio.
        group: what each row shares with others, such as its template or document: places are compared with those of
            rows of the same group. In another template, the same position has other tokens for other reasons.

    Raises:
        TrackError: an unknown `by` or `matched`, a `group` of another length than the batch, or by="state" matched by
            state; or see `kinds.token_kinds`.
    """
    if by == "state" and "state" in matched:
        raise TrackError("by='state' cannot be matched by state; use matched=['step', 'position'].")
    codes, names = set_codes(track, by)
    number, _ = strata(track, matched, group)
    sinks = track.detect(detector).sum(("layer", "head")).to_numpy()
    exists = codes >= 0
    a, n = _counted(sinks[exists], codes[exists], number[exists], len(names))
    b, m = a.sum(axis=0) - a, n.sum(axis=0) - n
    both = (n > 0) & (m > 0)
    columns = {
        "ratio": risk_ratio(a, n, b, m),
        "sinks": a.sum(axis=1), "positions": n.sum(axis=1),
        "matched_sinks": (a * both).sum(axis=1), "matched_positions": (n * both).sum(axis=1),
    }  # fmt: skip
    return xr.Dataset({name: (by, value) for name, value in columns.items()}, coords={by: names})


def _counted(events: np.ndarray, codes: np.ndarray, number: np.ndarray, sets: int) -> tuple[np.ndarray, np.ndarray]:
    """Events and places of each set in each stratum, [set, stratum] each."""
    size = int(number.max(initial=-1)) + 1
    place = codes.astype(np.int64) * size + number
    found = [np.bincount(place, weights=weights, minlength=sets * size) for weights in (events, np.ones(len(place)))]
    return found[0].reshape(sets, size), found[1].reshape(sets, size)
