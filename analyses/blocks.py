"""What does decoding in blocks do to the sinks, and to what a model loses without them?

    sinklens analyse blocks tiny-llada tiny-llama

The same diffusion model decodes with blocks of one token (from left to right, like an autoregressive model) up to one
block for the complete answer, in the same number of steps. Reported for each block length: how the sinks move
(`motion`), and what masking every head's strongest key costs (as in the paper, and steadily: answers.py), compared with
a random key.

An autoregressive model decodes one token at a time and is shown at block length 1; a sampler without blocks, such as
Dream's, is shown at the length of the answer.

Caveat: a model is trained for one decoding order. The cost of another block length before any sink is masked is in the
table (``none``), and the costs of masking are measured relative to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import xarray as xr

from sinklens.analyses.answers import KEYS, each_prompt, free_effects, masked, unchanged
from sinklens.analyses.intervals import interval_table
from sinklens.analyses.study import SINK, Study
from sinklens.families import settings_for
from sinklens.families.llada import LladaSettings
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import motion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

MOTION = {
    "jump_share": "share of steps at which a head's strongest key changes",
    "static_share": "share of heads whose strongest key never changes",
    "drift": "positions per step that the strongest key moves; above 0 to the right",
    "overlap_step": "Jaccard overlap of a head's sinks with those of the previous step",
    "sinks": "sinks per head and step",
    "lifetime": "steps that a sink lives",
}
ROBUST = {
    "right": "share of word problems answered right",
    "changed": "share of answers that change",
    "cost": "share of word problems lost by masking",
}
MASKED = {"none": "nothing masked", **{kind: f"{name} masked" for kind, name in KEYS.items()}}


@dataclass
class BlockLengths(Study):
    """See the module.

    Attributes:
        top_k: number of keys masked per head.
    """

    name: ClassVar[str] = "blocks"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False
    top_k: int = 1

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MOTION` [prompt, block] and `ROBUST` [prompt, block, key]."""
        parts = [self._at(model, prompts, more) for more in lengths(model, settings).values()]
        return xr.concat(parts, dim="block").assign_coords(block=list(lengths(model, settings)))

    def _at(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """Measurements at one block length."""

        def one(prompt: SinglePrompt) -> xr.Dataset:
            track = unchanged(self, model, prompt, settings)
            listed = {"none": [], **masked(track, self.top_k)}
            found = free_effects(self, model, prompt, settings, listed)[["right", "changed"]]
            found = found.rename(intervention="key")
            moving = motion.motion_table(track)
            more: dict[str, Any] = {name: ((), float(moving[name].iloc[0])) for name in MOTION}
            return found.assign({"cost": found["right"].sel(key="none", drop=True) - found["right"], **more})

        return each_prompt(prompts, one)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``motion``: how the sinks move, by block length; ``robustness``: the effect of masking."""
        tables = {
            "motion": interval_table(measured, list(MOTION), self.seed),
            "robustness": interval_table(measured, list(ROBUST), self.seed),
        }
        return {name: table.assign(meaning=table["measure"].map(MOTION | ROBUST)) for name, table in tables.items()}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``motion``: a panel per measure; ``robustness``: a row of panels per model, a curve per kind of key."""
        from sinklens.views.effects import doubling_curves, kinds_of_keys

        along = "block length (1: from left to right)"
        moving = doubling_curves(interval_table(measured, list(MOTION), self.seed), "block", MOTION, along)
        moving.suptitle(f"Means over prompts with 95 % intervals; {SINK}", fontsize=9)
        robust = interval_table(measured, list(ROBUST), self.seed)
        return {"motion": moving, "robustness": kinds_of_keys(robust, "block", "key", MASKED, ROBUST, along)}


def lengths(model: "Model", settings: Settings) -> dict[int, Settings]:
    """Block length -> settings, for every length that divides the answer and its steps evenly."""
    defaults = settings_for(model, dict(settings))
    if not isinstance(defaults, LladaSettings):
        return {1 if model.causal else defaults.gen_length: settings}
    totals: Settings = {"gen_length": defaults.gen_length, "steps": defaults.steps}
    possible = [size for size in range(1, defaults.gen_length + 1) if defaults.gen_length % size == 0]
    return {
        size: {**settings, **totals, "block_length": size}
        for size in possible
        if defaults.steps % (defaults.gen_length // size) == 0
    }
