"""Is it sinks that are missed when every head's strongest key is masked?

    sinklens analyse necessity tiny-llada tiny-llama

Every head has a strongest key at every step; it is a sink only where it stands out (Rulli et al., 2510.15731, Eq. 3:
its column sum is more than ε above the mean of the others'). The paper masks strongest keys and speaks of sinks. This
study parts the two: the strongest key of the unchanged run's step before (steady, swept.py) is masked everywhere; in
those heads and steps alone where it is a sink; and in those alone where it is none. The control of each masks a random
key in the same heads and steps. ``share`` tells in how many heads and steps that is.

One way this fails: heads with sinks and heads without do different things. A cost that arises where there are sinks is
not shown to come from the sink being one, and the share differs, so costs are held to their control, not to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects, unchanged
from sinklens.analyses.intervals import interval_table, verdict
from sinklens.analyses.study import Study
from sinklens.interventions import MaskSinks
from sinklens.sinks import Detector, EpsilonOverMean, SinkTrack
from sinklens.sinks.data import TrackData

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

Part = Literal["all", "sink", "other"]
PARTS: dict[Part, str] = {"all": "in every head and step", "sink": "where it is a sink", "other": "where it is no sink"}
PICKS = {"strongest": "strongest key", "random": "random key"}
MEASURES = {
    "kl": MEANINGS["kl"],
    "cost": "word problems lost by masking",
    "right": MEANINGS["right"],
    "changed": MEANINGS["changed"],
}
BASE = {"base": "word problems answered right with nothing masked"}
SHARE = {"share": "heads and steps that the part is of all"}
LESS = {name: f"strongest less random key: {MEASURES[name]}" for name in ("kl", "cost")}


@dataclass(frozen=True)
class StrongestKey(Detector):
    """The strongest key of every head and step, or only those that are sinks, or that are none.

    Attributes:
        part: "all", "sink" or "other".
        sink: what a sink is.
    """

    part: Part = "all"
    sink: Detector = field(default_factory=EpsilonOverMean)

    def detect(self, track: TrackData) -> xr.DataArray:
        """True at one position at most of each head and step: of equals the first, and none where all scores are 0."""
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
        sink: what a sink is; by default the paper's definition with ε = 3 in column sums.
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
        """One per part and pick, in that order, by the track of the unchanged run."""
        made: dict[str, MaskSinks] = {}
        for part in PARTS:
            detector = StrongestKey(part, self.sink)
            made[f"{part} strongest"] = MaskSinks(top_k=None, detector=detector, source=track, seed=self.seed)
            made[f"{part} random"] = MaskSinks(
                top_k=None, detector=detector, source=track, pick="random", seed=self.seed
            )
        return made

    def _share(self, track: SinkTrack, part: Part) -> float:
        before = track.isel(step=slice(0, -1))
        return float(StrongestKey(part, self.sink).detect(before).any("pos").mean())

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``: every measure by part and pick; ``shares``; ``claims``: strongest less random key."""
        costs = interval_table(measured, [*MEASURES, *BASE], self.seed)
        shares, claims = interval_table(measured, list(SHARE), self.seed), _claims(measured, self.seed)
        told = {"costs": costs, "shares": shares, "claims": claims}
        meanings = {"costs": MEASURES | BASE, "shares": SHARE, "claims": LESS}
        return {
            name: table.assign(where=table["part"].map(PARTS), meaning=table["measure"].map(meanings[name]))
            for name, table in told.items()
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost and KL, a line of panels per model."""
        from sinklens.views.effects import costs_by_part

        costs = interval_table(measured, list(MEASURES), self.seed)
        return {"costs": costs_by_part(costs, interval_table(measured, ["share"], self.seed), PARTS, PICKS, MEASURES)}


def _claims(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """What the strongest key costs more than a random one in the same heads and steps, paired by prompt.

    A model that answers nothing right has nothing to lose: its cost is not measured.
    """
    excess = {}
    for name, data in measured.items():
        less = data[list(LESS)].sel(pick="strongest") - data[list(LESS)].sel(pick="random")
        excess[name] = less if bool((data["base"] > 0).any()) else less.assign(cost=less["cost"] * np.nan)
    table = interval_table(excess, list(LESS), seed)
    table["verdict"] = [verdict(row.estimate, row.low, row.high, 0.0, "holds", "no") for row in table.itertuples()]
    return table
