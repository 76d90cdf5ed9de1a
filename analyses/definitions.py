"""Does what masking sinks costs depend on how the masked keys are defined?

    sinklens analyse definitions tiny-llada tiny-llama

A diffusion model and an autoregressive one are compared fairly only by the same definition. The strongest keys of a
step can be those with the largest column sums over all queries, or those that the newest query attends to most (which
only an autoregressive model has). They can be the unchanged run's (*steady*) or the masked run's own (*per step*; a
masked key then counts as weak at the next step and is spared). Or the first tokens of the text are masked, whatever
their score. And in an autoregressive model they can be hidden from the newest query alone, or from all queries, which
changes what earlier tokens computed. This study masks by every definition that a model has, with 1 and 5 keys per head.
The controls of each mask random keys by the same definition, the same ones at every step: as many weaker ones of the
same head, and keys of any head that are not sinks and receive the attention of the strongest. First tokens have only
the former: the latter would match the strongest keys.

Caveat: with all queries affected, every pass recomputes all positions (without a key/value cache).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import xarray as xr

from sinklens.analyses.answers import costs_over, unchanged
from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.mass import newest_rows
from sinklens.analyses.study import Study
from sinklens.interventions import MaskKeys, MaskSinks
from sinklens.interventions.controls import Pick
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

DEFINITIONS = {
    "columns_steady": "column sums of the unchanged run",
    "columns_step": "column sums of the step before",
    "row_steady": "newest query's attention in the unchanged run",
    "row_step": "newest query's attention at the step before",
    "first": "first tokens",
}
REACHES = {"newest": "hidden from the newest query", "all": "hidden from all queries"}
DRAWN: tuple[Pick, ...] = ("random", "same_mass")
CONTROLS = {"random": "random weaker keys", "same_mass": "random keys that are no sinks, with as much attention"}
PICKS = {"strongest": "these keys", **CONTROLS}
TOP_K = (1, 5)
MEASURES = {
    "right": "share of word problems answered right",
    "cost": "share of word problems lost by masking",
    "changed": "share of answers that change",
}
BASE = {"base": "share of word problems answered right with nothing masked"}
AXES = ("definition", "reach", "pick", "top_k")


@dataclass
class Definitions(Study):
    """See the module."""

    name: ClassVar[str] = "definitions"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`MEASURES` [definition, reach, pick, top_k], NaN where a model lacks a definition; ``base``."""
        axes: dict[str, list[Any]] = {"definition": list(DEFINITIONS), "pick": list(PICKS), "top_k": list(TOP_K)}
        causal, parts = model.causal, []
        for reach in REACHES:
            within = {**settings, "use_cache": False} if causal and reach == "all" else settings
            listed = {} if reach == "newest" and not causal else self.interventions(model, prompt, within, reach)
            parts.append(costs_over(self, model, prompt, within, axes, listed).drop_vars("control_found"))
        return xr.concat(parts, dim="reach").assign_coords(reach=list(REACHES)).assign(base=parts[-1]["base"])

    def interventions(
        self, model: "Model", prompt: SinglePrompt, settings: Settings, reach: str
    ) -> dict[str, MaskKeys]:
        """One intervention per definition that the model has, pick and number of keys."""
        causal = model.causal
        columns = unchanged(self, model, prompt, settings)
        given: dict[str, dict[str, Any]] = {"columns_steady": {"source": columns}}
        if causal:
            given |= {"row_steady": {"source": newest_rows(self, model, prompt, settings)}, "row_step": {}}
        else:
            given |= {"columns_step": {}}
        found = {}
        for top_k, (definition, more) in product(TOP_K, given.items()):
            shared = {"top_k": top_k, "queries": reach, "seed": self.seed, **more}
            found[f"{definition} strongest {top_k}"] = MaskSinks(**shared)
            for pick in DRAWN:
                found[f"{definition} {pick} {top_k}"] = MaskSinks(**shared, pick=pick, persistent=True)
            if definition == "columns_steady":
                found[f"first strongest {top_k}"] = MaskSinks(**shared, positions=range(top_k))
                found[f"first random {top_k}"] = found[f"{definition} random {top_k}"]
        return found

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``definitions``: every measure by definition, reach, pick and number of keys, as far as a model has it;
        ``excess``: the cost minus that of each control, paired by prompt, one family of claims per model.
        """
        costs = interval_table(measured, [*MEASURES, *BASE], self.seed)
        less = {
            name: data[["cost"]].sel(pick="strongest", drop=True)
            - data[["cost"]].sel(pick=list(CONTROLS)).rename(pick="control")
            for name, data in measured.items()
        }
        names = {"definitions": costs, "excess": judged(interval_table(less, ["cost"], self.seed, null=0.0))}
        return {
            name: table[table["estimate"].notna() | ~table["measure"].isin(list(MEASURES))].assign(
                masked=lambda part: part["definition"].map(DEFINITIONS),
                hidden=lambda part: part["reach"].map(REACHES),
                meaning=lambda part: part["measure"].map(MEASURES | BASE),
            )
            for name, table in names.items()
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost with 1 key per head, a row per model and a panel per reach."""
        from sinklens.analyses.figures import interval_panels

        one = {name: data[["cost"]].sel(top_k=1, drop=True) for name, data in measured.items()}
        table = interval_table(one, ["cost"], self.seed)
        costs = interval_panels(
            table, MEASURES, along="definition", by="pick", series=PICKS, panel="reach", names=DEFINITIONS
        )
        return {"costs": costs}
