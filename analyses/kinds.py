"""Where are the sinks of each kind of model, and do they move?

    sinklens analyse kinds tiny-llada tiny-sdar tiny-llama

One question for masked, shifted, block-causal, uniform-noise and canvas models, with or without experts, and an
autoregressive one:

- ``motion``: jumps of the strongest key and heads that never jump, over all queries, over queries that are the same at
  every step (nulls.py), and within and before the current block (block_motion.py);
- ``experts``: whether a mixture of experts sends sinks to other experts than positions of the same step, state and
  token kind (routing.py);
- ``states``: whether sinks are on decided or undecided positions, accepted tokens or noise, at the same step and place;
- ``survival``: whether a sink survives the decision of its position, or its renoising (renoising.py);
- ``renoised``: whether it survives if its accepted token is replaced by noise, in runs that differ in nothing else
  (renoised_sinks.py); for canvas models only;
- ``levels``: whether sinks follow the noise level or the canvas (noise_levels.py); for networks that read it.

A part that a model does not have is NaN or has no rows. Runs compute complete passes (``use_cache=False``), since sums
over the queries of earlier blocks need them.

Caveat: ``static_share`` of a causal or block-causal model is partly bookkeeping: queries that do not see what changes
cannot change. Compare the measures of the newest query or of the current block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.block_motion import BLOCK_MOTION, BlockSums, block_motion, block_numbers
from sinklens.analyses.dynamics import motion_of
from sinklens.analyses.intervals import corrected, difference_table, interval_table
from sinklens.analyses.noise_levels import level_rows, noise_levels
from sinklens.analyses.nulls import FIXED, fixed_queries, rates
from sinklens.analyses.renoised_sinks import renoised_rows, renoised_sinks, without_canvas
from sinklens.analyses.renoising import settled, sinks_by_state, state_rows, survival_rows
from sinklens.analyses.routing import ROWS, Routes, routing, routing_rows, without_experts
from sinklens.analyses.runs import OwnRun
from sinklens.analyses.study import SINK, Study
from sinklens.errors import SettingError
from sinklens.families import settings_for
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import Record, SinkTrack

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
    **BLOCK_MOTION,
}
DRAWN = ("jump_share", "newest_jump_share", "fixed_jump_share", *BLOCK_MOTION)


@dataclass
class Kinds(Study):
    """See the module.

    Attributes:
        places: how many sinks of each prompt are renoised, for a canvas model; each takes six runs of one canvas.

    Raises:
        SettingError: `places` is below 0.
    """

    name: ClassVar[str] = "kinds"
    places: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places < 0:
            raise SettingError(f"places is the number of sinks of a prompt to renoise, 0 or more; got {self.places}.")

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MOTION` [prompt], and what the rows of the other tables are made from."""
        given = settings_for(model, dict(settings))
        complete: Settings = {**settings, "use_cache": False} if "use_cache" in given.setting_names() else settings
        _, real = model.encode(list(prompts), self.chat_template)
        numbers = block_numbers(model, real.cpu(), given)
        quantities = list(fixed_queries(model, prompts, self.chat_template, given.gen_length).quantities)
        if not model.tree.architecture.encoder:
            quantities.append(BlockSums(numbers))
        routes = Routes(model)
        found = self.generate(model, prompts, complete, record_sinks=Record(quantities), hooks=routes.hooks)
        track = found.track
        chosen = routes.chosen(found.own, track.data.sizes["pos"])
        experts = without_experts(len(prompts), model.cfg.n_layers)
        if chosen is not None:
            assert model.cfg.num_experts is not None
            experts = routing(track, chosen, model.cfg.num_experts)
        length = track.data.sizes["pos"]
        always = model.family_record.masked or model.tree.causal or model.tree.architecture.encoder
        decided = None if always else settled(track["token_id"], found.run.tokens.numpy())
        parts = [motion(track, numbers.numpy()[:, :length]), experts, sinks_by_state(track, decided)]
        parts.append(noise_levels(model, found, prompts))
        return xr.merge([*parts, self._renoised(model, prompts, complete, found)], join="outer")

    def _renoised(
        self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings, found: OwnRun
    ) -> xr.Dataset:
        """What `renoised_rows` reads."""
        given: Any = found.run.settings
        if not model.tree.architecture.encoder:
            return without_canvas(len(prompts))
        length = given.canvas_length
        first: Any = {**settings, "gen_length": length}

        def run_with(hooks: Sequence[Any]) -> SinkTrack:
            sinks = self.generate(model, prompts, first, hooks=hooks).run.sinks
            assert sinks is not None, "runs of a study record sinks"
            return sinks

        return renoised_sinks(run_with, found, length, given.max_denoising_steps, self.places, self.seed)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``motion``: `MOTION`; ``differences``: each further model minus the first, paired by prompt; ``experts``,
        ``states``, ``survival``, ``renoised`` and ``levels``: see the module.
        """
        from pandas import DataFrame

        motion, differences = (table(measured, list(MOTION), self.seed) for table in (interval_table, difference_table))
        made = {
            "experts": routing_rows, "states": state_rows, "survival": survival_rows, "renoised": renoised_rows,
            "levels": level_rows,
        }  # fmt: skip
        rows = {
            name: [row for model, data in measured.items() for row in of_model(model, data, self.seed)]
            for name, of_model in made.items()
        }
        return {
            "motion": motion.assign(meaning=motion["measure"].map(MOTION)),
            "differences": differences.assign(meaning=differences["measure"].map(MOTION)),
            **{
                name: corrected(DataFrame(found)) if found else DataFrame(columns=[*ROWS, "p_holm"])
                for name, found in rows.items()
            },
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``motion``: `DRAWN`; ``survival``: the share of sinks that survive, by the fate of their position."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import interval_dots
        from sinklens.views.figures import panels

        motion, (ax,) = panels(1, size=(7, 5.5))
        names = {name: wrapped(meaning, 44) for name, meaning in MOTION.items()}
        interval_dots(interval_table(measured, list(DRAWN), self.seed), "measure", ax, names=names)
        ax.set(xlabel="mean over prompts, 95 % interval")
        survival, (ax,) = panels(1, size=(7, 3.2))
        table = self.tables(measured)["survival"]
        interval_dots(table[table["measure"] == "rate"], "group", ax)
        ax.set(xlabel=wrapped(f"share of sinks that are a sink of the same head at the next step; {SINK}", 60))
        return {"motion": motion, "survival": survival}


def motion(track: SinkTrack, numbers: np.ndarray) -> xr.Dataset:
    """`MOTION`, [prompt], from a track with ``fixed_score``, and ``block_sum`` unless it is of a canvas model.

    Args:
        numbers: block of each position, [batch, pos]; see `block_numbers`.
    """
    every = motion_of(track)
    fixed = rates(SinkTrack(track.data.assign(score=track["fixed_score"])))
    values = {name: every[name].to_numpy() for name in ALL_QUERIES}
    values |= {f"fixed_{name}": fixed[name] for name in FIXED}
    values |= block_motion(track, numbers)
    return xr.Dataset({name: ("prompt", values[name]) for name in MOTION})
