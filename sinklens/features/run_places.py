"""The places of a finished run: which positions a step has, in which states.

The same places as those that `sinklens.features.collect` stores: no padding, no row that waits for the rest of its
batch, and in an autoregressive run each token at the step that reads it first.
"""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from sinklens.sinks.kinds import PlaceState

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


def states_of_run(run: "Generation") -> Int[np.ndarray, "batch step pos"]:
    """The `PlaceState` of every position of every canvas, that after the last step included."""
    prompt = np.arange(run.canvas.shape[2]) < run.prompt_length
    decided = np.where(prompt, PlaceState.PROMPT, PlaceState.COMMITTED)
    return np.where(run.undecided.cpu().numpy(), PlaceState.MASKED, decided).astype(np.int8)


def places_of_step(run: "Generation", step: int) -> Bool[np.ndarray, "batch pos"]:
    """True at the places of a step."""
    real, columns = run.real.cpu().numpy(), np.arange(run.canvas.shape[2])
    places = real & run.active[:, step].cpu().numpy()[:, None]
    if not run.causal:
        return places
    first = columns < run.prompt_length if step == 0 else columns == run.prompt_length + step - 1
    return places & first
