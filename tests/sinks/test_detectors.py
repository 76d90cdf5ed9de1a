"""Every detector against its formula as plain loops, and against planted sinks."""

import math
import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import xarray as xr
from tracks import HEADS, LAYERS, LENGTH, made, planted

from sinklens.errors import SettingError, SinklensError, TrackError
from sinklens.interventions import MaskSinks
from sinklens.sinks import (
    Broadcast,
    Detector,
    EpsilonOverMean,
    MeanPlusStd,
    NoOp,
    ResidualPeak,
    SinkRate,
    SmallValueNorm,
    StrongestKeys,
    TopK,
)

NAN = math.nan


class Cell:
    """One head at one step of a track: the inputs of a formula, as lists and dicts over existing positions."""

    def __init__(self, data, place):
        (b, t, layer, h), self.data = place, data
        self.causal, self.place = bool(data.attrs["causal"]), place
        score = data["score"].to_numpy()[b, t, layer, h]
        real = data["is_real"].to_numpy()[b]
        self.there = [j for j in range(LENGTH) if real[j] and not math.isnan(score[j])]
        self.score = {j: float(score[j]) for j in self.there}

    def beside(self, layer, h):
        """The cell of another head at the same row and step."""
        return Cell(self.data, (*self.place[:2], layer, h))

    def of(self, name):
        """A recorded variable of this layer or head: a value per position, or one number."""
        here = self.data[name].to_numpy()[self.place[: 4 if "head" in self.data[name].dims else 3]]
        return {j: float(here[j]) for j in self.there} if np.ndim(here) else float(here)

    def mass(self, unit):
        """The score in `unit`."""
        count = len(self.there)
        seeing = {j: sum(k >= j for k in self.there) if self.causal else count for j in self.there}
        by = {"sum": lambda j: 1, "fraction": lambda j: count, "percent": lambda j: count / 100, "visible": seeing.get}
        return {j: self.score[j] / by[unit](j) for j in self.there}


def over_others(cell, j, unit="sum"):
    mass = cell.mass(unit)
    others = [mass[k] for k in cell.there if k != j]
    return mass[j] - sum(others) / len(others)


def is_top(cell, j, k):
    ranked = sorted(cell.there, key=lambda i: (-cell.score[i], i))
    return any(cell.score.values()) and j in ranked[:k]


def margin(cell, j, over, unit):
    """How far the mass is above mean + 1.2 population standard deviations."""
    layers = range(LAYERS) if "layer" in over else [cell.place[2]]
    heads = range(HEADS) if "head" in over else [cell.place[3]]
    masses = [cell.beside(layer, h).mass(unit) for layer in layers for h in heads]
    mass = {k: sum(one[k] for one in masses) / len(masses) for k in cell.there}
    return mass[j] - statistics.fmean(mass.values()) - 1.2 * statistics.pstdev(mass.values())


def rate(cell, j):
    """The share of heads whose visible attention exceeds 0.15."""
    alphas = [cell.beside(layer, h).mass("visible")[j] for layer in range(LAYERS) for h in range(HEADS)]
    return sum(alpha > 0.15 for alpha in alphas) / len(alphas)


def value_ratio(cell, j):
    norms = cell.of("value_norm")
    return norms[j] / statistics.mean(norms.values())


def over_median(cell, j, per):
    median = cell.of("stream_median") if per == "position" else cell.of("stream_channel_median")[j]
    return cell.of("stream_peak")[j] / median


FORMULAS = [
    *(
        (
            EpsilonOverMean(epsilon, unit),
            lambda cell, j, unit=unit: over_others(cell, j, unit),
            lambda cell, j, unit=unit, epsilon=epsilon: over_others(cell, j, unit) > epsilon,
        )
        for unit, epsilon in (("sum", 0.5), ("percent", 7), ("fraction", 0.08), ("visible", 0.1))
    ),
    *((TopK(k), lambda cell, j: cell.score[j], lambda cell, j, k=k: is_top(cell, j, k)) for k in (1, 4, 9)),
    *(
        (
            MeanPlusStd(k=1.2, over=over, unit=unit),
            lambda cell, j, how=(over, unit): 1 / (1 + math.exp(-5 * margin(cell, j, *how))),
            lambda cell, j, how=(over, unit): margin(cell, j, *how) > 0,
        )
        for over, unit in ((("layer", "head"), "sum"), (("head",), "percent"), (("layer",), "sum"), ((), "visible"))
    ),
    (SinkRate(0.15, 0.4), rate, lambda cell, j: rate(cell, j) >= 0.4),
    (SmallValueNorm(), lambda cell, j: 1 / value_ratio(cell, j), lambda cell, j: value_ratio(cell, j) < 0.2),
    *(
        (
            ResidualPeak(ratio=ratio, per=per),
            lambda cell, j, per=per: over_median(cell, j, per),
            lambda cell, j, per=per, ratio=ratio: (
                over_median(cell, j, per) >= ratio and cell.of("stream_peak")[j] > 100
            ),
        )
        for per, ratio in (("position", 1000), ("channel", 50.0))
    ),
    (
        NoOp(0.6, among=EpsilonOverMean(0.3)),
        lambda cell, j: 1 / value_ratio(cell, j),
        lambda cell, j: over_others(cell, j) > 0.3 and value_ratio(cell, j) < 0.6,
    ),
    (
        Broadcast(among=EpsilonOverMean(0.1)),
        lambda cell, j: 1 / cell.of("output_rank"),
        lambda cell, j: (
            over_others(cell, j) > 0.1 and 0.5 <= value_ratio(cell, j) <= 1.5 and cell.of("output_rank") < 1.5
        ),
    ),
]


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("detector", "strength", "detect"), FORMULAS, ids=lambda one: "" if callable(one) else repr(one)
)
def test_a_detector_matches_its_formula(causal, detector, strength, detect):
    """`strength` and `detect` of a cell and a position, everywhere; elsewhere NaN and False."""
    track = made(causal).track
    strengths, found = detector.strength(track), track.detect(detector)
    assert strengths.dims == found.dims == ("batch", "step", "layer", "head", "pos")
    assert found.dtype == bool
    strengths, found, hits, count = strengths.to_numpy(), found.to_numpy(), 0, 0
    for place in np.ndindex(*found.shape[:4]):
        cell = Cell(track.data, place)
        for j in range(LENGTH):
            expected = strength(cell, j) if j in cell.there else NAN
            assert strengths[place][j] == pytest.approx(expected, rel=2e-4, abs=1e-5, nan_ok=True), (place, j)
            assert found[place][j] == (j in cell.there and detect(cell, j)), (place, j)
            hits, count = hits + found[place][j], count + (j in cell.there)
    assert 0 < hits < count  # the comparison covered sinks and other positions


def test_the_default_detector_is_the_paper_s_definition():
    score = np.full((1, 12), 0.5)
    score[0, 4], score[0, 7] = 3.8, 3.2  # above the others' mean by 3.06 and 2.4
    assert planted(score).detect().to_numpy().ravel().nonzero()[0].tolist() == [4]


def test_a_single_position_has_no_others_to_compare_with():
    track = planted([[9.0, 1.0, 1.0]], real=[False, True, False])
    assert track.detect(EpsilonOverMean(0.9)).to_numpy().ravel().tolist() == [False, True, False]


@pytest.mark.filterwarnings("error")
def test_a_soft_weight_far_from_the_threshold_does_not_overflow():
    weight = MeanPlusStd(unit="percent", slope=50).strength(planted([[0.1, 3.7, 0.1, 0.1]]))
    assert weight.to_numpy().ravel()[0] == pytest.approx(0)


@pytest.mark.filterwarnings("error")
def test_a_head_without_output_has_no_broadcast_sink():
    """Its stable rank is NaN; so are the ratios of a head whose every value was set to zero."""
    assert not planted([[5.0, *[0.1] * 11]], value_norm=[[1.0] * 12], output_rank=[NAN]).detect(Broadcast()).any()
    zeroed = planted([[5.0, *[0.1] * 11]], value_norm=[[0.0] * 12], output_rank=[NAN])
    for detector in (Broadcast(), NoOp(), SmallValueNorm()):
        assert not zeroed.detect(detector).any()
        assert detector.strength(zeroed).isnull().all()


@pytest.mark.parametrize(
    ("detector", "variable", "quantity"),
    [
        (SmallValueNorm(), "value_norm", "values"),
        (NoOp(), "value_norm", "values"),
        (Broadcast(), "value_norm", "values"),
        (Broadcast(), "output_rank", "outputs"),
        (ResidualPeak(), "stream_peak", "stream"),
        (ResidualPeak(), "stream_median", "stream"),
        (ResidualPeak(per="channel"), "stream_channel_median", "stream"),
    ],
)
def test_a_detector_that_lacks_a_quantity_says_how_to_record_it(detector, variable, quantity):
    track = made(False, unlike=[variable]).track
    message = rf"holds no {variable}\. .*record_sinks=Record\(\['{quantity}'\]\)\), with Record from sinklens\.sinks"
    with pytest.raises(TrackError, match=message):
        track.detect(detector)


@dataclass(frozen=True)
class AboveTen(Detector):
    """The example of the module docstring."""

    def detect(self, track):
        return self.strength(track) > 10


def test_a_five_line_detector_works_like_the_built_in_ones():
    track = planted([[10.5, 0.5, 0.5], [0.5, 10.0, 0.5]])
    assert track.detect(AboveTen()).to_numpy()[0, :, 0, 0].tolist() == [[True, False, False], [False] * 3]
    xr.testing.assert_equal(AboveTen().strength(track), track.scores())


def test_a_unit_that_a_track_lacks_is_refused():
    track = planted([[0.0, 4.0, 0.0, 0.0]])
    track.data.attrs["block_length"] = 2
    with pytest.raises(TrackError, match=r"unit 'visible' is not available for this track of a block-causal run"):
        track.detect(EpsilonOverMean(0.1, unit="visible"))


def test_a_threshold_that_no_column_sum_of_a_track_can_exceed_warns():
    """One position receives all attention and still is not a sink."""
    track = planted([[0.0, 4.0, 0.0, 0.0]])
    with pytest.warns(UserWarning, match=r"epsilon = 4.0 can never be met: a column sum .* is at most 4, its number"):
        assert not track.detect(EpsilonOverMean(4.0)).any()


@pytest.mark.parametrize(
    "detector",
    [
        EpsilonOverMean(3.9),
        EpsilonOverMean(99, unit="percent"),
        EpsilonOverMean(0.99, unit="fraction"),
        EpsilonOverMean(0.99, unit="visible"),
        MeanPlusStd(k=1.7),
        SinkRate(epsilon=0.99),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_threshold_just_below_the_maximum_is_met(detector):
    assert planted([[0.0, 4.0, 0.0, 0.0]]).detect(detector).sum() == 1


class OneLayer(Detector):
    def detect(self, track):
        return track.scores().isel(layer=0) > 1


class Strengths(Detector):
    def detect(self, track):
        return track.scores()


REFUSED = [
    *(
        (make, SinklensError, text)
        for make, text in (
            (
                lambda: EpsilonOverMean(unit="Percent"),
                "unit must be one of sum, percent, fraction, visible; got 'Percent'",
            ),
            (lambda: MeanPlusStd(unit=["sum"]), r"unit must be one of sum, percent, fraction, visible; got \['sum'\]"),
            (lambda: EpsilonOverMean(float("nan")), "epsilon must be a finite number; got nan"),
            (lambda: EpsilonOverMean("3"), "epsilon must be a finite number; got '3'"),
            (
                lambda: EpsilonOverMean(2, "fraction"),
                "epsilon must be below 1 with unit='fraction', .* got 2. Choose a",
            ),
            (lambda: EpsilonOverMean(unit="visible"), "epsilon must be below 1 with unit='visible', .* 'sum'"),
            (lambda: EpsilonOverMean(100, "percent"), "epsilon must be below 100 with unit='percent', .* got 100"),
            (lambda: SinkRate(1), "epsilon must be a finite number of at least 0 and below 1; got 1"),
            (lambda: ResidualPeak(floor=-1), "floor must be a finite number of at least 0; got -1"),
            (lambda: TopK(2.5), "k must be an integer; got 2.5"),
            (lambda: TopK(True), "k must be an integer; got True"),
            (
                lambda: MeanPlusStd(over="head"),
                "over must be a tuple that holds 'layer', 'head', both or neither; got 'head'",
            ),
            (lambda: MeanPlusStd(over=("layer", "batch")), r"over must be a tuple .* got \('layer', 'batch'\)"),
            (lambda: SinkRate(share=10), "share must be a number from 0 to 1; got 10"),
            (lambda: SmallValueNorm(0), "ratio must be a finite number above 0; got 0"),
            (lambda: ResidualPeak(per="token"), "per must be one of position, channel; got 'token'"),
            (lambda: NoOp(ratio=-1), "ratio must be a finite number above 0; got -1"),
            (lambda: NoOp(among=EpsilonOverMean), r"among must be a detector such as TopK\(1\); got <class"),
            (lambda: StrongestKeys(sink=EpsilonOverMean), "sink must be a detector such as"),
            (lambda: Broadcast(rank=1), "rank must be a finite number above 1; got 1"),
            (lambda: Broadcast(low=2, high=1), "low must not exceed high; got 2 and 1"),
        )
    ),
    *(
        (lambda detector=detector: planted([[1.0, 1.0]]).detect(detector), TrackError, text)
        for detector, text in (
            (OneLayer(), r"detect of OneLayer returned bool over .* it must return bool over .*'layer': 1"),
            (Strengths(), "detect of Strengths returned float32 over"),
        )
    ),
    *(
        (
            partial(call, detector=detector),
            SettingError,
            rf"detector must be a detector such as TopK\(1\).*; got {got}",
        )
        for call in (MaskSinks, planted([[1.0, 1.0]]).detect)
        for detector, got in ((EpsilonOverMean, "<class"), ("TopK", "'TopK'"))
    ),
    (
        lambda: made(False).track.need("entropy"),
        TrackError,
        r"holds no entropy\. .*record_sinks=Record\(\[a Quantity that fills it\]\)",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_invalid_settings_and_detectors_and_missing_variables_are_rejected(call, error, text):
    with pytest.raises(error, match=text):
        call()
