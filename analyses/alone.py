"""Does a position become a sink because it sees hardly anything?

    sinklens fetch smollm2-135m
    python -m training.text_scores windows.jsonl smollm2-135m 64
    sinklens analyse alone smollm2-135m --prompts windows.jsonl --limit 200
    sinklens analyse alone smollm2-135m --family diffullama --mask-token-id 16 --prompts windows.jsonl --limit 200

In a causal model, the first position sees only itself, and every other position sees more. In a bidirectional model,
all positions see everything. The second command reads the same weights in both directions, without any training. The
study then restricts the queries of one position, in every head, to few keys (`SEES`), and leaves all other queries as
they are. If seeing little makes the first position a sink, the restriction brings its sink back, and makes a sink of a
position in the middle of the text. Controls restrict it to another key than its own, to more keys, or hide its own.

Caveat: a text is read in one pass, without masks. A restricted model reads in a way that it was not trained for, and so
does a causal model that reads in both directions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.estimates.strata import groups_of, mean_rows
from sinklens.analyses.passes import ids_of
from sinklens.analyses.study import Study, dot_panels
from sinklens.analyses.texts import Texts, described
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

PLACES = ("first", "middle")
SEES: Mapping[str, tuple[bool, int | None, slice]] = {
    "everything": (True, None, slice(0)),
    "itself": (True, 0, slice(None)),
    "one other key": (False, 1, slice(None)),
    "itself and one key": (True, 1, slice(None)),
    "itself and three keys": (True, 3, slice(None)),
    "itself and 15 keys": (True, 15, slice(None)),
    "everything but itself": (False, None, slice(None)),
    "itself, in the first quarter of the layers": (True, 0, slice(1)),
    "itself, in the other layers": (True, 0, slice(1, None)),
}
"""What a position sees: its own key, how many others (None for all), and the quarters of the layers where it is so."""
MEASURES = {
    "share": "share of the attention that the position receives",
    "strongest": "heads whose strongest key is the position, of 1",
}


@dataclass
class Alone(Study):
    """See the module.

    Attributes:
        longest: tokens read of a text; the rest is left out.
    """

    name: ClassVar[str] = "alone"
    together: ClassVar[bool] = False
    longest: Count = 512

    def refusal(self, model: "Model") -> str:
        return Texts().refusal(model)

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`MEASURES` [place, sees]; in a causal model NaN, but for what it sees anyway."""
        ids = ids_of(model, prompt, self.chat_template, self.longest).to(model.cfg.device)
        found = [[_read(model, ids, at, *sees) for sees in SEES.values()] for at in (0, len(ids) // 2)]
        values = torch.tensor(found).permute(2, 0, 1).numpy()
        arrays = {name: (("place", "sees"), value) for name, value in zip(MEASURES, values, strict=True)}
        return xr.Dataset(arrays, {"place": list(PLACES), "sees": list(SEES)})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``alone``: `MEASURES`. Intervals resample groups of texts if there are several."""
        rows = []
        for model, data in measured.items():
            for measure in MEASURES:
                rows += mean_rows(model, measure, data[measure], self.seed, groups_of(data))
        return {"alone": described(rows, MEASURES)}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``alone``: the share of the attention, a panel for each place."""
        return {
            "alone": dot_panels(
                self.tables(measured)["alone"].query("measure == 'share'"),
                "place",
                {place: f"the {place} position" for place in PLACES},
                "sees",
                (5.5, 3.2),
                MEASURES["share"],
            )
        }


@torch.no_grad()
def _read(
    model: "Model", ids: Int[Tensor, " pos"], at: int, own: bool, others: int | None, quarters: slice
) -> tuple[float, float]:
    """`MEASURES` of the position `at` in one pass."""
    everywhere = torch.arange(len(ids), device=ids.device)
    visible = everywhere != at
    if others is not None:
        visible = torch.zeros_like(visible)
        visible[everywhere[everywhere != at][torch.linspace(0, len(ids) - 2, others + 2)[1:-1].long()]] = True
    visible[at] = own
    layers, scores = range(model.cfg.n_layers), list[Float[Tensor, "head pos"]]()
    restricted = [layer for layer in layers if 4 * layer // len(layers) in range(4)[quarters]]
    if model.causal and restricted:
        return float("nan"), float("nan")
    hooks: list[tuple[str, Any]] = [(f"blocks.{layer}.attn.hook_attn_mask", _hide(at, visible)) for layer in restricted]
    hooks += [
        (f"blocks.{layer}.attn.hook_sink_scores", lambda value, hook: scores.append(value[0])) for layer in layers
    ]
    with model.tree.hooks(fwd_hooks=hooks):
        model.tree.hidden(ids[None])
    sums = torch.stack(scores)
    return float(sums[..., at].mean() / len(ids)), float((sums.argmax(dim=-1) == at).float().mean())


def _hide(at: int, visible: Bool[Tensor, " key"]) -> Callable[..., Tensor]:
    """A hook on ``hook_attn_mask`` after which the query `at` sees only the `visible` keys."""

    def hide(mask: Float[Tensor, "batch head query key"], hook: Any) -> Float[Tensor, "batch head key key"]:
        mask = mask.expand(-1, -1, mask.shape[-1], -1).clone()
        mask[:, :, at] = mask[:, :, at].masked_fill(~visible, -torch.inf)
        return mask

    return hide
