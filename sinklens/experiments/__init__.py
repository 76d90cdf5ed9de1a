"""Experiments that take several runs or passes: compare two runs, measure an intervention's effect, sweep, attribute.

`compare` and `effect` compare two runs; `corrupted` runs a changed prompt on a run's canvases; `sweep` runs many
interventions in few passes; `attribution_patching` and `patching_effects` measure which points matter; `logit_lens`
reads the residual stream of every step, and `train_tuned_lens` trains a `TunedLens` for it; `head_outputs` collects
head outputs as a reference for ablations.
"""

from sinklens.experiments.attribution import agreement, attribution_patching, of_step, patching_effects
from sinklens.experiments.captured import head_outputs
from sinklens.experiments.comparison import Effect, attention_to, compare, effect
from sinklens.experiments.corruption import corrupted
from sinklens.experiments.lens import LogitLens, logit_lens
from sinklens.experiments.lens_training import train_tuned_lens
from sinklens.experiments.sweeps import sweep
from sinklens.experiments.tuned_lens import TunedLens

__all__ = [
    "Effect",
    "LogitLens",
    "TunedLens",
    "agreement",
    "attention_to",
    "attribution_patching",
    "compare",
    "corrupted",
    "effect",
    "head_outputs",
    "logit_lens",
    "of_step",
    "patching_effects",
    "sweep",
    "train_tuned_lens",
]
