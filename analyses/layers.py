"""Are there fewer and stronger sinks in deep layers?

    sinklens analyse layers tiny-llada tiny-llama

Draws the layer × head map of the strongest key's score averaged over steps (Rulli et al., 2510.15731, Fig. 5), counts
the sinks of each layer, and, for every prompt, fits a line to counts and strengths over depth.

Limitation: a model with four layers has no deep layers to speak of; the trend of a line through four points says which
end is higher, not that the paper's finding for 32 layers holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.intervals import corrected, interval_table, verdict
from sinklens.analyses.study import SINK, Study
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack, Unit, motion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

UNITS: dict[Unit, str] = {"sum": "main_sum", "visible": "main_visible"}  # unit -> variable of the map
PER_LAYER = {
    "count": "sinks per head and step",
    "places": "positions that are a sink in at least one head, per step",
    "heads": "share of (step, head) with a sink",
    "strength": "score of the sinks (column sum, uniform = 1)",
    "main": "score of the strongest key (column sum, uniform = 1)",
}
CLAIMS = {"count": "fewer", "places": "fewer", "heads": "fewer", "strength": "stronger", "main": "stronger"}


@dataclass
class Layers(Study):
    """See the module."""

    name: ClassVar[str] = "layers"
    under_policies: ClassVar[bool] = True

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """See `by_layer`."""
        return by_layer(self.generate(model, prompts, settings).track)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``map``: Fig. 5; ``layers``: sinks per layer; ``trend``: the change from the first layer to the last, and
        whether the paper's claim "fewer, stronger in deep layers" holds.
        """
        trend = corrected(interval_table(measured, [f"trend_{name}" for name in PER_LAYER], self.seed, null=0.0))
        names = trend["measure"].str.removeprefix("trend_")
        return {
            "map": interval_table(measured, list(UNITS.values()), self.seed),
            "layers": interval_table(measured, list(PER_LAYER), self.seed),
            "trend": trend.assign(
                meaning=[f"{PER_LAYER[name]}: last layer minus first, along the fitted line" for name in names],
                claim=[f"{CLAIMS[name]} in deep layers" for name in names],
                verdict=[
                    _holds(CLAIMS[name], row.estimate, row.low, row.high, row.p_holm)
                    for name, row in zip(names, trend.itertuples(), strict=True)
                ],
            ),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``map`` (Fig. 5), one row of panels per model, and ``depth``, the curves over layers."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import curves, layer_head_map
        from sinklens.views.figures import panels

        maps, axes = panels(len(UNITS) * len(measured), columns=len(UNITS), size=(5, 4))
        shown = ((name, data, unit) for name, data in measured.items() for unit in UNITS)
        for (name, data, unit), ax in zip(shown, axes, strict=True):
            layer_head_map(data[UNITS[unit]].mean("prompt").to_numpy(), name, unit, ax=ax)
        depth, axes = panels(len(PER_LAYER), columns=3, size=(4.5, 3.4))
        for measure, ax in zip(PER_LAYER, axes, strict=True):
            curves(interval_table(measured, [measure], self.seed), "layer", ax).set(
                xlabel="layer", ylabel=wrapped(PER_LAYER[measure], 28)
            )
            ax.locator_params(axis="x", integer=True)
        depth.suptitle(f"Means over prompts with 95 % intervals; {SINK}", fontsize=9)
        return {"map": maps, "depth": depth}


def by_layer(track: SinkTrack) -> xr.Dataset:
    """Number and strength of sinks, by layer.

    ``main_sum`` and ``main_visible`` [prompt, layer, head]: score of the strongest key, averaged over the steps that
    have one, in the unit of that name; NaN if the track does not have it (`TrackData.units`). [prompt, layer]:
    ``count``, sinks per head and step; ``places``, positions that are a sink in at least one head, per step; ``heads``,
    share of (step, head) with a sink; ``strength``, mean score of the sinks, NaN without any; ``main``, mean of
    ``main_sum``. ``trend_…`` [prompt]: see `trend`.
    """
    score, exists = track.scores(), motion.existing(track)
    alive = exists.any("pos")
    found = track.detect() & exists
    strongest = score.fillna(0).argmax("pos")
    some = score.max("pos") > 0
    maps = {
        variable: track.scores(unit).isel(pos=strongest).where(some).mean("step").drop_vars("pos", errors="ignore")
        for unit, variable in UNITS.items()
        if unit in track.units
    }
    maps = {variable: maps.get(variable, maps["main_sum"] * np.nan) for variable in UNITS.values()}
    layers = {
        "count": found.sum("pos").where(alive).mean(("step", "head")),
        "places": found.any("head").sum("pos").where(alive.any("head")).mean("step"),
        "heads": found.any("pos").where(alive).mean(("step", "head")),
        "strength": score.where(found).mean(("step", "head", "pos")),
        "main": maps["main_sum"].mean("head"),
    }
    data = xr.Dataset({**maps, **layers, **{f"trend_{name}": trend(value) for name, value in layers.items()}})
    return data.rename(batch="prompt").drop_vars(["batch", "prompt"], errors="ignore").astype(np.float64)


def trend(values: xr.DataArray) -> xr.DataArray:
    """Change from the first layer to the last along the least-squares line through all layers that have a value.

    NaN with fewer than two such layers.
    """
    depth = xr.DataArray(np.linspace(0, 1, values.sizes["layer"]), dims="layer").where(values.notnull())
    away = depth - depth.mean("layer")
    spread = (away**2).sum("layer")
    return (away * (values - values.mean("layer"))).sum("layer") / spread.where(spread > 0)


def _holds(claim: str, estimate: float, low: float, high: float, p: float) -> str:
    """Whether the interval of the trend lies on the claim's side of 0, given its corrected p value."""
    if claim == "stronger":
        return verdict(estimate, low, high, 0.0, above="holds", below="the other way", p=p)
    return verdict(-estimate, -high, -low, 0.0, above="holds", below="the other way", p=p)
