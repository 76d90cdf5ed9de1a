"""Does masking every head's strongest key cost accuracy because that key is a sink?

    sinklens analyse necessity tiny-llada tiny-llama

Every head has a strongest key at every step; it is a sink only where it stands out (Rulli et al., 2510.15731, Eq. 3:
its column sum is more than ε above the mean of the others'). The paper masks strongest keys and speaks of sinks. This
study separates the two: the strongest key of the unchanged run's previous step (steady masking, answers.py) is masked
everywhere; only in the heads and steps where it is a sink; and only where it is not a sink. The control of each masks a
random key in the same heads and steps. ``share`` is the share of heads and steps concerned.

Caveat: heads with and without sinks do different things. A cost where there are sinks is not necessarily caused by the
key being a sink, and the shares differ, so compare each cost with its control, not with the other costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects, unchanged
from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.study import Study
from sinklens.interventions import MaskSinks
from sinklens.sinks import Detector, EpsilonOverMean, SinkTrack
from sinklens.sinks.data import TrackData

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

Part = Literal["all", "sink", "other"]
PARTS: dict[Part, str] = {
    "all": "in every head and step",
    "sink": "where it is a sink",
    "other": "where it is not a sink",
}
PICKS = {"strongest": "strongest key", "random": "random key"}
MEASURES = {
    "kl": MEANINGS["kl"],
    "cost": "share of word problems lost by masking",
    "right": MEANINGS["right"],
    "changed": MEANINGS["changed"],
}
BASE = {"base": "share of word problems answered right with nothing masked"}
SHARE = {"share": "share of all heads and steps"}
LESS = {name: f"strongest minus random key: {MEASURES[name]}" for name in ("kl", "cost")}


@dataclass(frozen=True)
class StrongestKey(Detector):
    """The strongest key of every head and step, or only those that are sinks, or only those that are not.

    Attributes:
        part: "all", "sink" or "other".
        sink: the definition of a sink.
    """

    part: Part = "all"
    sink: Detector = field(default_factory=EpsilonOverMean)

    def detect(self, track: TrackData) -> xr.DataArray:
        """True at one position of each head and step, the first of equals; at none where all scores are 0."""
        score = track.scores()
        first = score.fillna(-np.inf).argmax("pos")
        strongest = (xr.DataArray(np.arange(score.sizes["pos"]), dims="pos") == first) & (score > 0)
        strongest = strongest.transpose(*score.dims)
        if self.part == "all":
            return strongest
        sinks = self.sink.detect(track)
        return strongest & (sinks if self.part == "sink" else ~sinks)


@dataclass
class Necessity(Study):
    """See the module.

    Attributes:
        sink: the definition of a sink; by default the paper's, with ε = 3 in column sums.
    """

    name: ClassVar[str] = "necessity"
    together: ClassVar[bool] = False
    sink: Detector = field(default_factory=EpsilonOverMean)

    def measure(self, model: "Model", prompts: Sequence[Any], settings: Mapping[str, Any]) -> xr.Dataset:
        """`MEASURES` [prompt, part, pick]; ``share`` [prompt, part]; ``base`` [prompt]."""

        def one(prompt: Any) -> xr.Dataset:
            track = unchanged(self, model, prompt, settings)
            listed = {"unchanged": [], **self.interventions(track)}
            found = effects(self, model, prompt, settings, listed)
            right = found["right"].to_numpy()
            values = {name: found[name].to_numpy()[1:] for name in ("kl", "right", "changed")}
            values["cost"] = right[0] - right[1:]
            shape = (len(PARTS), len(PICKS))
            return xr.Dataset(
                {name: (("part", "pick"), part.reshape(shape)) for name, part in values.items()}
                | {"share": ("part", [self._share(track, part) for part in PARTS]), "base": ((), right[0])},
                coords={"part": list(PARTS), "pick": list(PICKS)},
            )

        return each_prompt(prompts, one)

    def interventions(self, track: SinkTrack) -> dict[str, MaskSinks]:
        """One intervention per part and pick, in that order, from the track of the unchanged run."""
        masks: dict[str, MaskSinks] = {}
        for part in PARTS:
            detector = StrongestKey(part, self.sink)
            masks[f"{part} strongest"] = MaskSinks(top_k=None, detector=detector, source=track, seed=self.seed)
            masks[f"{part} random"] = MaskSinks(
                top_k=None, detector=detector, source=track, pick="random", seed=self.seed
            )
        return masks

    def _share(self, track: SinkTrack, part: Part) -> float:
        before = track.isel(step=slice(0, -1))
        return float(StrongestKey(part, self.sink).detect(before).any("pos").mean())

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``: every measure by part and pick; ``shares``; ``claims``: strongest minus random key."""
        costs = interval_table(measured, [*MEASURES, *BASE], self.seed)
        shares, claims = interval_table(measured, list(SHARE), self.seed), _claims(measured, self.seed)
        tables = {"costs": costs, "shares": shares, "claims": claims}
        meanings = {"costs": MEASURES | BASE, "shares": SHARE, "claims": LESS}
        return {
            name: table.assign(where=table["part"].map(PARTS), meaning=table["measure"].map(meanings[name]))
            for name, table in tables.items()
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost and KL, a row of panels per model."""
        from sinklens.views.effects import costs_by_part

        costs = interval_table(measured, list(MEASURES), self.seed)
        return {"costs": costs_by_part(costs, interval_table(measured, ["share"], self.seed), PARTS, PICKS, MEASURES)}


def _claims(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """Cost of masking the strongest key minus that of a random key in the same heads and steps, paired by prompt.

    A model without a right answer has nothing to lose: its cost is not measured.
    """
    excess = {}
    for name, data in measured.items():
        less = data[list(LESS)].sel(pick="strongest") - data[list(LESS)].sel(pick="random")
        excess[name] = less if bool((data["base"] > 0).any()) else less.assign(cost=less["cost"] * np.nan)
    return judged(interval_table(excess, list(LESS), seed, null=0.0))
