"""Read the features of finished runs: which fire, where and when, and where one fires most.

Each step is one pass of the unchanged model over the step's canvas, as in `sinklens.experiments.logit_lens`; hooks of
the run are not included.

Limitation: all features of all places are in memory, steps × positions × features per row. Restrict `steps` for large
models. The same token at one position often fires at many steps, so an example in a summary is the strongest step of a
position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.errors import require
from sinklens.experiments.step_ids import exact_step
from sinklens.features.autoencoder import SAE
from sinklens.features.places import Scope, in_scope, states_of_run, stream_point
from sinklens.runs.intervention import whole_numbers, within
from sinklens.runs.result import Generation
from sinklens.sinks.kinds import STATES
from sinklens.utils.arguments import as_tuple, checked

PLACE = ["run", "row", "step", "column"]


@checked
@torch.no_grad()
def read_features(
    run: "Generation", sae: SAE, point: str, *, scope: Scope = "all", steps: Sequence[int] | None = None
) -> xr.DataArray:
    """The features f = encode(x) of the activations at `point`, at the positions in `scope` of every step.

    Args:
        run: a `Generation`, or a trace after its block.
        sae: any SAE.
        point: where it belongs.
        scope: states of the positions at which the SAE was trained, as in `sinklens.features.collect`.
        steps: steps of the run; negative values count from the end. None means all.

    Returns:
        An array [batch, step, pos, feature]; NaN on padding, outside the scope, and where an autoregressive run has not
        decoded. Positions are columns of the canvas, as in a sink track.

    Raises:
        SettingError: a step that did not run, an unknown state, or a point without a vector at each position.
    """
    outside = torch.from_numpy(~in_scope(run, scope))
    name, chosen = stream_point(run.model, point), within("step", steps, run.steps_run)
    read = []
    for step in chosen:
        ids, real, time = exact_step(run, step)
        x = run.model.tree.peek(ids, real, [name], time)[name].flatten(2).float()
        found = sae.encode(x.flatten(0, 1)).unflatten(0, x.shape[:2]).float().cpu()
        found[~real.cpu() | outside[:, step, : found.shape[1]]] = torch.nan
        missing = run.canvas.shape[2] - found.shape[1]
        read.append(torch.nn.functional.pad(found, (0, 0, 0, missing), value=torch.nan).numpy())
    return xr.DataArray(np.stack(read, axis=1), dims=("batch", "step", "pos", "feature"), coords={"step": chosen})


class FeatureExample(NamedTuple):
    """A place at which a feature fires.

    Attributes:
        run, row, step, column: where: number of the run, row, step and column of the canvas.
        value: the feature's value.
        state: "prompt", "masked" or "committed".
        tokens: the canvas of the row at this step, without padding; `place` is the index of the column in it.
        values: the feature's value at each of these tokens; NaN outside the scope.
        place: index of the position in `tokens`.
    """

    run: int
    row: int
    step: int
    column: int
    value: float
    state: str
    tokens: list[int]
    values: Float[np.ndarray, " token"]
    place: int


@dataclass(frozen=True, eq=False)
class FeatureSummary:
    """Where one feature fires in some runs.

    Attributes:
        feature: its number.
        examples: the strongest places, strongest first.
        firing: share of the places of each state at which it fires; NaN without such places.
        by_step: share of the positions at which it fires, by step; NaN without such positions.
        fired: its values where it fires.
        share: share of all places at which it fires.
        mean_value: mean of `fired`; NaN if it never fires.
    """

    feature: int
    examples: list[FeatureExample]
    firing: dict[str, float]
    by_step: Float[np.ndarray, " step"]
    fired: Float[np.ndarray, " place"]
    share: float
    mean_value: float


@checked
def summarize_features(
    runs: "Generation | Sequence[Generation]",
    sae: SAE,
    point: str,
    features: Sequence[int],
    *,
    scope: Scope = "all",
    top: int = 8,
) -> list[FeatureSummary]:
    """Summarize some features over runs.

    Args:
        runs: one or several finished runs of diffusion models.
        sae: any SAE.
        point: where it belongs.
        features: numbers of features; negative ones count from the end.
        scope: as in `read_features`; other positions are left out.
        top: number of examples per feature.

    Raises:
        SettingError: no run, no position in the scope, a feature that does not exist, or `top` below 1.
    """
    runs = as_tuple(runs)
    require(runs and top >= 1, "summarize_features needs at least one run, and top of at least 1.")
    values = [read_features(run, sae, point, scope=scope).to_numpy() for run in runs]
    masks = [~np.isnan(array[..., 0]) for array in values]
    places = _places(runs, masks)
    require(len(places), f"no run has a position in {scope=}.")
    found = []
    for number in (within("feature", [one], values[0].shape[-1])[0] for one in whole_numbers("feature", features)):
        value = np.concatenate([array[mask, number] for array, mask in zip(values, masks, strict=True)])
        found.append(_summary(number, places.assign(value=value), runs, values, top))
    return found


def _places(runs: "Sequence[Generation]", masks: Sequence[np.ndarray]) -> "DataFrame":
    """The places of all runs, a row for each: run, row, step, column and state."""
    from pandas import DataFrame, concat

    parts = []
    for number, (run, mask) in enumerate(zip(runs, masks, strict=True)):
        row, step, column = np.nonzero(mask)
        states = states_of_run(run)[row, step, column]
        parts.append(DataFrame(dict(zip([*PLACE, "state"], (number, row, step, column, states), strict=True))))
    return concat(parts, ignore_index=True)


def _summary(
    number: int, places: "DataFrame", runs: "Sequence[Generation]", values: Sequence[np.ndarray], top: int
) -> FeatureSummary:
    places["fires"] = places["value"] > 0
    fired = places[places["fires"]]
    shares = places.groupby("state")["fires"].mean()
    steps = range(max(array.shape[1] for array in values))
    by_step = places.groupby("step")["fires"].mean().reindex(steps).to_numpy()
    order = fired.sort_values(["value", *PLACE], ascending=[False, *[True] * len(PLACE)])
    strongest = order.drop_duplicates(["run", "row", "column"]).head(top)  # one step of each position
    examples = [
        _example(at, row, step, column, runs, values, number)
        for at, row, step, column in strongest[PLACE].itertuples(index=False)
    ]
    firing = {name: float(shares.get(code, np.nan)) for code, name in enumerate(STATES)}
    share, mean = float(places["fires"].mean()), float(fired["value"].mean())
    return FeatureSummary(number, examples, firing, by_step, fired["value"].to_numpy(), share, mean)


def _example(
    at: int, row: int, step: int, column: int, runs: "Sequence[Generation]", values: Sequence[np.ndarray], number: int
) -> FeatureExample:
    real = runs[at].real[row].cpu().numpy()
    tokens = runs[at].canvas[row, step].cpu().numpy()[real].tolist()
    own = values[at][row, step, :, number]
    state, place = STATES[states_of_run(runs[at])[row, step, column]], int(real[:column].sum())
    return FeatureExample(at, row, step, column, float(own[column]), state, tokens, own[real], place)
