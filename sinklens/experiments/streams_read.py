"""The residual streams of a finished run, read with a pass over the canvas of each step.

*Stream* l enters layer l; the last one leaves the last layer. Hooks of the run are not applied.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.step_ids import exact_step
from sinklens.runs.intervention import within
from sinklens.runs.result import require_run

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

PlaceStates = Literal["all", "prompt", "masked", "committed"]


class StepStreams(NamedTuple):
    """The streams of one step.

    Attributes:
        step: the step.
        values: at every column of the canvas, padding included.
        ids: the canvas.
        places: True at the places in question, never at padding.
    """

    step: int
    values: Float[Tensor, "stream batch pos d_model"]
    ids: Int[Tensor, "batch pos"]
    places: Bool[Tensor, "batch pos"]


def stream_names(model: "Model") -> list[str]:
    """The points of all streams."""
    layers = model.cfg.n_layers
    return [*(f"blocks.{layer}.hook_resid_pre" for layer in range(layers)), f"blocks.{layers - 1}.hook_resid_post"]


def read_streams(run: "Generation", steps: Sequence[int] | None, state: PlaceStates) -> list[StepStreams]:
    """The streams of some steps; None means all.

    Raises:
        SettingError: not a run, a step that did not run, an unknown state, or see `exact_step`.
    """
    require_run(run, "run")
    if state not in get_args(PlaceStates):
        raise SettingError(f"state must be one of {', '.join(get_args(PlaceStates))}; got {state!r}.")
    names, found = stream_names(run.model), []
    for step in within("step", steps, run.steps_run):
        ids, real, time = exact_step(run, step)
        seen = run.model.tree.peek(ids, real, names, time)
        values = torch.stack([seen[name].float().cpu() for name in names])
        found.append(StepStreams(step, values, ids.cpu(), _places(run, step, state)[:, : ids.shape[1]]))
    return found


def _places(run: "Generation", step: int, state: PlaceStates) -> Bool[Tensor, "batch pos"]:
    prompt = torch.arange(run.canvas.shape[2]) < run.prompt_length
    masked = run.undecided[:, step] & ~prompt
    masks = {"all": run.real, "prompt": prompt, "masked": masked, "committed": ~masked & ~prompt}
    return (masks[state] & run.real).cpu()
