"""Experiments that take several runs or passes: compare two runs, measure an intervention's effect, sweep, attribute.

- Two runs: `compare`, `effect` (also of quantized models); `corrupted` runs a changed prompt on a run's canvases, and
  `swap` puts another kind of token in a place.
- Many runs: `sweep` runs many interventions in few passes.
- Which points matter: `attribution_patching`, `patching_effects`, `write_attribution`, `read_attribution`.
- Paths and circuits: `edge_attribution`, `path_patching_effects`; `edge_scores`, `greedy_circuit` and
  `measure_circuit` find and measure a `Circuit`.
- What is known when: `logit_lens`, `train_tuned_lens`; `step_predictions`,
  `settling_steps`, `answer_emergence`, `early_exit`.
- Sinks: `sink_jumps` lists their jumps, `jump_undone` measures which path causes one, `sinks_compared` counts changes.
- From other prompts: `donors`, `difference_of_means`, for ablating, resampling and steering;
  `input_norms`, for pruning.
- How probable a model finds an answer: `likelihood`, `likelihood_difference`. Gaps: `holes` makes a run
  of a text with gaps.
"""

from sinklens.experiments.attribution import agreement, attribution_patching, patching_effects
from sinklens.experiments.circuits import (
    Circuit,
    circuit_case,
    circuit_cases,
    edge_scores,
    greedy_circuit,
    measure_circuit,
)
from sinklens.experiments.edges import edge_attribution, path_patching_effects, read_attribution
from sinklens.experiments.effects import Effect, compare, effect, sinks_compared
from sinklens.experiments.infilling import holes
from sinklens.experiments.jumps import jump_undone, sink_jumps
from sinklens.experiments.lens import LogitLens, TunedLens, logit_lens
from sinklens.experiments.lens_fits import train_tuned_lens
from sinklens.experiments.metrics import StepOutput
from sinklens.experiments.nll.estimate import likelihood
from sinklens.experiments.nll.result import Likelihood, likelihood_difference
from sinklens.experiments.reference_runs import difference_of_means, donors, input_norms
from sinklens.experiments.reruns import corrupted
from sinklens.experiments.settling import (
    answer_emergence,
    early_exit,
    guesses,
    settling_steps,
    step_predictions,
)
from sinklens.experiments.step_ids import of_step
from sinklens.experiments.swaps import swap
from sinklens.experiments.sweeps import sweep
from sinklens.experiments.writers import write_attribution

__all__ = [
    "Circuit",
    "Effect",
    "Likelihood",
    "LogitLens",
    "StepOutput",
    "TunedLens",
    "agreement",
    "answer_emergence",
    "attribution_patching",
    "circuit_case",
    "circuit_cases",
    "compare",
    "corrupted",
    "difference_of_means",
    "donors",
    "early_exit",
    "edge_attribution",
    "edge_scores",
    "effect",
    "greedy_circuit",
    "guesses",
    "holes",
    "input_norms",
    "jump_undone",
    "likelihood",
    "likelihood_difference",
    "logit_lens",
    "measure_circuit",
    "of_step",
    "patching_effects",
    "path_patching_effects",
    "read_attribution",
    "settling_steps",
    "sink_jumps",
    "sinks_compared",
    "step_predictions",
    "swap",
    "sweep",
    "train_tuned_lens",
    "write_attribution",
]
