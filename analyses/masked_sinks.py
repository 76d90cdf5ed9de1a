"""What do sinks on undecided positions hold, and do they predict the token that comes?

    sinklens analyse masked_sinks tiny-llada tiny-dream

Rulli et al. (2510.15731) leave open what sinks at still masked positions store. At every step, the positions that are
undecided and stay so after the step are split into sinks and others, in each layer:

- ``value_ratio``: mean norm of the values at sinks / at the others of the same step and head;
- ``named``, ``probability`` and ``entropy``: what the logit lens (sinklens/experiments/lens.py) reads at the position
  from the stream that leaves the layer: whether its first token is the one that finally comes, how probable it finds
  that token, and how uncertain it is in nats. A position counts as a sink of the layer if it is one in any head;
- ``correlation`` and ``partial``: rank correlation of the position's score (column sum, mean over the heads) with
  ``named``, over the positions of a step, crude and with the position held fixed. In the last layer the lens reads the
  model's candidate, so there it asks whether the score predicts that the candidate is right.

Positions that the step decides are left out: their candidate is the final token by definition. Sinks and others of one
step differ in position, so the table ``matched`` compares positions of the same step and place in the answer, across
prompts and across prompts of one group (strata.py). An autoregressive model has no undecided positions, and all numbers
are NaN.

Caveat: a model whose stream at i predicts the token at i + 1 (Dream) is read at i − 1: the lens then reads what is
known about a sink's token, not the stream at the sink.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sinklens.analyses.intervals import corrected, interval_rows, interval_table
from sinklens.analyses.ranks import partial_rank_correlation, rank_correlation
from sinklens.analyses.strata import (
    comparable_share,
    compare,
    groups_of,
    labels_of,
    matchings,
    shaped,
    two_groups,
)
from sinklens.analyses.study import SINK, Study
from sinklens.experiments import logit_lens
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.analyses.runs import OwnRun
    from sinklens.model import Model

LENS = {
    "named": "share of positions whose first lens token is the one that finally comes",
    "probability": "lens probability of the token that finally comes",
    "entropy": "entropy of the lens, nats",
}
MEASURES = {
    "sinks": "share of (step, head, undecided position) that are sinks",
    "value_ratio": "value norm at undecided sinks / at other undecided positions of the step and head",
    **{f"{name}_sinks": f"{meaning}: at undecided sinks" for name, meaning in LENS.items()},
    **{f"{name}_others": f"{meaning}: at other undecided positions" for name, meaning in LENS.items()},
    **{f"{name}_difference": f"{meaning}: sinks minus others, within steps" for name, meaning in LENS.items()},
    "correlation": "rank correlation of score and named, within steps",
    "partial": "the same with the position held fixed",
}
DRAWN = ("named_difference", "probability_difference", "correlation", "partial", "value_ratio", "sinks")


@dataclass
class MaskedSinks(Study):
    """See the module."""

    name: ClassVar[str] = "masked_sinks"
    needs_mask_token: ClassVar[str] = "none of its sinks is on a mask"

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt, layer]; and for `tables`, [prompt, layer, step, place]: ``sink_at``, `LENS` as
        ``…_at``, NaN where a place is not undecided.
        """
        layers = model.cfg.n_layers
        if model.causal:
            return _nothing(len(prompts), layers)
        found = self.generate(model, prompts, settings, record_sinks=Record(["values"]))
        rows = [self._row(model, found, row) for row in range(len(prompts))]
        return xr.concat(rows, dim="prompt", join="outer")

    def _row(self, model: "Model", found: "OwnRun", row: int) -> xr.Dataset:
        """One prompt."""
        run, track = found.run, found.track.isel(batch=row)
        steps, first = np.flatnonzero(found.own[row]), int(run.real[row, : run.prompt_length].sum())
        length = int(run.real[row, run.prompt_length :].sum())  # where rows end their last block at different columns
        answer = slice(run.prompt_length, run.prompt_length + length)
        lens = logit_lens(model, run, steps=steps.tolist(), positions=range(first, first + length), row=row, top_k=1)
        data = track.data.isel(batch=0, step=slice(0, len(steps)), pos=answer)
        sinks = track.detect().isel(batch=0, step=slice(0, len(steps)), pos=answer).to_numpy()
        decided = lens["final_token"].to_numpy() != model.mask_token_id
        undecided = (data["masked"] & ~data["committed"]).to_numpy() & decided
        read = {
            "named": (lens["token"].isel(rank=0).to_numpy() == lens["final_token"].to_numpy()).astype(np.float64),
            "probability": lens["final_probability"].to_numpy(),
            "entropy": lens["entropy"].to_numpy(),
        }
        return of_prompt(data["score"].to_numpy(), sinks, data["value_norm"].to_numpy(), undecided, read)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``layers``: `MEASURES`; ``matched``: sinks minus others at the same step and place, across prompts."""
        from pandas import DataFrame

        layers = interval_table(measured, list(MEASURES), self.seed)
        rows = [row for name, data in measured.items() for row in matched_rows(name, data, self.seed)]
        return {"layers": layers.assign(meaning=layers["measure"].map(MEASURES)), "matched": corrected(DataFrame(rows))}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``layers``: a panel per measure."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import curves
        from sinklens.views.figures import panels

        figure, axes = panels(len(DRAWN), columns=3, size=(4.5, 3.4))
        for measure, ax in zip(DRAWN, axes, strict=True):
            curves(interval_table(measured, [measure], self.seed), "layer", ax).set(
                xlabel="layer", ylabel=wrapped(MEASURES[measure], 32)
            )
            ax.locator_params(axis="x", integer=True)
        figure.suptitle(f"Means over prompts with 95 % intervals; {SINK}", fontsize=9)
        return {"layers": figure}


def of_prompt(
    score: Float[np.ndarray, "step layer head pos"],
    sinks: Bool[np.ndarray, "step layer head pos"],
    norm: Float[np.ndarray, "step layer head pos"],
    undecided: Bool[np.ndarray, "step pos"],
    read: Mapping[str, Float[np.ndarray, "step layer pos"]],
) -> xr.Dataset:
    """The variables of `MaskedSinks.measure` of one prompt, from its answer's positions.

    Args:
        read: `LENS` by name.
    """
    here = undecided[:, None, None]
    sinks, others = sinks & here, ~sinks & here
    values = {
        "sinks": _mean(sinks.sum(-1), here.sum(-1), (0, 2)),
        "value_ratio": _over_known(_inside(norm, sinks) / _inside(norm, others), (0, 2)),
    }
    at_sink = np.asarray(sinks.any(axis=2))  # [step, layer, pos]
    at_other: np.ndarray = undecided[:, None] & ~at_sink
    for name, value in read.items():
        one, other = _inside(value, at_sink), _inside(value, at_other)
        both = np.where(np.isnan(one + other), np.nan, 1)
        values |= {f"{name}_sinks": _over_known(one * both, 0), f"{name}_others": _over_known(other * both, 0)}
        values[f"{name}_difference"] = _over_known(one - other, 0)
    strength = np.where(undecided[:, None], score.mean(axis=2), np.nan)
    values["correlation"] = _over_known(rank_correlation(strength, read["named"]), 0)
    place = np.arange(undecided.shape[1])
    values["partial"] = _over_known(partial_rank_correlation(strength, read["named"], place), 0)
    columns: dict[str, Any] = {name: ("layer", values[name]) for name in MEASURES}
    for name, found in {"sink": at_sink.astype(np.float32), **read}.items():
        known = np.where(undecided[:, None], found, np.nan).astype(np.float32)
        columns[f"{name}_at"] = (("layer", "step", "place"), known.transpose(1, 0, 2))
    coords = {"layer": np.arange(score.shape[1]), "step": np.arange(len(score)), "place": place}
    return xr.Dataset(columns, coords)


def matched_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """Difference of `LENS` between undecided sinks and other undecided positions of the same step and place.

    ``matched``: step and place, or these within groups of prompts, if groups are known. ``matched_share``: share of the
    sinks that have others to compare with.
    """
    rows, group = [], groups_of(data)
    for layer in data["layer"].to_numpy():
        part = data.sel(layer=layer)
        sink, places = part["sink_at"] == 1, part["sink_at"].notnull()
        for name, matching in product(LENS, matchings(group)[1:]):
            parts = two_groups(part[f"{name}_at"], places.astype(float).where(places), sink, places & ~sink)
            found = compare(parts, seed, difference=True, group=group, within=matching.within)
            found = found._replace(share=comparable_share(parts[1], parts[3], group if matching.within else None))
            labels = {"layer": [layer], "matched": [matching.name]}
            (row,) = interval_rows(model, f"{name}_difference", shaped(found.found, 2), labels)
            rows.append({**row, **labels_of(found, matching.claim), "meaning": LENS[name]})
    return rows


def _nothing(prompts: int, layers: int) -> xr.Dataset:
    """The variables of an autoregressive model."""
    columns: dict[str, Any] = {name: (("prompt", "layer"), np.full((prompts, layers), np.nan)) for name in MEASURES}
    empty = np.full((prompts, layers, 1, 1), np.nan, dtype=np.float32)
    columns |= {f"{name}_at": (("prompt", "layer", "step", "place"), empty) for name in ("sink", *LENS)}
    return xr.Dataset(columns, {"layer": np.arange(layers), "step": [0], "place": [0]})


def _inside(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Mean of `values` [..., pos] over a group of positions; NaN where it is empty."""
    count = group.sum(axis=-1)
    return np.divide(np.where(group, values, 0).sum(axis=-1), count, out=np.full(count.shape, np.nan), where=count > 0)


def _mean(part: np.ndarray, total: np.ndarray, axes: Any) -> np.ndarray:
    """Σ part / Σ total; NaN where there is nothing."""
    total = np.broadcast_to(total, part.shape).sum(axis=axes)
    return np.divide(part.sum(axis=axes), total, out=np.full(total.shape, np.nan), where=total > 0)


def _over_known(values: np.ndarray, axes: Any) -> np.ndarray:
    """Mean over the entries that are not NaN."""
    return _mean(np.nan_to_num(values), (~np.isnan(values)).astype(np.float64), axes)
