"""How far must attention reach?

    sinklens analyse windows tiny-llada tiny-llama

Every query sees only the keys within a given number of positions on either side (before it, in an autoregressive
model), in all layers, heads and steps. Reported for each width: how far the predictions of a step move, how many
answers change, and how many word problems are still answered right. The paper (Rulli et al., 2510.15731) leaves the
question open; a model with fixed anchors should not recover when they are out of reach.

Limitation: layers stack. With four layers of width 8, information from 32 positions away can still arrive, layer by
layer; the width is that of a single layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects
from sinklens.analyses.intervals import interval_table
from sinklens.analyses.study import Study
from sinklens.interventions import WindowAttention
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

WIDTHS = (2, 4, 8, 16, 32, np.inf)  # infinity: unrestricted attention
SHOWN = ("kl", "changed", "right")


@dataclass
class Windows(Study):
    """See the module."""

    name: ClassVar[str] = "windows"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEANINGS` [prompt, width]."""
        listed: dict[str, Any] = {
            str(width): [] if np.isinf(width) else WindowAttention(width=int(width)) for width in WIDTHS
        }

        def one(prompt: SinglePrompt) -> xr.Dataset:
            found = effects(self, model, prompt, settings, listed)[list(MEANINGS)]
            return found.rename(intervention="width").assign_coords(width=np.array(WIDTHS, dtype=float))

        return each_prompt(prompts, one)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``windows``: every measure by width; infinity is unrestricted attention."""
        table = interval_table(measured, list(MEANINGS), self.seed)
        return {"windows": table.assign(meaning=table["measure"].map(MEANINGS))}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``windows``: a panel per measure."""
        from sinklens.views.effects import doubling_curves

        table = interval_table(measured, list(SHOWN), self.seed)
        return {"windows": doubling_curves(table, "width", MEANINGS, "reach of attention (positions)")}
