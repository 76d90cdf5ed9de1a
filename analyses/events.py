"""Do sinks predict which tokens are decided next, and do they jump to tokens that were just decided?

    sinklens analyse events tiny-llada tiny-dream

*Order.* At every step, over the undecided positions: the rank correlation of a position's score (column sum, mean over
heads, and over layers) with the step that decides it. Below 0, strong keys are decided earlier. Score and step also
depend on the position, so the correlation is reported crude, with the position held fixed (partial correlation), and
within strata (between prompts, at the same step and place in the answer; and within groups of prompts, such as the
templates of word problems: in another template, the same place has other tokens).

*Jumps.* A head's strongest key jumps at step t if its position differs from step t − 1. The *landing rate* of a
place is the number of heads that jump to it / the number of heads that could (those that were elsewhere). The *age* of
an answer token at a step is the number of steps since the one that decided it: 1 where this is the first step that
sees it, 0 or below where it is still masked. The tables report the landing rate at age 1 relative to that of other
answer places (all of them, or those decided earlier), crude and at the same step and place across prompts (strata.py).
They report the same for each age, which shows whether the jump comes with the decision or with what precedes it.

A just decided token is also what changes most: the embedding of all other places stays. So a second comparison is made:
with the landing rate where the same token is *written over* an earlier one, with nearly the same change of the
embedding, on the canvas of the step before (`rewritten`).

In an autoregressive model, step and place determine the age and the order, so nothing can be matched; all numbers are
NaN.

Caveat: correlations do not show that sinks cause the order. A key can be strong because its token is nearly certain.
And a token written over another seldom fits its text, which can change attention for other reasons than the size of the
change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.estimates.ranks import partial_rank_correlation, rank_correlation, ranks
from sinklens.analyses.estimates.scales import LOG
from sinklens.analyses.estimates.strata import (
    Groups,
    Matched,
    compare,
    correlation_within,
    groups_of,
    matched_row,
    stratified,
    two_groups,
)
from sinklens.analyses.estimates.tables import corrected, interval_table, known_mean
from sinklens.analyses.matching import ratio
from sinklens.analyses.study import Study
from sinklens.experiments.swaps import column_sums
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack, motion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

ORDER = {
    "correlation": "rank correlation of score and deciding step over the undecided positions of a step, at least four",
    "partial": "the same with the position held fixed",
    "within": "the same between prompts, at the same step and place",
    "within_group": "the same between prompts of one group, at the same step and place",
}
LANDINGS = {
    "rate_just": "landing rate at answer tokens decided by the previous step",
    "rate_others": "landing rate at the places they are compared with",
    "ratio": "ratio of the two rates",
}
WRITTEN = ("written_landed_at", "written_at_risk_at")
PLACES = ("landed_at", "at_risk_at", "age_at", "score_rank_at", "order_rank_at", *WRITTEN)


@dataclass
class Events(Study):
    """See the module."""

    name: ClassVar[str] = "events"
    under_policies: ClassVar[bool] = True
    needs_mask_token: ClassVar[str] = "its steps accept tokens and take them back, so no single step decides a position"

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """See `events_of` and `written_over`."""
        if model.causal:
            empty = np.full((len(prompts), 1, 1), np.nan, dtype=np.float32)
            columns: dict[str, Any] = dict.fromkeys(PLACES, (("prompt", "step", "place"), empty))
            columns |= dict.fromkeys(("correlation", "partial"), ("prompt", np.full(len(prompts), np.nan)))
            return xr.Dataset(columns, {"step": [0], "place": [0]})
        track = self.generate(model, prompts, settings).track
        return events_of(track).merge(written_over(model, track))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``order``: `ORDER`; ``landings``: `LANDINGS`."""
        from pandas import DataFrame, concat

        within = DataFrame([row for name, data in measured.items() for row in within_rows(name, data, self.seed)])
        order = concat([interval_table(measured, ["correlation", "partial"], self.seed), corrected(within)])
        order = order.reset_index(drop=True)
        landings = DataFrame([row for name, data in measured.items() for row in landing_rows(name, data, self.seed)])
        return {
            "order": order.assign(meaning=order["measure"].map(ORDER)),
            "landings": corrected(landings).assign(meaning=landings["measure"].map(LANDINGS)),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``order``: the correlations."""
        from sinklens.analyses.figures import one_panel
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import interval_dots

        table, names = self.tables(measured)["order"], {name: wrapped(meaning, 44) for name, meaning in ORDER.items()}
        label = "below 0: strong keys are decided earlier; 95 % intervals"
        return {
            "order": one_panel(
                lambda ax: interval_dots(table, "measure", ax, names=names, line=0.0), (7, 2.8), xlabel=label
            )
        }


def events_of(track: SinkTrack) -> xr.Dataset:
    """``correlation`` and ``partial`` [prompt]: see `ORDER`, means over steps; and, [prompt, step, place], NaN where
    undefined: ``landed_at`` and ``at_risk_at``, heads that jump to a place and that could; ``age_at``;
    ``score_rank_at`` and ``order_rank_at``, ranks among the undecided positions of the step, from 0 to 1.
    """
    answer = slice(track.prompt_length, None)
    masked, committed = (track.data[name].isel(pos=answer).to_numpy() for name in ("masked", "committed"))
    there = track.scores().isel(pos=answer).notnull().any(("layer", "head")).to_numpy()  # [batch, step, pos]
    steps, places = (np.arange(size) for size in masked.shape[1:])
    decided = np.where(committed.any(axis=1), committed.argmax(axis=1), len(steps)).astype(np.float64)
    age = np.where(there, steps[:, None] - decided[:, None], np.nan)
    score = track.scores().isel(pos=answer).mean("head").to_numpy()  # [batch, step, layer, pos]
    score = np.where((masked & there)[:, :, None], score, np.nan).mean(axis=2)
    order = np.where(masked & there, decided[:, None], np.nan)
    landed, at_risk = (value[..., answer] for value in landings(track))
    values = {
        "landed_at": np.where(there, landed, np.nan), "at_risk_at": np.where(there, at_risk, np.nan), "age_at": age,
        "score_rank_at": ranks(score), "order_rank_at": ranks(order),
    }  # fmt: skip
    columns: dict[str, Any] = {
        name: (("prompt", "step", "place"), value.astype(np.float32)) for name, value in values.items()
    }
    by_step = {
        "correlation": rank_correlation(score, order),
        "partial": partial_rank_correlation(score, order, places),
    }
    columns |= {name: ("prompt", [known_mean(row) for row in value]) for name, value in by_step.items()}
    return xr.Dataset(columns, {"step": steps, "place": places})


def landings(track: SinkTrack) -> tuple[Float[np.ndarray, "batch step pos"], Float[np.ndarray, "batch step pos"]]:
    """Heads whose strongest key jumps to a position at a step, and heads that could: those that were elsewhere.

    Both are 0 where the step or the one before has no strongest key.
    """
    now = motion.strongest_key(track).to_numpy()
    before = np.full_like(now, np.nan)
    before[:, 1:] = now[:, :-1]
    known = ~np.isnan(now + before)
    landed, at_risk = (np.zeros((now.shape[0], now.shape[1], track.data.sizes["pos"])) for _ in range(2))
    for pos in range(landed.shape[-1]):
        elsewhere = known & (before != pos)
        at_risk[..., pos] = elsewhere.sum(axis=(2, 3))
        landed[..., pos] = (elsewhere & (now == pos)).sum(axis=(2, 3))
    return landed, at_risk


def within_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """The rows "within" and "within_group" of `ORDER`, the latter if groups are known.

    ``matched_share``: share of the undecided places that have others to compare with.
    """
    score, order = (
        data[name].to_numpy().reshape(data.sizes["prompt"], -1) for name in ("score_rank_at", "order_rank_at")
    )
    group, rows = groups_of(data), []
    for measure in ("within",) if group is None else ("within", "within_group"):  # the strictest is a claim
        found = correlation_within(score, order, seed, group, measure == "within_group")
        rows.append(matched_row(model, measure, found, {}, group is None or measure == "within_group"))
    return rows


def landing_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """`LANDINGS` by what is compared and matched.

    ``others``: all other answer places, only those decided earlier, or those written over. ``matched``: nothing, step
    and place, or these within groups of prompts. ``matched_share``: share of the landings on just decided tokens that
    have others to compare with.
    """
    just, rows, group = data["age_at"] == 1, [], groups_of(data)
    for others, parts in _compared(data, just).items():
        crude = [part.sum(axis=1, keepdims=True) for part in parts]
        compared = {
            "nothing": {
                "ratio": compare(crude, seed, group=group, within=False),
                "rate_just": _rate(crude[:2], seed, group),
                "rate_others": _rate(crude[2:], seed, group),
            },
            "step, position": {"ratio": compare(parts, seed, group=group, within=False)},
        }
        if group is not None:
            compared["step, position, group"] = {"ratio": compare(parts, seed, group=group)}
        for matched, found in compared.items():
            labels, claim = {"others": others, "matched": matched}, matched == [*compared][-1]
            rows += [matched_row(model, measure, one, labels, claim) for measure, one in found.items()]
    return rows


def _compared(data: xr.Dataset, just: xr.DataArray) -> dict[str, list[np.ndarray]]:
    """Landings and heads at risk of just decided tokens and of the places they are compared with, by step and place."""
    groups = {"all": data["age_at"].notnull() & ~just, "decided earlier": data["age_at"] > 1}
    found = {name: two_groups(data["landed_at"], data["at_risk_at"], just, second) for name, second in groups.items()}
    landed, at_risk = (data[name] for name in WRITTEN)
    written = two_groups(landed, at_risk, landed.notnull())[:2]
    return {**found, "written over": [*found["all"][:2], *written]}


def _rate(parts: Sequence[np.ndarray], seed: int, group: Groups | None) -> Matched:
    """Landings / heads that could land, summed over everything."""
    return stratified(lambda *sums: sums, ratio, parts, seed, group, within=False, scale=LOG)


# --- the control for just decided tokens: other tokens whose embedding changes as much --------------------------------


class Rewritten(NamedTuple):
    """A canvas in which tokens decided earlier are replaced by just decided ones.

    Attributes:
        step: the step after the one that decided them.
        places: where they are written.
        ids: the canvas of the step before, with them.
    """

    step: int
    places: list[int]
    ids: Int[Tensor, " pos"]


def written_over(model: "Model", track: SinkTrack) -> xr.Dataset:
    """Landings on just decided tokens that are written over earlier ones, as in `landings`.

    Returns:
        ``written_landed_at`` and ``written_at_risk_at`` [prompt, step, place], NaN elsewhere: the heads whose strongest
        key is this place of the rewritten canvas, and those that had another on the canvas of the step before.
    """
    shape = track.data["masked"].transpose("batch", "step", "pos").shape
    landed, at_risk = np.full(shape, np.nan), np.full(shape, np.nan)
    for row in range(shape[0]):
        ids = torch.from_numpy(track.data["token_id"][row].to_numpy().astype(np.int64))
        real = np.flatnonzero(track.data["is_real"][row].to_numpy())
        masks, decided = (track.data[name][row].to_numpy()[:, real] for name in ("masked", "committed"))
        found = rewritten(model, ids[:, real], masks, decided, real >= track.prompt_length)
        if not found:
            continue
        canvases = [torch.stack([ids[one.step - 1, real] for one in found]), torch.stack([one.ids for one in found])]
        before, after = (column_sums(model, part)[:, 0].argmax(axis=-1) for part in canvases)
        for one, old, new in zip(found, before, after, strict=True):
            for place in one.places:
                at_risk[row, one.step, real[place]] = (old != place).sum()
                landed[row, one.step, real[place]] = ((old != place) & (new == place)).sum()
    answer = slice(track.prompt_length, None)
    return xr.Dataset(
        {
            name: (("prompt", "step", "place"), value[..., answer].astype(np.float32))
            for name, value in zip(WRITTEN, (landed, at_risk), strict=True)
        }
    )


def rewritten(
    model: "Model",
    ids: Int[Tensor, "step pos"],
    masked: Bool[np.ndarray, "step pos"],
    committed: Bool[np.ndarray, "step pos"],
    answer: Bool[np.ndarray, " pos"],
) -> list[Rewritten]:
    """The canvases of one row without padding, for the steps that see a just decided token and earlier ones.

    A step that decides a token changes the model's input at this position only, from the embedding of the mask to that
    of the token. So no other position of a run matches it in the size of this change, and a matched control has to be
    made: each just decided token is written over the answer token, decided earlier and not yet taken, at which
    ‖e(new) − e(old)‖ is nearest to ‖e(new) − e(mask)‖.
    """
    table, found = model.tree.W_E.detach(), []
    for step in range(1, len(ids)):
        before, now = ids[step - 1], ids[step]
        just = np.flatnonzero(committed[step - 1] & answer & (now >= 0).numpy())
        earlier, canvas, chosen = answer & ~masked[step - 1] & (before >= 0).numpy(), before.clone(), list[int]()
        for source in just:
            moved = table[now[source].expand_as(before).to(table.device)] - table[before.to(table.device)]
            change = moved.float().norm(dim=-1).cpu().numpy()
            miss = np.where(earlier & (change > 0), np.abs(change - change[source]), np.inf)
            place = int(miss.argmin())
            if miss[place] < np.inf:
                earlier[place], canvas[place] = False, now[source]
                chosen.append(place)
        if chosen:
            found.append(Rewritten(step, chosen, canvas))
    return found
