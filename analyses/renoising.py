"""Sinks on decided and on undecided positions, and what becomes of them, for the study `kinds`.

An answer position is *decided* or *undecided* when a step begins: it holds a token or the mask, or, on a canvas of
random tokens, an accepted token or noise. Its *fate* in the step is the state that it has when the next step begins; on
such a canvas a decided position can be *renoised*. A sampler that may change every token in every step (Duo) decides
nothing; there a position is decided once its token is `settled`. A sink of a head *survives* if its position is a sink
of the same head at the next step.

Rates are compared at the same step and place in the answer, across prompts and across prompts of one group
(strata.py).

Caveat: survival is observed, not caused. Positions that a sampler renoises are those it is uncertain of, which may have
weaker sinks already.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, Int

from sinklens.analyses.intervals import interval_rows
from sinklens.analyses.scales import SHARE
from sinklens.analyses.strata import (
    Groups,
    compare,
    groups_of,
    labels_of,
    matched_by,
    matchings,
    shaped,
    stratified,
    two_groups,
)
from sinklens.sinks import SinkTrack
from sinklens.sinks.matching import ratio

PLACES = ("sinks_at", "survived_at", "decided_at", "decided_next_at")


class Comparison(NamedTuple):
    """Two groups of places.

    Attributes:
        first, second: states before and after the step, "decided" or "undecided"; None is either.
        meaning: what is compared.
    """

    first: tuple[str, str | None]
    second: tuple[str, str | None]
    meaning: str


SINKS = {
    "decided": Comparison(
        ("decided", None), ("undecided", None), "sinks on decided positions relative to undecided ones"
    ),
    "decided next": Comparison(
        ("undecided", "decided"), ("undecided", "undecided"),
        "sinks on positions that the step decides relative to those it leaves undecided",
    ),
}  # fmt: skip
SURVIVAL = {
    "renoised": Comparison(
        ("decided", "undecided"), ("decided", "decided"),
        "survival of sinks whose position is renoised minus that of sinks whose position is not",
    ),
    "decided": Comparison(
        ("undecided", "decided"), ("undecided", "undecided"),
        "survival of sinks whose position is decided minus that of sinks whose position stays undecided",
    ),
}  # fmt: skip


def settled(
    tokens: Int[xr.DataArray, "batch step pos"], final: Int[np.ndarray, "batch longer"]
) -> Bool[np.ndarray, "batch step pos"]:
    """Where the token on the canvas does not change in the rest of the run; it is then that of the `final` text.

    Args:
        tokens: the canvases of a track, ``track["token_id"]``.
    """
    token = tokens.to_numpy()
    same = token == final[:, None, : token.shape[2]]
    same |= token < 0  # a step that the row does not have
    return np.logical_and.accumulate(same[:, ::-1], axis=1)[:, ::-1] & (token >= 0)


def sinks_by_state(track: SinkTrack, decided: Bool[np.ndarray, "batch step pos"] | None = None) -> xr.Dataset:
    """`PLACES` [prompt, step, place] of the answer's positions, NaN where none exists.

    ``sinks_at``: sinks of all layers and heads; ``survived_at``: those that are sinks of the same head at the next
    step; ``decided_at`` and ``decided_next_at``: 1 if decided when the step, and the next one, begins. The last two of
    these are NaN at a row's last step.

    Args:
        decided: which positions are decided when each step begins; by default those that are not undecided.
    """
    answer = slice(track.prompt_length, None)
    sinks = track.detect().to_numpy()[..., answer]
    exists = track.scores().notnull().any(("layer", "head")).to_numpy()[..., answer]
    held = ~track["masked"].to_numpy() if decided is None else decided
    decided = exists & held[..., answer]
    lasting = np.zeros(exists.shape, dtype=bool)
    lasting[:, :-1] = exists[:, 1:] & exists[:, :-1]
    survived, after = np.zeros(exists.shape), np.zeros(exists.shape)
    survived[:, :-1] = (sinks[:, :-1] & sinks[:, 1:]).sum(axis=(2, 3))
    after[:, :-1] = decided[:, 1:]
    values = {
        "sinks_at": (sinks.sum(axis=(2, 3)), exists), "survived_at": (survived, lasting),
        "decided_at": (decided, exists), "decided_next_at": (after, lasting),
    }  # fmt: skip
    columns = {
        name: (("prompt", "step", "place"), np.where(known, value, np.nan).astype(np.float32))
        for name, (value, known) in values.items()
    }
    return xr.Dataset(columns, {"step": np.arange(exists.shape[1]), "place": np.arange(exists.shape[2])})


def state_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """`SINKS`: ratios of the rates of sinks, crude and at the same step and place."""
    rows = []
    for name, comparison in SINKS.items():
        first, second = (_where(data, *group) for group in comparison[:2])
        places = xr.ones_like(data["sinks_at"]).where(data["sinks_at"].notnull())
        parts = two_groups(data["sinks_at"], places, first, second)
        rows += _rows(model, "ratio", name, comparison, parts, groups_of(data), seed)
    return rows


def survival_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """`SURVIVAL`: differences of the shares of sinks that survive, crude and at the same step and place; and the share
    of each group, ``rate``.
    """
    rows = []
    known = data["survived_at"].notnull()
    survived, sinks = data["survived_at"], data["sinks_at"].where(known)
    for name, comparison in SURVIVAL.items():
        first, second = (_where(data, *group) & known for group in comparison[:2])
        parts = two_groups(survived, sinks, first, second)
        rows += _rows(model, "difference", name, comparison, parts, groups_of(data), seed)
        for (before, after), pair in zip(comparison[:2], (parts[:2], parts[2:]), strict=True):
            sums = [part.sum(axis=1, keepdims=True) for part in pair]
            one = stratified(lambda *totals: totals, ratio, sums, seed, groups_of(data), within=False, scale=SHARE)
            label = {"group": [f"{before}, then {after}"], "matched": ["nothing"]}
            rows += interval_rows(model, "rate", shaped(one.found, 2), label)
    return rows


def _where(data: xr.Dataset, before: str, after: str | None) -> xr.DataArray:
    """Places in a state, with a fate if `after` is given."""
    found = data["decided_at"] == float(before == "decided")
    return found if after is None else found & (data["decided_next_at"] == float(after == "decided"))


def _rows(
    model: str,
    measure: str,
    group: str,
    comparison: Comparison,
    parts: Sequence[np.ndarray],
    prompts: Groups | None,
    seed: int,
) -> list[dict[str, Any]]:
    """A comparison, crude, matched by step and place, and by group of prompts, with the share of matched events."""
    rows = []
    for matching in matchings(prompts, "step, place"):
        used = matched_by(matching, parts)
        found = compare(used, seed, measure == "difference", prompts, matching.within)
        labels = {"group": [group], "matched": [matching.name]}
        (line,) = interval_rows(model, measure, shaped(found.found, 2), labels)
        rows.append({**line, **labels_of(found, matching.claim), "meaning": comparison.meaning})
    return rows
