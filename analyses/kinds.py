"""Where are the sinks of each kind of model, and do they move?

    sinklens analyse kinds tiny-llada tiny-sdar tiny-llama

One question for masked, shifted, block-causal, uniform-noise and canvas models, with or without experts, and an
autoregressive one: how often the strongest key of a head changes, and how many heads never change it, over all queries
and over queries that are the same at every step (nulls.py).

A measure that a model does not have is NaN. Runs compute complete passes (``use_cache=False``), since sums over the
queries of earlier blocks need them.

Caveat: ``static_share`` of a causal or block-causal model is partly bookkeeping: queries that do not see what changes
cannot change. Compare the measures of the newest query.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import xarray as xr

from sinklens.analyses.dynamics import motion_of
from sinklens.analyses.estimates.tables import difference_table, interval_table
from sinklens.analyses.nulls import FIXED, fixed_queries, rates
from sinklens.analyses.study import Study
from sinklens.families.samplers import settings_for
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

ALL_QUERIES = {
    "jump_share": "steps at which the strongest key of a head changes, all queries, share",
    "static_share": "heads whose strongest key never changes, all queries, share",
    "newest_jump_share": "the first for the newest query alone (autoregressive)",
    "sink_jump_share": "the first over steps where it is a sink before and after, all heads pooled",
}
MOTION = {
    **ALL_QUERIES,
    "fixed_jump_share": "the first for the queries of the prompt, or of the canvas, which every step has",
    "fixed_static_share": "the second for those queries",
}
DRAWN = ("jump_share", "newest_jump_share", "fixed_jump_share")


@dataclass
class Kinds(Study):
    """See the module."""

    name: ClassVar[str] = "kinds"

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MOTION` [prompt]."""
        given = settings_for(model, dict(settings))
        complete: Settings = {**settings, "use_cache": False} if "use_cache" in given.setting_names() else settings
        record = fixed_queries(model, prompts, self.chat_template, given.gen_length)
        return motion(self.generate(model, prompts, complete, record_sinks=record).track)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``motion``: `MOTION`; ``differences``: each further model minus the first, paired by prompt."""
        motion, differences = (table(measured, list(MOTION), self.seed) for table in (interval_table, difference_table))
        return {
            "motion": motion.assign(meaning=motion["measure"].map(MOTION)),
            "differences": differences.assign(meaning=differences["measure"].map(MOTION)),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``motion``: `DRAWN`."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import interval_dots
        from sinklens.views.figures import panels

        figure, (ax,) = panels(1, size=(7, 4))
        names = {name: wrapped(meaning, 44) for name, meaning in MOTION.items()}
        interval_dots(interval_table(measured, list(DRAWN), self.seed), "measure", ax, names=names)
        ax.set(xlabel="mean over prompts, 95 % interval")
        return {"motion": figure}


def motion(track: SinkTrack) -> xr.Dataset:
    """`MOTION`, [prompt], from a track with ``fixed_score``."""
    every = motion_of(track)
    fixed = rates(SinkTrack(track.data.assign(score=track["fixed_score"])))
    values = {name: every[name].to_numpy() for name in ALL_QUERIES}
    values |= {f"fixed_{name}": fixed[name] for name in FIXED}
    return xr.Dataset({name: ("prompt", values[name]) for name in MOTION})
