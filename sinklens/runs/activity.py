"""Which rows of a batch the sampler works on at a step.

A row that has finished its block, its canvas or its answer waits for the others: it may pass through the model again,
but the step changes nothing in it. Samplers do not report this; it follows from what they do at their points.

Limitation: an autoregressive row counts as active until the batch ends. It is its end token that ends it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model

Report = Callable[[Bool[Tensor, " batch"]], None]


def active_rows(model: "Model", report: Report) -> list[tuple[str, Any]]:
    """Hooks that report at every step which rows the sampler works on; list them before hooks that edit its points.

    With a mask token these are the rows in which a position can be decided: its confidence is above −∞. A sampler of
    canvases of random tokens draws tokens for the rows it works on, once to accept and once as noise; of the others it
    repeats the canvas both times. The report comes after the layers of the step.
    """
    if not model.tree.architecture.encoder:

        def decide(confidence: Tensor, hook: "Point") -> None:
            report((confidence > -torch.inf).any(dim=1))

        return [("denoise.hook_confidence", decide)]
    drawn: dict[str, Tensor] = {}

    def keep(candidates: Tensor, hook: "Point") -> None:
        drawn["candidates"] = candidates.clone()

    def compare(noise: Tensor, hook: "Point") -> None:
        report((noise != drawn["candidates"]).any(dim=1))

    return [("denoise.hook_candidates", keep), ("denoise.hook_renoise", compare)]
