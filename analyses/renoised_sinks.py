"""What renoising does to a sink on an accepted token, for the study `kinds`: is it the sink of a token or of a place?

Runs are compared that differ in one position of one step. A *place* is a position of the first canvas that holds an
accepted token when step t begins, that step t accepts again with the same token, and that is a sink of at least one
head at step t. `Renoise` replaces its token with noise at step t; all other tokens of step t + 1 are those of the run
without it. Does each of these heads still have a sink there at step t + 1?

A step also reads the last step's prediction for every position (self-conditioning), which still names the token that
was replaced. So the token is kept or replaced, and the prediction for the position is passed on at step t + 1 or left
out (zero, as in the first step of a canvas): four conditions. The control is the nearest position that the same step
accepts in the same manner and that is a sink of none of the heads, in the same four conditions.

If a sink belongs to its token, it ends without the token; if it belongs to its place, it stays. If noise attracts a
head by itself, the control becomes a sink as often.

Caveat: places without a control are left out (``control_share`` is the share of those with one), and a control is near,
not at the same position.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.intervals import interval_rows, mean_interval
from sinklens.analyses.runs import OwnRun
from sinklens.analyses.scales import DIFFERENCE, SHARE, Scale
from sinklens.analyses.strata import Matched, groups_of, labels_of, shaped, stratified
from sinklens.interventions import Renoise
from sinklens.runs.intervention import row_key
from sinklens.sinks import SinkTrack
from sinklens.sinks.matching import ratio

if TYPE_CHECKING:
    from sinklens.hooks.points import Point

GROUPS = ("sinks", "others")
CONDITIONS = {  # whether the place is renoised, and whether its prediction is passed on
    "token kept": (False, True),
    "renoised": (True, True),
    "token kept, no prediction": (False, False),
    "renoised, no prediction": (True, False),
}
RunWith = Callable[[Sequence[Any]], SinkTrack]
DIFFERENCES = {
    "sinks: renoised − token kept": (("sinks", "renoised"), ("sinks", "token kept")),
    "sinks: no prediction − prediction": (("sinks", "token kept, no prediction"), ("sinks", "token kept")),
    "sinks: both − neither": (("sinks", "renoised, no prediction"), ("sinks", "token kept")),
    "others: renoised − token kept": (("others", "renoised"), ("others", "token kept")),
    "renoised: sinks − others": (("sinks", "renoised"), ("others", "renoised")),
    "renoised, no prediction: sinks − others": (
        ("sinks", "renoised, no prediction"), ("others", "renoised, no prediction")
    ),
}  # fmt: skip
MEASURES = {
    "still_sink": "share that are a sink of the head at the next step",
    "still_sink_difference": "difference of two of these shares",
    "control_share": "share of the places that have a control",
}


class RenoisedSink(NamedTuple):
    """A sink on an accepted token, and its control.

    Attributes:
        step: the step that renoises it.
        positions: columns of the sink and of its control on the canvas.
        heads: the heads that have the sink.
    """

    step: int
    positions: tuple[int, int]
    heads: Bool[np.ndarray, "layer head"]


class ChosenSinks(NamedTuple):
    """The places of one row.

    Attributes:
        chosen: those to renoise, with a control.
        share: share of all places that have a control; NaN without places.
    """

    chosen: list[RenoisedSink]
    share: float


def renoised_sinks(run_with: RunWith, base: OwnRun, length: int, steps: int, number: int, seed: int) -> xr.Dataset:
    """What each prompt contributes to `renoised_rows`.

    ``still_sinks`` [prompt, group, condition]: pairs of a place and a head that have a sink at the next step;
    ``renoised_sinks`` [prompt]: of how many pairs; ``control_share`` [prompt]: see `ChosenSinks.share`.

    Args:
        run_with: repeats the run with more hooks, as far as the first canvas, and returns its sinks.
        base: the run without them.
        length, steps: positions and planned steps of the first canvas.
        number: how many places to renoise in each row.
    """
    found = places(base, length, number, seed)
    rows, start = len(found), base.run.prompt_length
    still = np.zeros((rows, len(GROUPS), len(CONDITIONS)))
    for turn, group in np.ndindex(max(len(one.chosen) for one in found), len(GROUPS)):
        now = {row: one.chosen[turn] for row, one in enumerate(found) if turn < len(one.chosen)}
        where = np.zeros((rows, steps, start + length), dtype=bool)
        for row, place in now.items():
            where[row, place.step, start + place.positions[group]] = True
        for condition, changes in enumerate(CONDITIONS.values()):
            track = run_with(_hooks(where, length, *changes)) if condition else base.run.sinks
            for row, place in now.items():
                after = _sinks(track, row, place.step + 1)[..., start + place.positions[group]]
                still[row, group, condition] += (after & place.heads).sum()
    pairs = np.array([sum(place.heads.sum() for place in one.chosen) for one in found], dtype=float)
    return _dataset(still, pairs, np.array([one.share for one in found]))


def without_canvas(prompts: int) -> xr.Dataset:
    """The variables of a model without a canvas of random tokens, all NaN."""
    missing = np.full((prompts, len(GROUPS), len(CONDITIONS)), np.nan)
    return _dataset(missing, missing[:, 0, 0], missing[:, 0, 0])


def _dataset(still: np.ndarray, pairs: np.ndarray, share: np.ndarray) -> xr.Dataset:
    return xr.Dataset(
        {
            "still_sinks": (("prompt", "group", "condition"), still),
            "renoised_sinks": ("prompt", pairs),
            "control_share": ("prompt", share),
        },
        {"group": list(GROUPS), "condition": list(CONDITIONS)},
    )


def _sinks(track: SinkTrack | None, row: int, step: int) -> Bool[np.ndarray, "layer head pos"]:
    assert track is not None, "the run recorded no sinks"
    return track.isel(batch=row, step=step).detect().to_numpy()[0, 0]


def _hooks(where: Bool[np.ndarray, "batch step pos"], length: int, renoised: bool, predicted: bool) -> list[Any]:
    """Hooks that renoise the places of a step, or leave out their prediction in the next step."""
    canvas = torch.from_numpy(where[:, :, -length:])

    def leave_out(value: Float[Tensor, "batch pos d_model"], hook: "Point") -> Tensor | None:
        here = canvas[:, (hook.step or 0) - 1].to(value.device)
        return value.masked_fill(here[..., None], 0.0) if hook.step else None

    return [
        *([Renoise(where=where[:, :, None, None])] if renoised else []),
        *([] if predicted else [("denoise.hook_self_conditioning", leave_out)]),
    ]


def places(base: OwnRun, length: int, number: int, seed: int) -> list[ChosenSinks]:
    """Up to `number` places of each row, at random; they depend on the row's prompt and on `seed`, not on its batch."""
    assert base.run.sinks is not None, "the run recorded no sinks"
    run, answer = base.run, slice(base.run.prompt_length, base.run.prompt_length + length)
    sinks = base.run.sinks.detect().to_numpy()[..., answer]
    kept = _kept(base, answer)
    found = []
    for row in range(len(kept)):
        every = [_place(step, pos, sinks[row, step], kept[row, step]) for step, pos in np.argwhere(kept[row]).tolist()]
        listed = [place for place in every if place is not None]
        controlled = [place for place in listed if place.positions[1] >= 0]
        prompt = run.canvas[row, 0, : answer.start][run.real[row, : answer.start]].tolist()
        rng = np.random.default_rng([seed, row_key(prompt)])
        drawn = rng.permutation(len(controlled))[:number]
        share = len(controlled) / len(listed) if listed else np.nan
        found.append(ChosenSinks([controlled[place] for place in sorted(drawn)], share))
    return found


def _kept(base: OwnRun, answer: slice) -> Bool[np.ndarray, "batch step pos"]:
    """Where an accepted token of the first canvas is accepted again by the step, and the next step reads it."""
    track = base.run.sinks
    assert track is not None, "the run recorded no sinks"
    token, decided = track["token_id"].to_numpy(), track.decided.to_numpy()[..., answer]
    now = (base.own & ~(token[:, :, answer.stop :] >= 0).any(axis=2))[..., None]  # the first canvas is worked on
    token = token[..., answer]
    kept = np.zeros_like(decided)
    kept[:, :-1] = (now & decided)[:, :-1] & (now & decided)[:, 1:] & (token[:, :-1] == token[:, 1:])
    return kept


def _place(
    step: int, pos: int, sinks: Bool[np.ndarray, "layer head pos"], kept: Bool[np.ndarray, " pos"]
) -> RenoisedSink | None:
    """The place at a step and position, with -1 for a missing control; None if it is not a sink."""
    heads = sinks[..., pos]
    if not heads.any():
        return None
    free = np.flatnonzero(kept & ~(sinks & heads[..., None]).any(axis=(0, 1)))
    control = int(free[np.abs(free - pos).argmin()]) if len(free) else -1
    return RenoisedSink(step, (pos, control), heads)


def renoised_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """`MEASURES` with intervals over prompts: ``still_sink`` of each group in each condition, and `DIFFERENCES`
    of these.

    ``sinks`` is the number of pairs of a place and a head. Empty for a model without a canvas of random tokens.
    """
    pairs = data["renoised_sinks"].to_numpy()
    if np.isnan(pairs).all():
        return []
    rows: list[dict[str, Any]] = []

    def add(measure: str, group: str, found: Matched) -> None:
        (line,) = interval_rows(model, measure, shaped(found.found, 1), {"group": [group]})
        described = {name: value for name, value in labels_of(found).items() if name != "matched_share"}
        rows.append({**line, **described, "sinks": int(pairs.sum()), "meaning": MEASURES[measure]})

    def shares(events: xr.DataArray, scale: Scale, null: float = np.nan) -> Matched:
        sums = [part.reshape(-1, 1) for part in (events.to_numpy(), pairs)]
        return stratified(lambda *sums: sums, ratio, sums, seed, groups_of(data), False, scale, null)

    still = data["still_sinks"]
    for group, condition in product(GROUPS, CONDITIONS):
        add("still_sink", f"{group}: {condition}", shares(still.sel(group=group, condition=condition), SHARE))
    for name, sides in DIFFERENCES.items():
        first, second = (still.sel(group=group, condition=condition, drop=True) for group, condition in sides)
        add("still_sink_difference", name, shares(first - second, DIFFERENCE, 0.0))
    add("control_share", "sinks", Matched(mean_interval(data["control_share"].to_numpy(), seed=seed), 1.0))
    return rows
