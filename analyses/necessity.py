"""Does masking every head's strongest key cost accuracy because that key is a sink?

    sinklens analyse necessity tiny-llada tiny-llama

Every head has a strongest key at every step; it is a sink only where it stands out (Rulli et al., 2510.15731, Eq. 3:
its column sum is more than ε above the mean of the others'). The paper masks strongest keys and speaks of sinks. This
study separates the two: the strongest key of the unchanged run's previous step (steady masking, answers.py) is masked
everywhere; only in the heads and steps where it is a sink; and only where it is not a sink. ``share`` is the share of
heads and steps concerned. ε is a choice: ``thresholds`` masks every key above ε, however many, for several ε. The
control of each masks as many random keys in the same heads and steps: weaker ones, the same at every step.

Caveat: heads with and without sinks do different things. A cost where there are sinks is not necessarily caused by the
key being a sink, and the shares differ, so compare each cost with its control, not with the other costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects, free_effects, unchanged
from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.study import Study
from sinklens.interventions import MaskSinks
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import Detector, EpsilonOverMean, SinkTrack, StrongestKeys
from sinklens.sinks.strongest import Marked, Part, mark

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

PARTS: dict[Part, str] = {
    "all": "in every head and step",
    "sink": "where it is a sink",
    "other": "where it is not a sink",
}
PICKS = {"strongest": "strongest key", "random": "random key"}
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)  # column sums above the mean of the others
MEASURES = {
    "kl": MEANINGS["kl"],
    "cost": "share of word problems lost by masking",
    "right": MEANINGS["right"],
    "changed": MEANINGS["changed"],
}
BASE = {"base": "share of word problems answered right with nothing masked"}
SHARE = {"share": "share of all heads and steps"}
ABOVE = {
    "above_cost": "share of word problems lost by masking every key above the threshold",
    "above_right": "share of word problems answered right",
    "above_keys": "keys masked per head and step",
}
ABOVE_RANGES = {"above_cost": (-1, 1), "above_right": (0, 1)}
LESS = {name: f"strongest minus random key: {MEASURES[name]}" for name in ("kl", "cost")}


@dataclass
class Necessity(Study):
    """See the module.

    Attributes:
        sink: the definition of a sink; by default the paper's, with ε = 3 in column sums.
    """

    name: ClassVar[str] = "necessity"
    together: ClassVar[bool] = False
    sink: Detector = field(default_factory=EpsilonOverMean)

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt, part, pick]; ``share`` [prompt, part]; ``base`` [prompt]; `ABOVE` [prompt, epsilon, pick]
        (the number of keys without pick).
        """

        def one(prompt: SinglePrompt) -> xr.Dataset:
            track = unchanged(self, model, prompt, settings)
            listed = {"unchanged": [], **self.interventions(track)}
            found = effects(self, model, prompt, settings, listed)
            above = self._thresholds(model, prompt, settings, track)
            right = found["right"].to_numpy()
            values = {name: found[name].to_numpy()[1:] for name in ("kl", "right", "changed")}
            values["cost"] = right[0] - right[1:]
            shape = (len(PARTS), len(PICKS))
            return xr.Dataset(
                {name: (("part", "pick"), part.reshape(shape)) for name, part in values.items()}
                | {"share": ("part", [self._share(track, part) for part in PARTS]), "base": ((), right[0])},
                coords={"part": list(PARTS), "pick": list(PICKS)},
            ).merge(above)

        return each_prompt(prompts, one)

    def interventions(self, track: SinkTrack) -> dict[str, MaskSinks]:
        """One intervention per part and pick, in that order, from the track of the unchanged run."""
        marked = mark(track, {part: StrongestKeys(part=part, sink=self.sink) for part in PARTS})
        return {f"{part} {pick}": mask for part in PARTS for pick, mask in self._both(marked, part).items()}

    def _both(self, marked: SinkTrack, name: str) -> dict[str, MaskSinks]:
        """The keys that a track marks, and as many random keys; one entry per pick."""
        shared: dict[str, Any] = {"top_k": None, "detector": Marked(name), "source": marked, "seed": self.seed}
        return {"strongest": MaskSinks(**shared), "random": MaskSinks(**shared, pick="random", persistent=True)}

    def _thresholds(self, model: "Model", prompt: SinglePrompt, settings: Settings, track: SinkTrack) -> xr.Dataset:
        marked = mark(track, {f"above {epsilon:g}": EpsilonOverMean(epsilon) for epsilon in EPSILONS})
        listed: dict[str, Any] = {"unchanged": []}
        for epsilon in EPSILONS:
            listed |= {f"{epsilon:g} {pick}": hook for pick, hook in self._both(marked, f"above {epsilon:g}").items()}
        right = free_effects(self, model, prompt, settings, listed)["right"].to_numpy()
        shape = (len(EPSILONS), len(PICKS))
        before = marked.isel(step=slice(0, -1))
        numbers = [float(before[f"above {epsilon:g}"].sum("pos").mean()) for epsilon in EPSILONS]
        return xr.Dataset(
            {
                "above_right": (("epsilon", "pick"), right[1:].reshape(shape)),
                "above_cost": (("epsilon", "pick"), (right[0] - right[1:]).reshape(shape)),
                "above_keys": ("epsilon", numbers),
            },
            coords={"epsilon": list(EPSILONS), "pick": list(PICKS)},
        )

    def _share(self, track: SinkTrack, part: Part) -> float:
        before = track.isel(step=slice(0, -1))
        return float(StrongestKeys(part=part, sink=self.sink).detect(before).any("pos").mean())

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """`LESS` [prompt, part]: costs of masking the strongest key beyond those of a random key.

        A model without a right answer has nothing to lose: its cost is NaN.
        """
        less = data[list(LESS)].sel(pick="strongest") - data[list(LESS)].sel(pick="random")
        return less if bool((data["base"] > 0).any()) else less.assign(cost=less["cost"] * np.nan)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``: every measure by part and pick; ``shares``; ``claims``: strongest minus random key; and
        ``thresholds``: every key above ε masked, by ε.
        """
        costs = interval_table(measured, [*MEASURES, *BASE], self.seed)
        shares = interval_table(measured, list(SHARE), self.seed)
        less = {name: self.contrasts(data) for name, data in measured.items()}
        claims = judged(interval_table(less, list(LESS), self.seed, null=0.0))
        tables = {"costs": costs, "shares": shares, "claims": claims}
        meanings = {"costs": MEASURES | BASE, "shares": SHARE, "claims": LESS}
        thresholds = interval_table(measured, list(ABOVE), self.seed, ABOVE_RANGES)
        named = {
            name: table.assign(where=table["part"].map(PARTS), meaning=table["measure"].map(meanings[name]))
            for name, table in tables.items()
        }
        return {**named, "thresholds": thresholds.assign(meaning=thresholds["measure"].map(ABOVE))}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost and KL, a row of panels per model; ``thresholds``: word problems lost by ε."""
        from sinklens.views.effects import costs_by_part, kinds_of_keys

        costs = interval_table(measured, list(MEASURES), self.seed)
        lost = interval_table(measured, ["above_cost"], self.seed, ABOVE_RANGES)
        return {
            "costs": costs_by_part(costs, interval_table(measured, ["share"], self.seed), PARTS, PICKS, MEASURES),
            "thresholds": kinds_of_keys(lost, "epsilon", "pick", PICKS, ABOVE, "threshold ε (column sum)"),
        }
