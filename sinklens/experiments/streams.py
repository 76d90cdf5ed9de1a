"""Which layers leave the residual stream alone?

*Stream* l enters layer l; the last one leaves the last layer. Each step is read with a pass over its canvas, and hooks
of the run are not applied.

*Similarity.* With X and Y the streams [place, d_model] at two layers or two steps, at the same places,

    cosine   mean over places of x · y / (|x| |y|)
    cka      ‖Yᵀ X‖²_F / (‖Xᵀ X‖_F ‖Yᵀ Y‖_F), columns centered (linear CKA; Kornblith et al., 1905.00414).

Cosine asks whether the stream keeps its direction; CKA, which does not change under rotations and a common scale,
whether the places keep their geometry. 1 − cosine of streams l and l + 1 is the block influence of layer l (ShortGPT,
2403.03853): near 0 for a layer that changes little.

*Large values.* A *massive activation* is one value of a stream that is large in itself and against the rest:
|h| ≥ `at_least` and |h| ≥ `times_median` · median |h| over the stream of its step and layer (Sun et al., 2402.17762,
with 100 and 1,000). An *outlier dimension* is large at many places: |h| ≥ `times_rms` · rms of the stream at the place,
at no less than `positions` of the places and in no less than `layers` of the streams (after LLM.int8, 2208.07339, which
has 6 % and 25 %, and an absolute threshold). `Ablate(dims=)` replaces them.

Caveat: a few large dimensions dominate a stream, and most layers leave them alone, so cosines are high everywhere.
Compare layers with each other, and check a redundant layer by skipping it (`SkipLayers`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import xarray as xr

from sinklens.experiments.step_ids import exact_step
from sinklens.runs.intervention import within
from sinklens.runs.result import require_run
from sinklens.utils.arguments import read_as

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

PlaceStates = Literal["all", "prompt", "masked", "committed"]


def layer_similarity(
    run: "Generation", *, steps: Sequence[int] | None = None, state: PlaceStates = "all"
) -> xr.DataArray:
    """Mean cosine x · y / (|x| |y|) over places of the streams x and y at two layers, of all layers in each step.

    Args:
        run: a run; its rows are pooled.
        steps: steps of the run; negative ones count from the end. None means all.
        state: positions that are compared: "all", "prompt", "masked" or "committed".

    Returns:
        [step, stream, other]; NaN in steps without such positions.

    Raises:
        SettingError: an unknown state, or a step that does not exist.
    """
    require_run(run, "run")
    read_as(PlaceStates, "state", state)
    layers, chosen, found = run.model.cfg.n_layers, within("step", steps, run.steps_run), []
    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(layers)), f"blocks.{layers - 1}.hook_resid_post"]
    prompt = torch.arange(run.canvas.shape[2]) < run.prompt_length
    for step in chosen:
        ids, real, time = exact_step(run, step)
        seen = run.model.tree.peek(ids, real, names, time)
        masked = run.undecided[:, step] & ~prompt
        states = {"all": run.real, "prompt": prompt, "masked": masked, "committed": ~masked & ~prompt}
        places = (states[state] & run.real).cpu()[:, : ids.shape[1]]
        streams = torch.stack([seen[name].float().cpu()[places] for name in names]).double()
        unit = torch.nn.functional.normalize(streams, dim=-1)
        found.append(torch.einsum("apd,bpd->ab", unit, unit) / (streams.shape[1] or torch.nan))
    coords = {"step": chosen, "stream": range(layers + 1), "other": range(layers + 1)}
    return xr.DataArray(torch.stack(found).numpy(), coords, ("step", "stream", "other"), "cosine")
