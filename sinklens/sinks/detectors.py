"""Definitions of what a sink is, as small classes with one interface.

A detector answers two questions about a track, both [batch, step, layer, head, pos]: `detect`, where the sinks are, and
`strength`, how strong they are (larger is stronger; NaN where a position does not exist). A definition that pools over
heads or layers gives all of them the same answer. Detectors that need more than the scores request it with
`SinkTrack.need`, whose error says how to record it. A new definition is one subclass:

    @dataclass(frozen=True)
    class AboveTen(Detector):
        def strength(self, track):
            return track.scores()

        def detect(self, track):
            return self.strength(track) > 10

Pitfall: thresholds from papers depend on unit and length. 3 above the mean is 0.6 % of all attention for 512 positions
and 4.7 % for 64.

Limitation: interventions and cache policies call `detect` with a track of one step, so a definition that compares steps
finds nothing there; see docs/concepts/your-own.md.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import xarray as xr
from annotated_types import Ge, Gt, Lt

from sinklens.errors import require, warn_caller
from sinklens.sinks.data import AXES, TrackData, Unit
from sinklens.utils.arguments import (
    NonNegative,
    Number,
    Positive,
    Share,
    Words,
    check_arguments,
    checked,
    plainly_shown,
)

ALL_ATTENTION = {"percent": 100, "fraction": 1, "visible": 1}  # in units whose scale does not depend on the length


class Detector(ABC):
    """One definition of a sink; the attributes of one that is a dataclass are checked by their declared types."""

    ARGUMENT: ClassVar[str] = "a detector such as TopK(1)"

    within_layer: ClassVar[bool] = False
    """Whether its sinks of a layer depend on this layer alone, so that a rule for some layers need not score others."""

    def __post_init__(self) -> None:
        check_arguments(self)

    @abstractmethod
    def detect(self, track: TrackData) -> xr.DataArray:
        """True where `track` has a sink: [batch, step, layer, head, pos]."""

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        """How strong a sink each position is, [batch, step, layer, head, pos]; by default its score."""
        return track.scores()


def everywhere(values: xr.DataArray, track: TrackData) -> xr.DataArray:
    """`values`, which may lack some axes, on all five axes of `track`."""
    return values.broadcast_like(track.data["score"]).transpose(*AXES)


def over_others(values: xr.DataArray) -> xr.DataArray:
    """For each position, the mean of `values` over the other positions that exist."""
    return (values.sum("pos") - values) / (values.notnull().sum("pos") - 1).clip(min=1)


@plainly_shown
@dataclass(frozen=True)
class EpsilonOverMean(Detector):
    """The paper's definition (Rulli et al., 2510.15731, Eq. 3).

    Position j is a sink if Ā[j] > (1 / (S − 1)) Σ_{k≠j} Ā[k] + ε, with Ā the score in `unit`. Its strength is
    Ā[j] minus that mean, to be compared with ε.

    Attributes:
        epsilon: ε, in `unit`; the paper uses 3 and does not state the unit.
        unit: "sum" (uniform attention is 1), "percent", "fraction" or "visible".

    Raises:
        SettingError: an ε of all attention or more, which is 100 in "percent" and 1 in "fraction" and "visible".
    """

    within_layer: ClassVar[bool] = True

    epsilon: Number = 3.0
    unit: Unit = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = ALL_ATTENTION.get(self.unit, np.inf)
        require(
            self.epsilon < most,
            f"epsilon must be below {most} with unit={self.unit!r}, in which a key that receives all attention has "
            f"{most}; got {self.epsilon}. Choose a smaller epsilon, or a unit of another scale: 'percent' (0 to 100) "
            f"or 'sum' (uniform attention is 1).",
        )

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        score = track.scores(self.unit)
        return score - over_others(score)

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        if self.unit == "sum" and self.epsilon >= track.data.sizes["pos"]:
            warn_caller(
                f"epsilon = {self.epsilon} can never be met: a column sum of this track is at most "
                f"{track.data.sizes['pos']}, its number of positions. Use a smaller epsilon.",
                UserWarning,
            )
        return self.strength(track) > self.epsilon


@dataclass(frozen=True)
class TopK(Detector):
    """The `k` strongest keys of every head and step, regardless of their score; fewer where fewer exist.

    A head with an all-zero pattern has no sink.

    Attributes:
        k: how many keys; only positions that exist are taken.
    """

    within_layer: ClassVar[bool] = True

    k: int = 1

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        score, strongest = track.data["score"], track.top(self.k).to_numpy()
        found = np.zeros((*score.shape[:-1], score.sizes["pos"] + 1), dtype=bool)
        np.put_along_axis(found, strongest, True, axis=-1)  # −1, where there is no key, is the extra place
        return score.copy(data=found[..., :-1])


@plainly_shown
@dataclass(frozen=True)
class MeanPlusStd(Detector):
    """Mass above mean + k · std (Sink-Aware Pruning, 2602.17664; with k = 3 in Attention Floating, 2601.07894).

    m(j) is the score in `unit`, averaged over `over`; mean and population standard deviation are taken over the
    positions that exist. Position j is a sink if m(j) > mean + k · std. Its strength is the soft weight
    sigmoid(slope · (m(j) − mean − k · std)), in (0, 1), 0.5 at the threshold.

    Attributes:
        k: number of standard deviations.
        over: axes over which the mass is averaged; the source pools layers and heads, () treats each head separately.
        unit: unit of the mass, which also scales `slope`.
        slope: slope of the sigmoid, per unit of mass.
    """

    k: Number = 2.0
    over: Annotated[
        tuple[Literal["layer", "head"], ...], Words("a tuple that holds 'layer', 'head', both or neither")
    ] = ("layer", "head")
    unit: Unit = "sum"
    slope: Number = 5.0

    def _margin(self, track: TrackData) -> xr.DataArray:
        mass = track.scores(self.unit).mean(self.over) if self.over else track.scores(self.unit)
        return mass - mass.mean("pos") - self.k * mass.std("pos")

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        margin = self._margin(track)
        # the sigmoid, without overflow
        return everywhere(margin.copy(data=(1 + np.tanh(self.slope / 2 * margin.to_numpy())) / 2), track)

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        return everywhere(self._margin(track) > 0, track)


@plainly_shown
@dataclass(frozen=True)
class SinkRate(Detector):
    """Positions that are sinks in many heads (Gu et al., 2410.10781, Sec. 3, there for the first position).

    α_j = mean attention that key j receives from the queries that can see it; for bidirectional attention, all S of
    them. The rate of j, which is its strength, is the share of (layer, head) pairs with α_j > ε. Position j is a sink
    if its rate reaches `share`.

    Attributes:
        epsilon: threshold ε on α, which is from 0 to 1; the source uses 0.3.
        share: required share of all heads of all layers; the source reports the rate and sets no threshold.
    """

    epsilon: Annotated[float | int, Ge(0), Lt(1)] = 0.3
    share: Share = 0.1

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        alpha = track.scores("visible")
        return everywhere((alpha > self.epsilon).mean(("layer", "head")), track).where(alpha.notnull())

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        rate = self.strength(track)
        return (rate >= self.share) & (rate > 0)


@plainly_shown
@dataclass(frozen=True)
class SmallValueNorm(Detector):
    """Positions with a small value vector (One Token Is Enough, 2601.19657; value drain of 2410.13835). Needs "values".

    r(j) = |v_j| / mean_k |v_k|, k over the positions that exist. Position j is a sink if r(j) < `ratio`; its strength
    is 1 / r(j). The sources state no threshold; 0.2 is Unifying View's (2606.08105).

    Attributes:
        ratio: upper bound on r.
    """

    ratio: Positive = 0.2

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        return 1 / value_ratio(track)

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        return value_ratio(track) < self.ratio


@plainly_shown
@dataclass(frozen=True)
class ResidualPeak(Detector):
    """Massive activations in the residual stream that the layer reads (2402.17762). Needs "stream".

    Position j is a sink if its peak p_j = max_c |h[j, c]| exceeds `floor` and is at least `ratio` times a median: of
    |h| over all positions and channels (``per="position"``, as in the source), or of |h[:, c]| over positions, for the
    channel c of the peak (``per="channel"``, since in LLaDA a channel can be high everywhere, 2605.06366). Its strength
    is p_j / median. All heads of a layer get the same answer.

    Attributes:
        ratio: minimum ratio of peak to median.
        floor: minimum peak. Both defaults are the source's, chosen for models with billions of parameters.
        per: which median to use.
    """

    ratio: Positive = 1000.0
    floor: NonNegative = 100.0
    per: Literal["position", "channel"] = "position"

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        median = "stream_median" if self.per == "position" else "stream_channel_median"
        stream = track.need("stream_peak", median)
        return everywhere(stream["stream_peak"] / stream[median], track)

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        high = track.need("stream_peak")["stream_peak"] > self.floor
        return (self.strength(track) >= self.ratio) & everywhere(high, track)


@plainly_shown
@dataclass(frozen=True)
class NoOp(SmallValueNorm):
    """Sinks that carry almost no information (Unifying View, 2606.08105). Needs "values".

    A position found by `among` whose value-norm ratio r(j) = |v_j| / mean_k |v_k| is below `ratio`. Its strength is
    1 / r(j).

    Attributes:
        ratio: upper bound on r.
        among: detector that finds the candidate sinks.
    """

    among: Detector = field(default_factory=EpsilonOverMean)

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        return self.among.detect(track) & super().detect(track)


@plainly_shown
@dataclass(frozen=True)
class Broadcast(Detector):
    """Sinks that send the same message to all queries (Unifying View, 2606.08105). Needs "values" and "outputs".

    A position found by `among` whose value-norm ratio r(j) is ordinary, `low` to `high`, in a head whose output
    O = A·V has a stable rank |O|_F² / σ₁² below `rank`: every query receives nearly the same output. Its strength is
    1 / rank of the head, in (0, 1].

    Attributes:
        low, high: bounds on r.
        rank: upper bound on the stable rank.
        among: detector that finds the candidate sinks.
    """

    low: NonNegative = 0.5
    high: Positive = 1.5
    rank: Annotated[float | int, Gt(1)] = 1.5
    among: Detector = field(default_factory=EpsilonOverMean)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low <= self.high, f"low must not exceed high; got {self.low} and {self.high}.")

    @checked
    def strength(self, track: TrackData) -> xr.DataArray:
        return everywhere(1 / track.need("output_rank")["output_rank"], track).where(track.scores().notnull())

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        ratio = value_ratio(track)
        flat = everywhere(track.need("output_rank")["output_rank"] < self.rank, track)
        return self.among.detect(track) & (ratio >= self.low) & (ratio <= self.high) & flat


def value_ratio(track: TrackData) -> xr.DataArray:
    """|v_j| / mean_k |v_k| over the positions that exist, [batch, step, layer, head, pos]; needs "values"."""
    norm = track.need("value_norm")["value_norm"]
    return norm / norm.mean("pos")
