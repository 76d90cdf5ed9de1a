"""Experiments that take several runs or passes: compare two runs, measure an intervention's effect, sweep, attribute.

`compare` and `effect` compare two runs, also in two modes; `modes_compared`, `commits_compared` and `mode_patching`
compare the passes of two modes; `fidelity` compares a quantized model with the one that was quantized; `corrupted`
runs a changed prompt on a run's canvases; `sweep` runs many interventions in few passes; `attribution_patching` and
`patching_effects` measure which points matter; `logit_lens` reads the residual stream of every step, and
`train_tuned_lens` trains a `TunedLens` for it; `write_attribution` splits a score over its writers, and
`read_attribution` finds who reads a key's message; `sink_jumps` lists the jumps of sinks, and `jump_undone` measures
which path made one; `path_across_steps`, `edge_attribution` and `path_patching_effects` measure single edges;
`head_outputs`, `donors` and `difference_of_means` collect outputs, matched values and directions from runs of other
prompts, for ablating, resampling and steering.
"""

from sinklens.experiments.attribution import agreement, attribution_patching, patching_effects
from sinklens.experiments.captured import head_outputs
from sinklens.experiments.comparison import attention_to, compare
from sinklens.experiments.corruption import corrupted
from sinklens.experiments.edges import Edge, edge_attribution, path_patching_effects, strongest_edges
from sinklens.experiments.effects import Effect, ModeEffect, effect
from sinklens.experiments.fidelity import Fidelity, fidelity
from sinklens.experiments.jumps import Jump, jump_undone, sink_jumps
from sinklens.experiments.lens import LogitLens, logit_lens
from sinklens.experiments.lens_training import train_tuned_lens
from sinklens.experiments.metrics import StepOutput
from sinklens.experiments.modes import commits_compared, mode_patching, modes_compared
from sinklens.experiments.paths import AcrossSteps, path_across_steps
from sinklens.experiments.readers import read_attribution
from sinklens.experiments.reference_runs import difference_of_means, donors
from sinklens.experiments.sink_changes import sinks_compared
from sinklens.experiments.step_ids import of_step
from sinklens.experiments.sweeps import sweep
from sinklens.experiments.tuned_lens import TunedLens
from sinklens.experiments.writers import write_attribution

__all__ = [
    "AcrossSteps",
    "Edge",
    "Effect",
    "Fidelity",
    "Jump",
    "LogitLens",
    "ModeEffect",
    "StepOutput",
    "TunedLens",
    "agreement",
    "attention_to",
    "attribution_patching",
    "commits_compared",
    "compare",
    "corrupted",
    "difference_of_means",
    "donors",
    "edge_attribution",
    "effect",
    "fidelity",
    "head_outputs",
    "jump_undone",
    "logit_lens",
    "mode_patching",
    "modes_compared",
    "of_step",
    "patching_effects",
    "path_across_steps",
    "path_patching_effects",
    "read_attribution",
    "sink_jumps",
    "sinks_compared",
    "strongest_edges",
    "sweep",
    "train_tuned_lens",
    "write_attribution",
]
