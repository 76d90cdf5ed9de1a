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

Caveat: places without a control are left out (``matched_share`` is the share of those with one), and a control is near,
not at the same position.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.intervals import Interval, interval_rows, mean_interval
from sinklens.analyses.runs import OwnRun
from sinklens.analyses.strata import stratified
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
Side = tuple[str, str]
DIFFERENCES: dict[str, tuple[Side, Side, str]] = {
    "token": (("sinks", "renoised"), ("sinks", "token kept"), "what renoising a sink changes"),
    "prediction": (
        ("sinks", "token kept, no prediction"), ("sinks", "token kept"), "what leaving out its prediction changes"
    ),
    "both": (("sinks", "renoised, no prediction"), ("sinks", "token kept"), "what both together change"),
    "noise": (("others", "renoised"), ("others", "token kept"), "what renoising another accepted position changes"),
    "place": (
        ("sinks", "renoised"), ("others", "renoised"), "renoised sinks minus other renoised positions"
    ),
    "place, no prediction": (
        ("sinks", "renoised, no prediction"), ("others", "renoised, no prediction"), "the same without the prediction"
    ),
}  # fmt: skip


class Place(NamedTuple):
    """A sink on an accepted token, and its control.

    Attributes:
        step: the step that renoises it.
        positions: columns of the sink and of its control on the canvas.
        heads: the heads that have the sink.
    """

    step: int
    positions: tuple[int, int]
    heads: Bool[np.ndarray, "layer head"]


class Found(NamedTuple):
    """The places of one row.

    Attributes:
        chosen: those to renoise, with a control.
        share: share of all places that have a control; NaN without places.
    """

    chosen: list[Place]
    share: float


def renoised_sinks(run_with: RunWith, base: OwnRun, length: int, steps: int, number: int, seed: int) -> xr.Dataset:
    """What each prompt contributes to `renoised_rows`.

    ``still_sinks`` [prompt, group, condition]: pairs of a place and a head that have a sink at the next step;
    ``renoised_sinks`` [prompt]: of how many pairs; ``control_share`` [prompt]: see `Found.share`.

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


def places(base: OwnRun, length: int, number: int, seed: int) -> list[Found]:
    """Up to `number` places of each row, at random; they depend on the row's prompt and on `seed`, not on its batch."""
    assert base.run.sinks is not None, "the run recorded no sinks"
    run, answer = base.run, slice(base.run.prompt_length, base.run.prompt_length + length)
    sinks = base.run.sinks.detect().to_numpy()[..., answer]
    kept = _kept(base, answer)
    found = []
    for row in range(len(kept)):
        every = [_place(step, pos, sinks[row, step], kept[row, step]) for step, pos in np.argwhere(kept[row])]
        listed = [place for place in every if place is not None]
        controlled = [place for place in listed if place.positions[1] >= 0]
        prompt = run.canvas[row, 0, : answer.start][run.real[row, : answer.start]].tolist()
        rng = np.random.default_rng([seed, row_key(prompt)])
        drawn = rng.permutation(len(controlled))[:number]
        share = len(controlled) / len(listed) if listed else np.nan
        found.append(Found([controlled[place] for place in sorted(drawn)], share))
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
) -> Place | None:
    """The place at a step and position, its control -1 if there is none; None if it is not a sink."""
    heads = sinks[..., pos]
    if not heads.any():
        return None
    free = np.flatnonzero(kept & ~(sinks & heads[..., None]).any(axis=(0, 1)))
    control = int(free[np.abs(free - pos).argmin()]) if len(free) else -1
    return Place(int(step), (int(pos), control), heads)


def renoised_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """``rate``: the share of sinks that are still there, for each group and condition; ``difference``: `DIFFERENCES` of
    these; ``matched_share``. Intervals over prompts. Empty for a model without a canvas of random tokens.
    """
    pairs = data["renoised_sinks"].to_numpy()
    if np.isnan(pairs).all():
        return []
    rows: list[dict[str, Any]] = []

    def add(measure: str, name: str, events: np.ndarray, meaning: str) -> None:
        found = stratified(lambda *sums: sums, ratio, [events[:, None], pairs[:, None]], seed)
        rows.extend(_lines(model, measure, name, found, meaning, int(pairs.sum())))

    still = data["still_sinks"].transpose("prompt", "group", "condition")
    for group, condition in np.ndindex(len(GROUPS), len(CONDITIONS)):
        name = f"{GROUPS[group]}: {[*CONDITIONS][condition]}"
        add("rate", name, still[:, group, condition].to_numpy(), "share that are a sink of the head at the next step")
    for name, (first, second, meaning) in DIFFERENCES.items():
        one, other = (still.sel(group=group, condition=condition).to_numpy() for group, condition in (first, second))
        add("difference", name, one - other, meaning)
    share = mean_interval(data["control_share"].to_numpy(), seed=seed)
    rows += _lines(model, "matched_share", "sinks", share, "share of the places that have a control", int(pairs.sum()))
    return rows


def _lines(model: str, measure: str, group: str, found: Interval, meaning: str, pairs: int) -> list[dict[str, Any]]:
    single = Interval(*(np.asarray(value).reshape(1) for value in found))
    return [
        {**row, "sinks": pairs, "meaning": meaning} for row in interval_rows(model, measure, single, {"group": [group]})
    ]
