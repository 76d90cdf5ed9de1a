"""Do a model's sinks move while it denoises, and how?

    sinklens analyse dynamics tiny-llada tiny-llama

The motion table: every measure of `sinklens.sinks.motion` with its interval, and the difference between the models on
the same prompts, e.g. a diffusion model and its autoregressive twin. The figures show one prompt's run (Rulli et al.,
2510.15731, Figs. 1, 6b, 7 and 8).

Caveat: each step of an autoregressive run adds one query to the earlier ones, so the column sums of neighboring steps
share all other rows, and much of the stillness of its sinks is bookkeeping. Do not compare its rates with those of a
diffusion model. Compare each with its null (`NULLS`, nulls.py): a pattern that does not change, revealed row by row.
The measures ``fixed_…`` sum over the prompt's queries alone, ``newest_…`` use the newest query; one query's strongest
key moves more than that of a sum. Queries of a block-causal model that do not see what changes cannot change either.

Every kind of model is measured, on complete passes (``use_cache=False``), since sums over the queries of earlier blocks
need them. A measure that a model does not have is NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.estimates.tables import difference_table, interval_table
from sinklens.analyses.nulls import FIXED, NULLS, SOURCES, against_nulls, beside_null, fixed_queries, null_table, rates
from sinklens.analyses.study import SINK, Study
from sinklens.families.samplers import settings_for
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack, motion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

MEANINGS = {
    "steps": "steps until the row ended",
    "jumps": "changes of the strongest key",
    "jump_share": "share of steps at which the strongest key changes",
    "sink_jump_share": "the same over steps where it is a sink before and after, all heads pooled",
    "jump_distance": "positions per change",
    "drift": "positions per step; above 0 to the right",
    "drift_r_squared": "share of the position's variance that the drift explains",
    "static_share": "share of heads whose strongest key never changes",
    "sinks": "sinks per head and step",
    "lifetime": "steps that a sink lives",
    "censored": "share of lives cut off by the end",
    "one_step": "share of lives that last one step",
    "static_sinks": "share of sinks that are sinks at every step",
    "overlap_step": "Jaccard overlap with the previous step",
    "overlap_layer": "Jaccard overlap with the previous layer",
    "overlap_head": "Jaccard overlap of two heads of a layer",
    "spatial_variance": "variance of the mean score over positions, per head",
    "temporal_variance": "variance of the centroid over steps, per head, positions²",
    "pooled_spatial_variance": "variance of the mean score over positions, all heads pooled",
    "pooled_temporal_variance": "variance of the centroid over steps, all heads pooled, positions²",
    "newest_jump_share": "jump_share of the newest query alone (autoregressive)",
    "newest_static_share": "static_share of the newest query alone (autoregressive)",
}
MEASURES = {**MEANINGS, **NULLS}
IN_TABLE = [name for name in MEASURES if not name.startswith("null_")]  # those have their own table
DRAWN = (
    "jump_share", "null_jump_share", "fixed_jump_share", "sink_jump_share", "null_sink_jump_share", "static_share",
    "null_static_share", "fixed_static_share", "one_step", "static_sinks", "overlap_step",
)  # fmt: skip


@dataclass
class Dynamics(Study):
    """See the module."""

    name: ClassVar[str] = "dynamics"

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES`, [prompt]."""
        given = settings_for(model, dict(settings))
        complete: Settings = {**settings, "use_cache": False} if "use_cache" in given.settings() else settings
        record = fixed_queries(model, prompts, self.chat_template, given.gen_length)
        found = self.generate(model, prompts, complete, record_sinks=record)
        return motion_of(found.track).merge(against_nulls(found.track, found.run))

    def example(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """The sink track of the run, and the final tokens, ``final`` [batch, pos]."""
        found = self.generate(model, [prompt], settings)
        return found.track.data.assign(final=(("batch", "pos"), found.run.tokens.numpy()))

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """Motion beyond the null (`beside_null`)."""
        return beside_null(data).sel(source=[SOURCES[-1]])

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``motion``: means; ``null``: see `null_table`; ``differences``: each further model minus the first, paired by
        prompt.
        """
        tables = {
            "motion": interval_table(measured, IN_TABLE, self.seed),
            "null": null_table(measured, self.seed),
            "differences": difference_table(measured, IN_TABLE, self.seed),
        }
        return {name: table.assign(meaning=table["measure"].map(MEASURES)) for name, table in tables.items()}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``map`` (Fig. 1), ``path`` (7), ``static-moving`` (8); ``motion``: the table's shares."""
        from sinklens.analyses.figures import one_panel
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import interval_dots
        from sinklens.views.figures import sink_paths

        tracks = {name: SinkTrack(data) for name, data in examples.items()}
        table = interval_table(measured, DRAWN, self.seed)
        label = wrapped(f"mean over prompts, 95 % interval; {SINK}; strongest key: the largest column sum", 40)
        return {
            "map": maps(tracks),
            "path": sink_paths(list(tracks.values())),
            "static-moving": still_and_moving(tracks),
            "motion": one_panel(lambda ax: interval_dots(table, "measure", ax, names=MEASURES), (7, 5.5), xlabel=label),
        }


def motion_of(track: SinkTrack) -> xr.Dataset:
    """Every measure of `MEANINGS`, [prompt]: those of `motion.motion_table`, and

    ``sink_jump_share``: see `MEANINGS`; NaN if no head has a sink at two consecutive steps;
    ``one_step``: share of lives that last one step and end before the run does; NaN without lives;
    ``newest_jump_share`` and ``newest_static_share``: see `newest_queries`; NaN for a bidirectional model.
    """
    table = motion.motion_table(track)
    columns = {name: table[name].to_numpy(dtype=np.float64) for name in table}
    found = track.detect()
    columns["sink_jump_share"] = rates(track)["sink_jump_share"]
    lives = motion.lifetimes(found, motion.existing(track))
    brief = ((lives["length"] == 1) & ~lives["censored"]).groupby(lives["batch"]).mean()
    columns["one_step"] = brief.reindex(track.data["batch"].to_numpy()).to_numpy(dtype=np.float64)
    nothing = np.full(track.data.sizes["batch"], np.nan)
    newest = rates(newest_queries(track)) if track.causal and track.steps > 1 else dict.fromkeys(FIXED, nothing)
    columns |= {f"newest_{name}": newest[name] for name in FIXED}
    return xr.Dataset({name: ("prompt", columns[name]) for name in MEANINGS})


def newest_queries(track: SinkTrack) -> SinkTrack:
    """An autoregressive track whose scores are the attention of each step's newest query alone, without the first step.

    Rows of a causal pattern never change, so a step's column sums minus those of the previous step are the new row.
    """
    score = track.data["score"]
    row = (score - score.shift(step=1).fillna(0)).clip(min=0)
    return SinkTrack(track.data.assign(score=row).isel(step=slice(1, None)))


def maps(tracks: Mapping[str, SinkTrack]) -> "Figure":
    """Column sums of every model; of a causal one also the mean over the queries that see the key."""
    from sinklens.views import panels, sink_map

    shown = [(track, "sum") for track in tracks.values()]
    shown += [(track, "visible") for track in tracks.values() if track.causal]
    figure, axes = panels(len(shown), columns=1, size=(11, 4))
    for (track, unit), ax in zip(shown, axes, strict=True):
        sink_map(track, ax=ax, unit=unit, tokens=_final(track))  # type: ignore[arg-type]
    return figure


def still_and_moving(tracks: Mapping[str, SinkTrack]) -> "Figure":
    """One row of panels per model: the head whose strongest key moves least, and the one whose sink moves most."""
    from sinklens.views import most_moving_head, panels, sink_map, stillest_head

    figure, axes = panels(2 * len(tracks), columns=2, size=(9, 4))
    for number, track in enumerate(tracks.values()):
        for which, ax in zip((stillest_head, most_moving_head), axes[2 * number :], strict=False):
            title = sink_map(track, *which(track), ax=ax, tokens=_final(track)).get_title()
            ax.set_title(
                f"{title}, {'its strongest key moves least' if which is stillest_head else 'its sink moves most'}"
            )
    return figure


def _final(track: SinkTrack) -> np.ndarray:
    return track.data["final"].isel(batch=0).to_numpy()
