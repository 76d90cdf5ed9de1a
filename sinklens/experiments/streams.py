"""Which layers leave the residual stream alone?

*Stream* l enters layer l; the last one leaves the last layer. Each step is read with a pass over its canvas, and hooks
of the run are not applied. 1 − cosine of streams l and l + 1 is the block influence of layer l (ShortGPT, 2403.03853):
near 0 for a layer that changes little.

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
