"""Does a model have attention sinks, and by whose definition?

    sinklens analyse existence tiny-llada tiny-llama

Draws the histogram of scores (Rulli et al., 2510.15731, Figs. 3 and 9) and the share of positions that are not sinks
against the threshold ε (Fig. 10), in every unit that ε could refer to, and counts what each detector finds.

Each count comes with the value norm at those sinks, relative to the median of the row. About 1 means that they are
ordinary tokens that send a message. The no-op sinks of the usual explanation, which absorb attention that has nowhere
to go, have values near zero (sinklens/sinks/values.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.estimates.scales import LOG, SHARE, Scale
from sinklens.analyses.estimates.tables import interval_table
from sinklens.analyses.study import Study
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import (
    Broadcast,
    Detector,
    EpsilonOverMean,
    MeanPlusStd,
    NoOp,
    Record,
    ResidualPeak,
    SinkRate,
    SinkTrack,
    SmallValueNorm,
)
from sinklens.sinks.track import Unit
from sinklens.sinks.values import values_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from sinklens.model import Model

EPSILONS = (0, 2, 3, 4, 6, 8, 10)  # those of Fig. 10
UNITS: dict[Unit, float] = {
    "sum": 1.0,
    "percent": 1.0,
    "fraction": 0.01,
    "visible": 0.01,
}  # factor on ε and on the bins
BINS = np.linspace(0, 50, 101)  # the range of Figs. 3 and 9
DETECTORS: dict[str, Detector] = {
    "epsilon-over-mean (sum, 3)": EpsilonOverMean(),
    "epsilon-over-mean (percent, 3)": EpsilonOverMean(unit="percent"),
    "mean + 2 std, pooled": MeanPlusStd(),
    "mean + 3 std, per head": MeanPlusStd(k=3, over=()),
    "sink rate (0.3, a tenth of the heads)": SinkRate(),
    "small value norm": SmallValueNorm(),
    "residual peak (100, 1000 medians)": ResidualPeak(),
    "residual peak (10 medians)": ResidualPeak(ratio=10, floor=0),
    "residual peak (10 medians of the channel)": ResidualPeak(ratio=10, floor=0, per="channel"),
    "no-op": NoOp(),
    "broadcast": Broadcast(),
}
NO_SINK = "share of positions that are not sinks; epsilon in the unit of the row"
MEANINGS = {
    "found": "share of positions that are sinks",
    "heads": "share of heads and steps with a sink",
    "value_ratio": "value norm at the sinks / median value norm of the row",
    "no_op": "share of the sinks whose value norm is below 0.2 medians",
}


@dataclass
class Existence(Study):
    """See the module."""

    name: ClassVar[str] = "existence"
    scales: ClassVar[Mapping[str, Scale]] = {"found": SHARE, "heads": SHARE, "value_ratio": LOG}
    under_policies: ClassVar[bool] = True

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        record = Record(["values", "stream", "outputs"])
        return sink_shares(self.generate(model, prompts, settings, record_sinks=record).track)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``thresholds``: the curves of Fig. 10; ``detectors``: what each detector finds."""
        detectors = interval_table(measured, list(MEANINGS), self.seed)
        thresholds = interval_table(measured, ["no_sink"], self.seed)
        in_unit = (thresholds["epsilon"] * thresholds["unit"].map(UNITS)).round(9)
        return {
            "thresholds": thresholds.assign(epsilon=in_unit, meaning=NO_SINK),
            "detectors": detectors.assign(meaning=detectors["measure"].map(MEANINGS)),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``histogram`` and ``thresholds``, with one panel per unit."""
        from sinklens.analyses.figures import score_histogram
        from sinklens.views.charts import curves
        from sinklens.views.figures import panels

        histogram, axes = panels(len(UNITS))
        for unit, ax in zip(UNITS, axes, strict=True):
            shares = {
                name: data["histogram"].sel(unit=unit).mean("prompt").to_numpy() for name, data in measured.items()
            }
            score_histogram(BINS * UNITS[unit], shares, unit, ax=ax)
        thresholds, axes = panels(len(UNITS))
        table = interval_table(measured, ["no_sink"], self.seed)
        for unit, ax in zip(UNITS, axes, strict=True):
            rows = table[table["unit"] == unit]
            curves(rows.assign(epsilon=rows["epsilon"] * UNITS[unit]), "epsilon", ax)
            ax.set(xlabel=f"threshold ε above the mean of the others ({unit})", ylabel="share that are not sinks")
        return {"histogram": histogram, "thresholds": thresholds}


def sink_shares(track: SinkTrack) -> xr.Dataset:
    """Shares of positions, over all steps, layers and heads of a prompt.

    ``histogram`` [prompt, unit, bin]: share of positions whose score falls into the bin; ``no_sink`` [prompt, unit,
    epsilon]: share that are not sinks; ``found`` [prompt, detector]: share that the detector finds; ``heads`` [prompt,
    detector]: share of (step, layer, head) with at least one sink; ``value_ratio`` and ``no_op`` [prompt, detector]:
    see `sinklens.sinks.values.values_at`, NaN for a prompt without sinks. A unit that the track does not have
    (`TrackData.units`) is NaN, and so is the detector that needs it.
    """
    units = [unit for unit in UNITS if unit in track.units]
    detectors = {name: one for name, one in DETECTORS.items() if "visible" in units or not isinstance(one, SinkRate)}
    found = [detector.detect(track) for detector in detectors.values()]
    values = [values_at(track, part) for part in found]
    data = xr.Dataset(
        {
            "histogram": (("prompt", "unit", "bin"), np.stack([histogram_of(track, unit) for unit in units], axis=1)),
            "no_sink": (("prompt", "unit", "epsilon"), np.stack([no_sink_of(track, unit) for unit in units], axis=1)),
            "found": (("prompt", "detector"), np.stack([_share(track, part) for part in found], axis=1)),
            "heads": (("prompt", "detector"), np.stack([_heads(track, part) for part in found], axis=1)),
            "value_ratio": (("prompt", "detector"), np.stack([part["value_ratio"] for part in values], axis=1)),
            "no_op": (("prompt", "detector"), np.stack([part["no_op"] for part in values], axis=1)),
        },
        coords={"unit": units, "bin": BINS[:-1], "epsilon": list(EPSILONS), "detector": list(detectors)},
    )
    return data.reindex(unit=list(UNITS), detector=list(DETECTORS))


def _positions(track: SinkTrack) -> np.ndarray:
    """Number of positions over all steps, layers and heads, per prompt."""
    return track.scores().notnull().sum(("step", "layer", "head", "pos")).to_numpy()


def histogram_of(track: SinkTrack, unit: Unit) -> np.ndarray:
    """Share of positions per bin; scores above the last edge count in the last bin."""
    scores = track.scores(unit).to_numpy() / UNITS[unit]
    counts = [np.histogram(np.minimum(row[~np.isnan(row)], BINS[-1]), BINS)[0] for row in scores]
    return np.stack(counts) / _positions(track)[:, None]


def no_sink_of(track: SinkTrack, unit: Unit) -> np.ndarray:
    strength = EpsilonOverMean(0, unit).strength(track)
    return np.stack([1 - _share(track, strength > epsilon * UNITS[unit]) for epsilon in EPSILONS], axis=1)


def _share(track: SinkTrack, found: xr.DataArray) -> np.ndarray:
    return found.sum(("step", "layer", "head", "pos")).to_numpy() / _positions(track)


def _heads(track: SinkTrack, found: xr.DataArray) -> np.ndarray:
    exists = track.scores().notnull().any("pos")
    return (found.any("pos").sum(("step", "layer", "head")) / exists.sum(("step", "layer", "head"))).to_numpy()
