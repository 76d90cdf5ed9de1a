"""A plan that is fixed before the run, to ask what particular stale or hidden keys cost.

Chosen from an exact run and carried out on its canvases (``replay=``), it leaves stale exactly the keys in question, or
as many others as a control. The study `caching` does this.

What it approximates: whatever its author leaves stale or hides.

Pitfall: a run also computes what it must, whatever the plan says (`sinklens.sampling.key_cache`): positions without a
usable entry, and where logits predict the next position, those before an undecided one that is computed. The track's
``staleness`` shows the keys that were used.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.sampling.key_cache import History, Policy


@dataclass(frozen=True, eq=False, repr=False)
class Planned(Policy):
    """Compute, reuse and hide the keys that a table lists for each step.

        stale = exact.sinks.detect().any("head")  # [batch, step, layer, pos]
        stale[:, 0] = False
        run = sinklens.generate(model, prompt, replay=exact, cache=Planned(~stale))

    Attributes:
        table: [batch, step, layer, pos], a tensor, array or DataArray: numbers of `Keys`, or booleans (True for fresh,
            False for stale). Axes that do not matter have size 1.
    """

    table: Any

    def __post_init__(self) -> None:
        values = self.table if isinstance(self.table, Tensor) else np.array(self.table)
        if values.ndim != 4:
            raise SettingError(f"Planned takes a table [batch, step, layer, pos]; got shape {list(values.shape)}.")
        object.__setattr__(self, "table", torch.as_tensor(values))

    def __repr__(self) -> str:
        return f"Planned({list(self.table.shape)})"

    def plan(self, history: History) -> Tensor:
        """The entries of the step.

        Raises:
            SettingError: the table has no such step.
        """
        steps = self.table.shape[1]
        if steps > 1 and history.step >= steps:
            raise SettingError(
                f"the table of Planned has {steps} steps, and the run reached step {history.step}; make it as long as "
                f"the run, or give the step axis size 1."
            )
        return self.table[:, history.step if steps > 1 else 0]
