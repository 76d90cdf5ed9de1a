"""Massive activations and outlier dimensions of the residual stream.

A *massive activation* is one value of a stream that is large in itself and against the rest: |h| ≥ `at_least` and
|h| ≥ `times_median` · median |h| over the stream of its step and layer (Sun et al., 2402.17762, with 100 and 1,000). An
*outlier dimension* is large at many places: |h| ≥ `times_rms` · rms of the stream at the place, at no less than
`positions` of the places and in no less than `layers` of the streams (after LLM.int8, 2208.07339, which has 6 % and
25 %, and an absolute threshold).

`ClampStream` ablates them, `RoundActivations` and `RoundWeights` measure what they cost when values are rounded.

Caveat: small models may have none by these thresholds. Lowering them finds the largest values of any stream; compare
their ablation with that of as many random dimensions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.streams_read import PlaceStates, StepStreams, read_streams
from sinklens.utils.integers import is_finite

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

MOST = 10_000


class MassiveActivation(NamedTuple):
    """One value of a residual stream.

    Attributes:
        step, row, stream: where; stream l enters layer l, and the last one leaves the last layer.
        column: the column of the canvas, padding included; ``positions=`` of an intervention count without the row's
            padding.
        dim: the dimension of the stream.
        value: the value.
        times_median: its magnitude, in medians of the stream of its step and layer.
        token: token id on the canvas.
    """

    step: int
    row: int
    stream: int
    column: int
    dim: int
    value: float
    times_median: float
    token: int


class OutlierDimension(NamedTuple):
    """A dimension that is large at many places.

    Attributes:
        dim: the dimension.
        streams: share of the streams in which it is large at enough places.
        positions: share of the places at which it is large, over all streams.
    """

    dim: int
    streams: float
    positions: float


def massive_activations(
    run: "Generation",
    *,
    steps: Sequence[int] | None = None,
    state: PlaceStates = "all",
    at_least: float | int = 100.0,
    times_median: float | int = 1000.0,
) -> list[MassiveActivation]:
    """The massive activations of a run, largest first.

    Args:
        run: a run.
        steps: steps of the run; negative ones count from the end. None means all.
        state: positions that are searched: "all", "prompt", "masked" or "committed".
        at_least: smallest magnitude.
        times_median: smallest magnitude, in medians.

    Raises:
        SettingError: a threshold that is no positive number, one so low that more than 10,000 values pass it, or a
            step or state that does not exist.
    """
    _check_positive(at_least=at_least, times_median=times_median)
    found: list[MassiveActivation] = []
    for read in read_streams(run, steps, state):
        for stream, values in enumerate(read.values):
            magnitude = values.abs()
            median = magnitude[read.places].median() if bool(read.places.any()) else magnitude.new_ones(())
            large = (magnitude >= max(at_least, times_median * float(median))) & read.places[..., None]
            if len(found) + int(large.sum()) > MOST:
                raise SettingError(
                    f"more than {MOST:,} values pass at_least={at_least} and times_median={times_median}, so they are "
                    f"not exceptional; raise one of the thresholds."
                )
            found += [_found(read, stream, values, float(median), place) for place in large.nonzero().tolist()]
    return sorted(found, key=lambda one: -abs(one.value))


def _found(read: StepStreams, stream: int, values: Tensor, median: float, place: list[int]) -> MassiveActivation:
    row, column, dim = place
    value = float(values[row, column, dim])
    times = abs(value) / median if median else float("inf")
    return MassiveActivation(read.step, row, stream, column, dim, value, times, int(read.ids[row, column]))


def outlier_dimensions(
    run: "Generation",
    *,
    steps: Sequence[int] | None = None,
    state: PlaceStates = "all",
    times_rms: float | int = 6.0,
    positions: float | int = 0.06,
    streams: float | int = 0.25,
) -> list[OutlierDimension]:
    """The outlier dimensions of a run; those that are large at most places come first.

    Args:
        run, steps, state: as in `massive_activations`.
        times_rms: smallest magnitude, in root mean squares of the stream at its place.
        positions: smallest share of the places of a stream.
        streams: smallest share of the streams.

    Raises:
        SettingError: a threshold that is no positive number, or a step or state that does not exist.
    """
    _check_positive(times_rms=times_rms, positions=positions, streams=streams)
    counts, total = torch.zeros(()), 0
    for read in read_streams(run, steps, state):
        values = read.values[:, read.places]  # [stream, place, d_model]
        large = values.abs() >= times_rms * values.pow(2).mean(dim=-1, keepdim=True).sqrt()
        counts, total = counts + large.sum(dim=1).double(), total + values.shape[1]
    if total == 0:
        return []
    shares = counts / total
    often = (shares >= positions).double().mean(dim=0)
    found = [
        OutlierDimension(dim, float(often[dim]), float(shares[:, dim].mean()))
        for dim in (often >= streams).nonzero()[:, 0].tolist()
    ]
    return sorted(found, key=lambda one: -one.positions)


def _check_positive(**given: float | int) -> None:
    for name, value in given.items():
        if not is_finite(value) or value <= 0:
            raise SettingError(f"{name} must be a positive number; got {value!r}.")
