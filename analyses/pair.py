"""What becomes of the sinks of a causal model that is trained further as a masked diffusion model?

    sinklens fetch smollm2-135m
    python -m training.text_scores windows.jsonl smollm2-135m 64
    sinklens analyse pair smollm2-135m smollm2-135m-causal smollm2-135m-masked --prompts windows.jsonl --limit 200

The study `texts` at six shares of masked tokens, for models of one origin: a base model and two continuations of it on
the same text. One continuation is causal. The other reads in both directions, and some tokens are masks. The two differ
only in their objective and the attention that it needs. A causal model reads each text without masks; its values stand
beside all shares.

``keys`` compares the keys, queries and values of sinks, and of the first position, with the others of the same head, by
layer. ``layer_costs`` hides the sinks of one layer at a time, in a pass each. ``matched`` hides sinks or, instead,
other keys of the same heads with as much attention. This is possible only in heads whose sinks receive at most as much
as their other keys. ``fates`` follows every sink of one model into another, on the same text: is its position a sink of
the same head there, or of another head of that layer? By chance alone, some are. So the share is also measured against
what the second model makes of *another text* at that position.

Caveat: there is one origin, and one training run of each continuation. So intervals are over texts and not over runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge, Gt, Le

from sinklens.analyses.estimates.strata import groups_of, mean_rows
from sinklens.analyses.passes import Keys, Read, Sums, TextCanvas, difference, log_ratio, losses, mean_at, written
from sinklens.analyses.runs import noise_of
from sinklens.analyses.texts import KINDS, PAIRS, Difference, Texts, described
from sinklens.experiments.swaps import kinds_of_vocabulary
from sinklens.interventions.controls import of_mass
from sinklens.sinks.values import NO_OP
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

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
LAYER_PANELS = {
    "norm of the first position's key over that of others, log2": "measure == 'key_norm' and of == 'first position'",
    "cosine of the queries with the first position's key, minus that with others": (
        "measure == 'cosine' and of == 'first position'"
    ),
    "what the first position's value writes over what others write, log2": (
        "measure == 'value_norm' and of == 'first position'"
    ),
    "sinks whose value writes next to nothing, share": "measure == 'no_ops' and of == 'sinks'",
    "strongest keys that change when a token is replaced (later queries), share": (
        "measure == 'jump_share' and edit == 'edited, later' and lead == 0"
    ),
    "loss added by hiding the sinks of one layer, nats per token": "measure == 'layer_cost'",
}
"""Title of each panel -> the rows that it shows: of the table ``texts``, or of those by layer."""

KEYS = {
    "key_norm": "log2 of the norm of these keys over that of the layer's other keys",
    "query_norm": "log2 of the norm of the queries at their positions over that at others",
    "cosine": "mean cosine of the queries with these keys, minus that with others",
    "value_norm": "log2 of what their values write (norm after W_O) over what others write",
    "no_ops": "share of them whose value writes less than a fifth of the head's median",
}
BY_LAYER = ("keys", "layers", "layer_costs")
LAYER_COSTS = {"layer_cost": "loss added by hiding the sinks of this layer alone, nats per predicted token"}
MATCHED = {
    "matched_heads": "share of the heads with a sink whose other keys receive as much attention as their sinks",
    "matched_cost": "loss added by hiding keys of these heads, nats per predicted token",
    "matched_removed": "share of all attention that these keys receive",
}
TOKENS: Mapping[str, tuple[int, ...]] = {"any": (0, 1, 2), "first position": (0,), "delimiter": (1,), "other": (2,)}
PLACES = ("layer", "head", "pos")
FATES = {
    "same_head": "share of the first model's sinks that are sinks of the same head in the second",
    "other_head": "share that are sinks only of other heads of that layer in the second",
    "another_text": "share that are sinks of the same head in the second when it reads another text",
    "of_sinks": "share of the first model's sinks that are at such a token",
}


@dataclass
class Pair(Texts):
    """See the module."""

    name: ClassVar[str] = "pair"
    pairs: ClassVar[Mapping[str, Difference]] = {
        **PAIRS,
        "hiding any sinks": Difference("cost", {"kind": "any", "choice": "sink"}),
    }
    draws: Count = 1
    edits: Annotated[int, Ge(0)] = 2
    age: Annotated[int, Ge(0)] = 0
    shares: tuple[Annotated[float, Gt(0), Le(1)], ...] = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
    kinds: tuple[str, ...] = ("any",)

    def _of_canvas(self, model: "Model", canvas: TextCanvas, plain: Read, noise: np.random.Generator) -> xr.Dataset:
        """Also `KEYS` [of, layer], `LAYER_COSTS` [layer], `MATCHED` ([hidden], or no axis), and what `fates` compares:
        ``sinks`` [layer, head, pos], ``place`` (of `TOKENS`) and ``masked`` [pos].
        """
        sinks = plain.sinks(model.causal, self.epsilon)
        place = np.where(np.isin(kinds_of_vocabulary(model)[canvas.ids.numpy()], KINDS["delimiter"]), 1, 2)
        place[0] = 0
        order = torch.from_numpy(noise_of(canvas.ids, self.seed).random(sinks.shape))
        found = super()._of_canvas(model, canvas, plain, noise).assign(of_keys(model, plain, sinks))
        found = found.assign(of_matched(model, canvas, plain, sinks, order))
        of_layer = torch.eye(len(sinks), dtype=torch.bool)[..., None, None] & sinks  # a variant hides those of a layer
        costs = np.array(losses(model, canvas, plain, of_layer)) - plain.loss
        found = found.assign(layer_cost=("layer", costs))
        states = {"sinks": (PLACES, sinks.float()), "place": ("pos", place), "masked": ("pos", canvas.masked.float())}
        return found.assign(states).assign_coords(
            pos=np.arange(len(place)), of=["sinks", "first position"], hidden=["sinks", "others", "difference"]
        )

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """Those of `Texts`; ``keys``: `KEYS` by layer, of sinks and of the first position; ``layer_costs``:
        `LAYER_COSTS`; ``matched``: `MATCHED`; ``fates``: `FATES`, for every two models and kind of token.
        """
        meanings = {"keys": KEYS, "layer_costs": LAYER_COSTS, "matched": MATCHED}
        found, ends = {name: list[dict[str, Any]]() for name in meanings}, []
        for model, data in measured.items():
            for name, measures in meanings.items():
                for measure in measures:
                    found[name] += mean_rows(model, measure, data[measure], self.seed, groups_of(data))
        for one, other in permutations(measured, 2):
            for fate, shares in fates(measured[one], measured[other]).items():
                ends += mean_rows(f"{one} → {other}", str(fate), shares, self.seed, groups_of(measured[one]))
        tables = super().tables(measured) | {name: described(rows, meanings[name]) for name, rows in found.items()}
        return tables | {"fates": described(ends, FATES)} if ends else tables

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``pair``: `PANELS`, against the share of masked tokens, and `LAYER_PANELS`."""
        tables = self.tables(measured)
        return {"pair": panels_of(tables["texts"], [tables[name] for name in BY_LAYER])}


def of_keys(model: "Model", plain: Read, sinks: Keys) -> dict[str, Any]:
    """`KEYS` [of, layer] of the sinks and of the first position; NaN for a layer without any."""
    first = torch.zeros_like(sinks)
    first[..., 0] = True
    writes = written(model, plain)
    values = {
        "key_norm": (log_ratio, plain.key_norms), "query_norm": (log_ratio, plain.query_norms),
        "cosine": (difference, plain.cosines), "value_norm": (log_ratio, writes),
        "no_ops": (mean_at, (writes < NO_OP).double()),
    }  # fmt: skip
    return {
        name: (("of", "layer"), torch.stack([compare(sums, keys).nanmean(dim=-1) for keys in (sinks, first)]))
        for name, (compare, sums) in values.items()
    }


def of_matched(model: "Model", canvas: TextCanvas, plain: Read, sinks: Keys, order: Sums) -> dict[str, Any]:
    """`MATCHED`: "sinks" are those of the heads whose other keys receive as much together, "others" are random keys of
    each of these heads that are not sinks and receive as much, drawn in `order`, and "difference" is sinks − others.
    """
    mass, heads = plain.from_others.double(), sinks.any(dim=-1)
    held, left = ((mass * keys).sum(dim=-1, keepdim=True) for keys in (sinks, ~sinks))
    within = held <= left
    others = of_mass(-order, mass, sinks & within, ~sinks)
    both = torch.stack([sinks & within, others])
    cost = np.array(losses(model, canvas, plain, both)) - plain.loss
    removed = [plain.share(keys) for keys in both]
    return {
        "matched_heads": float(within[heads].double().mean()),
        "matched_cost": ("hidden", [*cost, cost[0] - cost[1]]),
        "matched_removed": ("hidden", [*removed, removed[0] - removed[1]]),
    }


def fates(one: xr.Dataset, other: xr.Dataset) -> xr.Dataset:
    """`FATES` [prompt, token] of the sinks of one model in another, over the positions that are masked in neither."""
    there = other["sinks"] == 1
    sinks = (one["sinks"] == 1) & (one["masked"] == 0) & (other["masked"] == 0)
    of_token = xr.concat([sinks & one["place"].isin(places) for places in TOKENS.values()], "token")
    total = of_token.assign_coords(token=list(TOKENS)).sum(PLACES)
    ends = {
        "same_head": there,
        "other_head": there.any("head") & ~there,
        "another_text": there.roll(prompt=1, roll_coords=False),
    }
    shares = {fate: (of_token & end).sum(PLACES) / total.where(total > 0) for fate, end in ends.items()}
    return xr.Dataset({**shares, "of_sinks": total / total.sel(token="any", drop=True)})


def panels_of(table: "DataFrame", by_layer: "Sequence[DataFrame]") -> "Figure":
    """`PANELS` of a table ``texts`` that has several shares; and `LAYER_PANELS` of the tables `BY_LAYER`, at the share
    nearest to 0.15.
    """
    from pandas import concat

    from sinklens.sinks.labels import wrapped
    from sinklens.views.charts import curves
    from sinklens.views.figures import panels

    drawn = [(title, table.query(rows), "share", "share of masked tokens") for title, rows in PANELS.items()]
    layers = concat(by_layer)
    for title, rows in LAYER_PANELS.items():
        found = layers.query(rows)
        drawn.append((title, found[abs(found["share"] - 0.15) == abs(found["share"] - 0.15).min()], "layer", "layer"))
    drawn = [panel for panel in drawn if len(panel[1])]  # without edits, for example, nothing is known of them
    figure, axes = panels(len(drawn), columns=4, size=(4.2, 3.2))
    models = table[["model"]].drop_duplicates()  # first in every panel, so that a model has one color
    for (title, rows, along, xlabel), ax in zip(drawn, axes, strict=True):
        curves(concat([models, rows]), along, ax).set(xlabel=xlabel, ylabel="", title=wrapped(title, 40))
    return figure
