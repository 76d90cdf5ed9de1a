"""Experiments that take several runs or passes: compare two runs, measure an intervention's effect, sweep, attribute.

- Two runs: `compare`, `effect` (also of modes and quantized models), `modes_compared`, `commits_compared`,
  `mode_patching`; `corrupted` runs a changed prompt on a run's canvases, and `swap` puts another kind of token in a
  place.
- Many runs: `sweep` runs many interventions in few passes; `dose_response` measures what steering does and costs.
- Which points matter: `attribution_patching`, `patching_effects`, `write_attribution`, `read_attribution`.
- Paths and circuits: `edge_attribution`, `path_patching_effects`, `path_across_steps`; `edge_scores`, `greedy_circuit`,
  `circuit_curves` and `measure_circuit` find and measure a `Circuit`.
- What is known when: `logit_lens`, `train_tuned_lens`, `fit_jacobian_lens`, `compare_lenses`; `step_predictions`,
  `settling_steps`, `answer_emergence`, `early_exit`.
- Sinks: `sink_jumps` lists their jumps, `jump_undone` measures which path made one, `sinks_compared` lists changes.
- Streams: `layer_similarity`, `step_similarity`, `massive_activations`, `outlier_dimensions`.
- From other prompts: `head_outputs`, `donors`, `difference_of_means`, for ablating, resampling and steering;
  `input_norms`, for pruning.
- How probable a model finds an answer: `likelihood`, `likelihood_difference`, `loss_curve`. Gaps: `holes` makes a run
  of a text with gaps.
"""

from sinklens.experiments.attribution import agreement, attribution_patching, patching_effects
from sinklens.experiments.circuits import (
    Circuit,
    circuit_case,
    circuit_cases,
    circuit_curves,
    edge_scores,
    greedy_circuit,
    measure_circuit,
)
from sinklens.experiments.edges import edge_attribution, path_patching_effects, read_attribution
from sinklens.experiments.effects import Effect, compare, dose_response, effect, sinks_compared
from sinklens.experiments.infilling import holes
from sinklens.experiments.jumps import jump_undone, sink_jumps
from sinklens.experiments.lens import LogitLens, TunedLens, compare_lenses, logit_lens
from sinklens.experiments.lens_fits import fit_jacobian_lens, train_tuned_lens
from sinklens.experiments.metrics import AtPosition, StepOutput
from sinklens.experiments.modes import commits_compared, mode_patching, modes_compared
from sinklens.experiments.nll.estimate import likelihood
from sinklens.experiments.nll.result import Likelihood, likelihood_difference, loss_curve
from sinklens.experiments.reference_runs import difference_of_means, donors, head_outputs, input_norms
from sinklens.experiments.reruns import corrupted, path_across_steps
from sinklens.experiments.settling import (
    answer_emergence,
    early_exit,
    entropy_features,
    guesses,
    settling_steps,
    step_predictions,
)
from sinklens.experiments.step_ids import of_step
from sinklens.experiments.streams import layer_similarity, massive_activations, outlier_dimensions, step_similarity
from sinklens.experiments.swaps import swap
from sinklens.experiments.sweeps import sweep
from sinklens.experiments.writers import write_attribution

__all__ = [
    "AtPosition",
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
    "circuit_curves",
    "commits_compared",
    "compare",
    "compare_lenses",
    "corrupted",
    "difference_of_means",
    "donors",
    "dose_response",
    "early_exit",
    "edge_attribution",
    "edge_scores",
    "effect",
    "entropy_features",
    "fit_jacobian_lens",
    "greedy_circuit",
    "guesses",
    "head_outputs",
    "holes",
    "input_norms",
    "jump_undone",
    "layer_similarity",
    "likelihood",
    "likelihood_difference",
    "logit_lens",
    "loss_curve",
    "massive_activations",
    "measure_circuit",
    "mode_patching",
    "modes_compared",
    "of_step",
    "outlier_dimensions",
    "patching_effects",
    "path_across_steps",
    "path_patching_effects",
    "read_attribution",
    "settling_steps",
    "sink_jumps",
    "sinks_compared",
    "step_predictions",
    "step_similarity",
    "swap",
    "sweep",
    "train_tuned_lens",
    "write_attribution",
]
