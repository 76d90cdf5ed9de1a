"""Does the claim of a plan hold?

    sinklens test plan.yaml

A plan (estimates/plan.py) names keys to mask and a control. For every prompt, the keys and *all* controls are masked,
steadily, by the unchanged run's scores (answers.py). The verdict is about the control that the plan names
(estimates/deciding.py); the others are listed beside it and are not tested.

*holds*: the difference is above 0. *equivalent*: it is smaller than the smallest difference of interest, in either
direction. *the opposite holds*: it is below 0. *cannot tell*: none of these, and the report says what so many units
could have shown. Each verdict has an error rate of 5 % over all tests on these prompts (tested.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import xarray as xr
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.analyses.answers import costs_over, unchanged
from sinklens.analyses.estimates.deciding import over_groups
from sinklens.analyses.estimates.plan import Plan
from sinklens.analyses.estimates.tables import interval_table
from sinklens.analyses.mass import SAME_MASS, attended, removed_by, with_same_mass
from sinklens.analyses.study import Study
from sinklens.interventions import MaskSinks
from sinklens.model import Model
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import EpsilonOverMean, SinkTrack
from sinklens.sinks.kinds import Kind, kinds
from sinklens.sinks.strongest import NOT, Marked

PICKS = {
    "treated": "the keys of the plan",
    SAME_MASS: "random keys that are no sinks, with as much attention",
    "random": "as many random weaker keys",
    "same_kind": "as many random weaker keys of the same kinds of token",
    "nearest": "the nearest weaker keys",
    "nothing": "nothing masked",
}
MEASURES = {
    "cost": "right answers lost by masking, share of prompts",
    "changed": "answers that change by masking, share of prompts",
}


@dataclass
class PlannedTest(Study):
    """See the module.

    Attributes:
        plan: what is tested.
    """

    name: ClassVar[str] = "test"
    together: ClassVar[bool] = False
    scored: ClassVar[str] = "some"
    plan: Plan = field(default_factory=lambda: Plan("", "", 2, 0.1))

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`MEASURES` and ``removed`` [pick]."""
        track = unchanged(self, model, prompt, settings)
        marked, mass = self._marked(model, prompt, settings, track)
        listed = self.interventions(marked)
        found = costs_over(self, model, prompt, settings, {"pick": list(listed)}, listed).drop_vars("control_found")
        chosen = {"treated": "treated", SAME_MASS: f"treated {SAME_MASS}"}
        gone = removed_by([chosen.get(name) for name in listed], marked, mass)
        keys = float(marked["treated"].isel(step=slice(0, -1)).sum())
        return found.assign(removed=("pick", gone), keys=keys)

    def _marked(
        self, model: "Model", prompt: SinglePrompt, settings: Settings, track: SinkTrack
    ) -> tuple[SinkTrack, xr.DataArray]:
        """The track with the keys of the plan and those with as much attention, and the attention that counts."""
        sinks = EpsilonOverMean(self.plan.epsilon).detect(track)
        keys = sinks if self.plan.mask == "sinks" else track.scores().notnull() & ~sinks
        if self.plan.kind != "any":
            named = kinds(track) == int(Kind[self.plan.kind.removeprefix(NOT).upper()])
            keys = keys & (~named if self.plan.kind.startswith(NOT) else named)
        mass = attended(self, model, prompt, settings, track)
        return with_same_mass(track, {"treated": keys}, sinks, mass, self.seed), mass

    def interventions(self, marked: SinkTrack) -> dict[str, Any]:
        """One per entry of `PICKS`."""
        shared: dict[str, Any] = {"top_k": None, "source": marked, "seed": self.seed}
        keys: dict[str, Any] = shared | {"detector": Marked("treated")}
        return {
            "treated": MaskSinks(**keys),
            SAME_MASS: MaskSinks(**shared, detector=Marked(f"treated {SAME_MASS}")),
            "random": MaskSinks(**keys, pick="random", persistent=True),
            "same_kind": MaskSinks(**keys, pick="same_kind", persistent=True),
            "nearest": MaskSinks(**keys, pick="nearest"),
            "nothing": [],
        }

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``masks``: the measures by keys; ``differences``: the keys of the plan minus every control, with intervals
        over groups if the plan has groups.
        """
        measures, groups = ["cost", "changed"], self.plan.groups()
        of_plan = {"prompt_group": ("prompt", groups)} if groups else {}
        measured = {
            name: data.drop_vars("prompt_group", errors="ignore").assign_coords(of_plan)
            for name, data in measured.items()
        }
        tables = {"masks": interval_table(measured, [*measures, "removed"], self.seed).dropna(subset="estimate")}
        ranges = {"cost": (-1, 1), "changed": (-1, 1)}
        less = {name: data[measures].sel(pick="treated", drop=True) - data[measures] for name, data in measured.items()}
        controls = {name: data.drop_sel(pick="treated").rename(pick="control") for name, data in less.items()}
        tables["differences"] = interval_table(controls, measures, self.seed, ranges)
        if groups:
            over = [over_groups(controls[row.model][row.measure].sel(control=row.control).to_numpy(), groups)
                    for row in tables["differences"].itertuples()]  # fmt: skip
            tables["differences"][["estimate", "low", "high", "groups"]] = [
                (one.value, one.low, one.high, len(set(groups))) for one in over
            ]
        return tables
