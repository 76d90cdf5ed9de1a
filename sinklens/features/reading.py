"""Read the features of a finished run: which fire, where and when.

Each step is one pass of the unchanged model over the step's canvas, as in `sinklens.experiments.logit_lens`; hooks of
the run are not included.

Limitation: all features of all places are in memory, steps × positions × features per row. Restrict `steps` for large
models.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from sinklens.experiments.step_ids import exact_step
from sinklens.features.autoencoder import SAE
from sinklens.features.places import stream_point
from sinklens.runs.intervention import within
from sinklens.runs.result import require_run

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


@torch.no_grad()
def read_features(run: "Generation", sae: SAE, point: str, *, steps: Sequence[int] | None = None) -> xr.DataArray:
    """The features f = encode(x) of the activations at `point`, at every position of every step.

    Args:
        run: a `Generation`, or a trace after its block.
        sae: any SAE.
        point: where it belongs.
        steps: steps of the run; negative values count from the end. None means all.

    Returns:
        An array [batch, step, pos, feature]; NaN on padding, and where an autoregressive run has not decoded.
        Positions are columns of the canvas, as in a sink track.

    Raises:
        SettingError: a step that did not run, or a point without a vector at each position.
    """
    require_run(run, "run")
    name, chosen = stream_point(run.model, point), within("step", steps, run.steps_run)
    read = []
    for step in chosen:
        ids, real, time = exact_step(run, step)
        x = run.model.tree.peek(ids, real, [name], time)[name].flatten(2).float()
        found = sae.encode(x.flatten(0, 1)).unflatten(0, x.shape[:2]).float().cpu()
        found[~real.cpu()] = torch.nan
        missing = run.canvas.shape[2] - found.shape[1]
        read.append(torch.nn.functional.pad(found, (0, 0, 0, missing), value=torch.nan).numpy())
    return xr.DataArray(np.stack(read, axis=1), dims=("batch", "step", "pos", "feature"), coords={"step": chosen})
