"""What becomes of the sinks of a causal model that is trained further as a masked diffusion model?

    sinklens fetch smollm2-135m
    python -m training.text_scores windows.jsonl smollm2-135m 64
    sinklens analyse pair smollm2-135m smollm2-135m-causal smollm2-135m-masked --prompts windows.jsonl --limit 200

The study `texts` at six shares of masked tokens, for models of one origin: a base model and two continuations of it on
the same text. One continuation is causal. The other reads in both directions, and some tokens are masks. The two differ
only in their objective and the attention that it needs. A causal model reads each text without masks; its values stand
beside all shares.

Caveat: there is one origin, and one training run of each continuation. So intervals are over texts and not over runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import xarray as xr
from annotated_types import Ge, Gt, Le

from sinklens.analyses.texts import Texts
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

PANELS = {
    "attention that the first position receives, share": "measure == 'first_mass'",
    "heads with a sink, share": "measure == 'sink_heads'",
    "sinks whose value writes next to nothing, share": "measure == 'no_op_share'",
    "strongest keys that change when a token is replaced (later queries), share": (
        "measure == 'jump_share' and edit == 'edited, later' and lead == 0"
    ),
    "strongest keys that change when a mask is filled in, share": (
        "measure == 'jump_share' and edit == 'revealed' and lead == 0"
    ),
    "loss added by hiding all sinks, nats per token": "measure == 'cost' and kind == 'any' and choice == 'sink'",
}
"""Title of each panel -> the rows of the table ``texts`` that it shows."""


@dataclass
class Pair(Texts):
    """See the module."""

    name: ClassVar[str] = "pair"
    draws: Count = 1
    edits: Count = 2
    age: Annotated[int, Ge(0)] = 0
    shares: tuple[Annotated[float, Gt(0), Le(1)], ...] = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
    kinds: tuple[str, ...] = ("any",)

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``pair``: `PANELS`, against the share of masked tokens."""
        return {"pair": panels_of(self.tables(measured)["texts"])}


def panels_of(table: "DataFrame") -> "Figure":
    """`PANELS` of a table ``texts`` that has several shares."""
    from sinklens.sinks.labels import wrapped
    from sinklens.views.charts import curves
    from sinklens.views.figures import panels

    figure, axes = panels(len(PANELS), columns=3, size=(4.2, 3.2))
    for (title, rows), ax in zip(PANELS.items(), axes, strict=True):
        curves(table.query(rows), "share", ax).set(xlabel="share of masked tokens", title=wrapped(title, 40))
    return figure
