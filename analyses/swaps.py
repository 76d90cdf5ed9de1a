"""Does a kind of token make a sink, or the places that tokens of that kind have?

    sinklens analyse swaps tiny-llada tiny-dream tiny-mmada --limit 60

Digits are sinks more often than words. That may be because of the token or because of where digits stand, which no
comparison of different places can separate. A *swap* (`sinklens.experiments.swap`) replaces one token of a canvas and
changes nothing else. ``digit → word`` replaces a digit by a word; its control, ``digit → digit``, by another digit. If
the token makes the sink, the first loses sinks at that place, and ``word → digit`` gains them, beyond their controls.

Caveat: a swapped canvas may be one that no text has, also in the control. A mask cannot be swapped for another mask, so
masks are only put in (``word → mask``), where a model has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.estimates.strata import groups_of, mean_rows
from sinklens.analyses.estimates.tables import judged
from sinklens.analyses.study import Study
from sinklens.experiments import swap
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

SWAPS = {
    "digit → word": ("digit", "word"),
    "digit → digit": ("digit", "digit"),
    "word → digit": ("word", "digit"),
    "word → word": ("word", "word"),
    "punctuation → word": ("punctuation", "word"),
    "word → punctuation": ("word", "punctuation"),
    "word → mask": ("word", "mask"),
}
BEYOND = {
    "digit → word, beyond digit → digit": ("digit → word", "digit → digit"),
    "word → digit, beyond word → word": ("word → digit", "word → word"),
    "word → punctuation, beyond word → word": ("word → punctuation", "word → word"),
    "word → mask, beyond word → word": ("word → mask", "word → word"),
}
MEASURES = {
    "sinks_before": "heads with a sink at the place, before the swap",
    "sinks_after": "heads with a sink at the place, after the swap",
    "change": "sinks_after − sinks_before",
}


@dataclass
class Swaps(Study):
    """See the module.

    Attributes:
        count: number of places to swap on each canvas.
    """

    name: ClassVar[str] = "swaps"
    needs_complete_passes: ClassVar[str] = (
        "swaps are made in passes over the complete text, and its steps compute those of their canvas alone"
    )
    together: ClassVar[bool] = False
    count: Count = 4

    def refusal(self, model: "Model") -> str:
        if model.tree.changes_attention:
            return "a model that changes its attention from pass to pass: a swap is no such pass. Leave it out."
        return super().refusal(model)

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`MEASURES` [swap]: means over the places, over steps; NaN where there is no such place or token."""
        run = self.generate(model, [prompt], settings, record_sinks=False).run
        before, after = np.array([self._means(run, replace, by) for replace, by in SWAPS.values()]).T
        values = {"sinks_before": before, "sinks_after": after, "change": after - before}
        return xr.Dataset({name: ("swap", found) for name, found in values.items()}, {"swap": list(SWAPS)})

    def _means(self, run: "Generation", replace: str, by: str) -> tuple[float, float]:
        """Means of ``sinks_before`` and ``sinks_after`` over the swaps of one kind."""
        known = by != "mask" or run.model.mask_token_id is not None
        found = swap(run, replace, by, count=self.count, seed=self.seed) if known else None
        if found is None or not found.sizes["swap"]:
            return float("nan"), float("nan")
        return float(found["sinks_before"].mean()), float(found["sinks_after"].mean())

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """``change`` of `BEYOND` [prompt, swap]: a swap's change minus that of its control."""
        change = data["change"]
        pairs = [change.sel(swap=one, drop=True) - change.sel(swap=other, drop=True) for one, other in BEYOND.values()]
        return xr.Dataset({"change": xr.concat(pairs, dim="swap")}).assign_coords(swap=list(BEYOND))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``swaps``: `MEASURES`; ``beyond``: `contrasts`, with p values over the family of a model.

        Intervals resample groups of prompts if there are several.
        """
        from pandas import DataFrame

        swaps, beyond = [], []
        for model, data in measured.items():
            group = groups_of(data)
            for measure in MEASURES:
                swaps += mean_rows(model, measure, data[measure], self.seed, group)
            beyond += mean_rows(model, "change", self.contrasts(data)["change"], self.seed, group, claim=True)
        tables = {"swaps": DataFrame(swaps), "beyond": judged(DataFrame(beyond), "gains sinks", "loses sinks")}
        return {name: table.assign(meaning=table["measure"].map(MEASURES)) for name, table in tables.items()}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``change``: the change of every swap and model."""
        from sinklens.analyses.figures import one_panel
        from sinklens.views.charts import interval_dots

        table = self.tables(measured)["swaps"].query("measure == 'change'")
        label = "heads with a sink at the place: after − before the swap"
        return {"change": one_panel(lambda ax: interval_dots(table, "swap", ax, line=0.0), (7, 4), xlabel=label)}
