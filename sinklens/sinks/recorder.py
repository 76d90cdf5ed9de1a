"""Records the sink scores of every step while a run goes on.

The recorder is a TransformerLens hook function on every ``hook_sink_scores``, so recording goes through the same points
as everything else. A step's scores are moved to main memory when the step ends.

For an autoregressive run with a key/value cache, a step computes the attention of its new queries only. Earlier rows of
a causal pattern never change, so their column sums are carried along and the recorded scores equal those of a run
without a cache.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from sinklens.hooks.points import Point


class SinkRecorder:
    """Collects Σ_i A[i, j] per layer during a step, and per step over a run.

    Attributes:
        rows: rows of the batch that are recorded (the conditional ones under guidance).
        length: positions of the canvas; shorter passes are filled up with NaN.
        n_layers: layers of the model.
    """

    def __init__(self, rows: int, length: int, n_layers: int) -> None:
        self.rows, self.length, self.n_layers = rows, length, n_layers
        self._layers: dict[int, Float[Tensor, "batch head key"]] = {}
        self._before: dict[int, Float[Tensor, "batch head key"]] = {}
        self._steps: list[Float[Tensor, "batch layer head pos"]] = []

    def hook(self, value: Float[Tensor, "batch head key"], hook: "Point") -> None:
        """The TransformerLens hook function; reads only."""
        self._layers[hook.layer()] = value[: self.rows]

    def end_step(self, extends: bool) -> None:
        """Keep the step's scores.

        Args:
            extends: the pass computed only new queries, so the sums before it are added.
        """
        filled = []
        for layer in range(self.n_layers):
            scores = self._layers.pop(layer)
            before = self._before.get(layer)
            if extends and before is not None:
                scores = scores + torch.nn.functional.pad(before, (0, scores.shape[-1] - before.shape[-1]))
            self._before[layer] = scores
            filled.append(torch.nn.functional.pad(scores, (0, self.length - scores.shape[-1]), value=torch.nan))
        self._steps.append(torch.stack(filled, dim=1).cpu())

    def scores(self) -> Float[Tensor, "batch step layer head pos"] | None:
        """All recorded steps; None if no step ended."""
        return torch.stack(self._steps, dim=1) if self._steps else None
