"""The places that the rules of a run chose, recorded during the run.

A run that records sinks also records where its interventions acted: `Generation.chosen` has one `Choice` for each
intervention whose places follow the run. Passed as ``where=``, its `Choice.places` repeat the choice in another run of
the same prompts.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from sinklens.sinks.data import AXES


@dataclass(frozen=True, eq=False)
class Choice:
    """The places of one intervention in a run.

    Attributes:
        of: the intervention.
        sizes: steps and positions of the run.
        packed: by step, the mask [batch, layer, head, pos] with eight positions in a byte; other steps have no places.
    """

    of: Any
    sizes: tuple[int, int]
    packed: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def keep(self, step: int, mask: Bool[Tensor, "#batch #layer #head pos"]) -> None:
        """Keep the places of a step."""
        self.packed[step] = np.packbits(mask.cpu().numpy(), axis=-1)

    def end_step(self, step: int, active: Bool[np.ndarray, " batch"]) -> None:
        """Drop the places in rows that the step did not work on."""
        if step in self.packed and not active.all():
            self.packed[step] = self.packed[step] * active[:, None, None, None]

    @property
    def places(self) -> Bool[xr.DataArray, "#batch step #layer #head pos"]:
        """True at the places; an axis along which they never differ has size 1."""
        steps, length = self.sizes
        masks = {step: np.unpackbits(mask, axis=-1, count=length).astype(bool) for step, mask in self.packed.items()}
        shape = np.broadcast_shapes((1, 1, 1, length), *(mask.shape for mask in masks.values()))
        found = np.zeros((shape[0], steps, *shape[1:]), dtype=bool)
        for step, mask in masks.items():
            found[:, step] = mask
        return xr.DataArray(found, dims=AXES, coords={"step": range(steps)})
