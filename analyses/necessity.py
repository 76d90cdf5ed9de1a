"""Does masking every head's strongest key cost accuracy because that key is a sink?

    sinklens analyse necessity tiny-llada tiny-llama

Every head has a strongest key at every step; it is a sink only where it stands out (Rulli et al., 2510.15731, Eq. 3:
its column sum is more than ε above the mean of the others'). The paper masks strongest keys and speaks of sinks. This
study separates the two: the strongest key of the unchanged run's previous step (steady masking, answers.py) is masked
everywhere; only in the heads and steps where it is a sink; and only where it is not a sink. ``share`` is the share of
heads and steps concerned. ε is a choice: ``thresholds`` masks every key above ε, however many, for several ε. The
first control of each masks as many random keys in the same heads and steps: weaker ones, the same at every step. The
second masks random keys that are not sinks and receive as much attention (mass.py): only it says whether a key matters
*because* it is a sink. ``curve`` sets the cost of both against the attention that they remove.

Caveat: heads with and without sinks do different things. A cost where there are sinks is not necessarily caused by the
key being a sink, and the shares differ, so compare each cost with its control, not with the other costs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.analyses.answers import MEANINGS, costs_over, swept, unchanged
from sinklens.analyses.estimates.ratios import ratio_table
from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.mass import (
    MEANING,
    REMOVED,
    SAME_MASS,
    attended,
    curve,
    masks,
    removed_by,
    same_mass_name,
    share_of,
    with_same_mass,
)
from sinklens.analyses.study import Study
from sinklens.interventions import MaskKeys
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import Detector, EpsilonOverMean, SinkTrack, StrongestKeys
from sinklens.sinks.strongest import Part

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

PARTS: dict[Part, str] = {
    "all": "in every head and step",
    "sink": "where it is a sink",
    "other": "where it is not a sink",
}
CONTROLS: dict[str, str] = {"random": "random key", SAME_MASS: MEANING}
PICKS: dict[str, str] = {"strongest": "strongest key", **CONTROLS}
EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)  # column sums above the mean of the others
MEASURES = {
    "kl": MEANINGS["kl"],
    "cost": "share of word problems lost by masking",
    "right": MEANINGS["right"],
    "changed": MEANINGS["changed"],
}
MASS = {"removed": REMOVED}
BASE = {"base": "share of word problems answered right with nothing masked"}
SHARE = {"share": "share of all heads and steps"}
ABOVE = {
    "above_cost": "share of word problems lost by masking every key above the threshold",
    "above_right": "share of word problems answered right",
    "above_keys": "keys masked per head and step",
    "above_removed": REMOVED,
}
ABOVE_RANGES = {"above_cost": (-1, 1), "above_right": (0, 1)}
LESS = {name: f"strongest minus control: {MEASURES[name]}" for name in ("kl", "cost")}


@dataclass
class Necessity(Study):
    """See the module.

    Attributes:
        sink: the definition of a sink; by default the paper's, with ε = 3 in column sums.
    """

    name: ClassVar[str] = "necessity"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False
    sink: Detector = field(default_factory=EpsilonOverMean)

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`MEASURES` and `MASS` [part, pick]; ``share`` [part]; ``base``; `ABOVE` [epsilon, pick] (the number of keys
        without pick). The mass of random keys is NaN: they are drawn in the run.
        """
        axes: dict[str, list[Any]] = {"part": list(PARTS), "pick": list(PICKS)}
        track = unchanged(self, model, prompt, settings)
        mass = attended(self, model, prompt, settings, track)
        marked = self.marked(track, mass)
        listed = self.interventions(marked)
        found = costs_over(self, model, prompt, settings, axes, listed).drop_vars("control_found")
        replayed = swept(self, model, prompt, settings, listed, replay=True)["kl"].mean("step")
        values = {"kl": replayed.to_numpy(), "removed": _removed(marked, PARTS, mass)}
        arrays: dict[str, Any] = {
            name: (tuple(axes), value.reshape(found["cost"].shape)) for name, value in values.items()
        }
        shares = ("part", [share_of(marked, part) for part in PARTS])
        return found.assign(arrays | {"share": shares}).merge(self._thresholds(model, prompt, settings, track, mass))

    def marked(self, track: SinkTrack, mass: xr.DataArray) -> SinkTrack:
        """The track with the keys of every part, and those that control for them."""
        found: dict[str, xr.DataArray] = {
            part: StrongestKeys(part=part, sink=self.sink).detect(track) for part in PARTS
        }
        return with_same_mass(track, found, self.sink.detect(track), mass, self.seed)

    def interventions(self, marked: SinkTrack) -> dict[str, MaskKeys]:
        """One intervention per part and pick, in that order, from a track that `marked` returns."""
        return {f"{part} {pick}": mask for part in PARTS for pick, mask in masks(marked, part, self.seed).items()}

    def _thresholds(
        self, model: "Model", prompt: SinglePrompt, settings: Settings, track: SinkTrack, mass: xr.DataArray
    ) -> xr.Dataset:
        axes: dict[str, list[Any]] = {"epsilon": list(EPSILONS), "pick": list(PICKS)}
        found = {str(epsilon): EpsilonOverMean(epsilon).detect(track) for epsilon in EPSILONS}
        marked = with_same_mass(track, found, self.sink.detect(track), mass, self.seed)
        listed = {f"{name} {pick}": hook for name in found for pick, hook in masks(marked, name, self.seed).items()}
        costs = costs_over(self, model, prompt, settings, axes, listed)[["right", "cost"]]
        before = marked.isel(step=slice(0, -1))
        keys = [float(before[name].sum("pos").mean()) for name in found]
        gone = _removed(marked, found, mass).reshape(costs["cost"].shape)
        every = costs.assign(keys=("epsilon", keys), removed=(tuple(axes), gone))
        return every.rename({name: f"above_{name}" for name in every})

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """`LESS` [prompt, part, control]: costs of masking the strongest key beyond those of a control.

        A model without a right answer has nothing to lose: its cost is NaN.
        """
        controls = data[list(LESS)].sel(pick=list(CONTROLS)).rename(pick="control")
        less = data[list(LESS)].sel(pick="strongest", drop=True) - controls
        return less if bool((data["base"] > 0).any()) else less.assign(cost=less["cost"] * np.nan)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``: every measure by part and pick; ``shares``; ``claims``: strongest key minus each control;
        ``thresholds``: every key above ε masked, by ε; ``curve``: the same costs against the attention removed; and
        ``ratios``: the KL of the strongest key and of each control, beyond their means.
        """
        costs = interval_table(measured, [*MEASURES, *MASS, *BASE], self.seed)
        costs = costs[costs["estimate"].notna() | (costs["measure"] != "removed")]
        shares = interval_table(measured, list(SHARE), self.seed)
        less = {name: self.contrasts(data) for name, data in measured.items()}
        claims = judged(interval_table(less, list(LESS), self.seed, null=0.0))
        tables = {"costs": costs, "shares": shares, "claims": claims}
        meanings = {"costs": MEASURES | MASS | BASE, "shares": SHARE, "claims": LESS}
        thresholds = interval_table(measured, list(ABOVE), self.seed, ABOVE_RANGES)
        thresholds = thresholds[thresholds["estimate"].notna() | (thresholds["measure"] != "above_removed")]
        named = {
            name: table.assign(where=table["part"].map(PARTS), meaning=table["measure"].map(meanings[name]))
            for name, table in tables.items()
        }
        against = curve(measured, "above_cost", "above_removed", self.seed, ABOVE_RANGES)
        return {
            **named,
            "thresholds": thresholds.assign(meaning=thresholds["measure"].map(ABOVE)),
            "curve": against.assign(meaning=against["measure"].map(ABOVE)),
            "ratios": ratio_table({name: ratio_pairs(data) for name, data in measured.items()}),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost and KL, a row of panels per model; ``thresholds``: word problems lost by ε;
        ``curve``: word problems lost against attention removed.
        """
        from sinklens.analyses.figures import interval_panels

        costs = interval_table(measured, ["cost", "kl"], self.seed)
        shares = interval_table(measured, ["share"], self.seed).set_index(["model", "part"])["estimate"]
        shown = [
            f"{PARTS[part]} ({shares[model, part]:.0%})"
            for model, part in zip(costs["model"], costs["part"], strict=True)
        ]
        lost = interval_table(measured, ["above_cost"], self.seed, ABOVE_RANGES)
        against = curve(measured, "above_cost", "above_removed", self.seed, ABOVE_RANGES)
        return {
            "costs": interval_panels(
                costs.assign(shown=shown), MEASURES, along="shown", by="pick", series=PICKS, names={}
            ),
            "thresholds": interval_panels(
                lost, ABOVE, along="epsilon", by="pick", series=PICKS, xlabel="threshold ε (column sum)"
            ),
            "curve": interval_panels(
                against.assign(removed=100 * against["removed"]),
                ABOVE,
                along="removed",
                by="pick",
                series=PICKS,
                xlabel="attention removed, %",
            ),
        }


def ratio_pairs(data: xr.Dataset) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """KL with the strongest keys masked, and with the keys of each control, by prompt."""
    return {
        f"KL with the strongest key masked {where} ÷ with {name}": (
            data["kl"].sel(part=part, pick="strongest").to_numpy(),
            data["kl"].sel(part=part, pick=control).to_numpy(),
        )
        for part, where in PARTS.items()
        for control, name in CONTROLS.items()
    }


def _removed(marked: SinkTrack, names: Iterable[str], mass: xr.DataArray) -> Float[np.ndarray, " pick"]:
    """Share of attention removed by name and pick; NaN for random keys, which are drawn in the run."""
    return removed_by([one for name in names for one in (name, None, same_mass_name(name))], marked, mass)
