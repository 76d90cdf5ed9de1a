"""What kind of token do sinks sit on, and do they prefer it?

    sinklens analyse token_types tiny-llada tiny-llama

The frequency table (Rulli et al., 2510.15731, Table 2), and, for every kind of token and every state (prompt, still
masked, committed), its share of the sinks compared with its share of the positions: on a canvas full of masks most
sinks are masks, preferred or not.

Numbers are pooled over prompts, so a prompt with many sinks counts more; intervals resample prompts and pool again.

Limitation: a token at the same position of every prompt, such as the start token or the last colon, cannot be
distinguished from that position; if all prompts have the same form, any position looks like a kind. Prompts of a few
templates have the same form within each: matched by position across templates, a kind of token is compared with that of
another template. So places are also matched within groups of prompts. A token with nothing to be compared with drops
out; ``matched_share`` is the share of the sinks that remain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.estimates.strata import compare, groups_of, matched_row
from sinklens.analyses.estimates.tables import corrected, interval_rows, interval_table
from sinklens.analyses.matching import ENUMS, counts_by_stratum, places_of
from sinklens.analyses.study import SINK, Study
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack
from sinklens.sinks.kinds import absorption, enrichment, frequency_table
from sinklens.sinks.labels import short
from sinklens.utils.escaping import spelled
from sinklens.utils.estimates import Estimate, pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

SETS = ("kind", "state")
MATCHINGS = {  # what places must share to be compared
    "kind": {"nothing": (), "step": ("step",), "step, position": ("step", "place"),
             "step, state, position": ("step", "state", "place"), "step, position, group": ("step", "place", "group"),
             "step, state, position, group": ("step", "state", "place", "group")},
    "state": {"nothing": (), "step": ("step",), "step, position": ("step", "place"),
              "step, position, group": ("step", "place", "group")},
}  # fmt: skip
CLAIMS = ("step, position, group", "step, position")  # the first that a table has: its rows are claims
SHOWN = 10  # tokens in the figure
MEASURES = {
    "sink_share": "share of all sinks",
    "position_share": "share of all positions",
    "enrichment": "sink share / position share",
    "matched": "sink share / share expected if the sinks of each step fell on its positions at random",
}


@dataclass
class TokenTypes(Study):
    """See the module."""

    name: ClassVar[str] = "token_types"
    under_policies: ClassVar[bool] = True

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        return sinks_by_token(self.generate(model, prompts, settings).track)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``tokens``: Table 2, all tokens that are a sink at least once, most frequent first; ``kinds`` and ``states``:
        `MEASURES` of each, and ``absorption``, the percentage of all attention that it receives; ``matched``: see
        `matched_rows`.
        """
        from pandas import DataFrame, concat

        tables = {"tokens": concat([token_rows(name, data, self.seed) for name, data in measured.items()])}
        rows = [row for name, data in measured.items() for row in matched_rows(name, data, self.seed)]
        tables["matched"] = corrected(DataFrame(rows))
        for by in SETS:
            parts = [_preference(name, data, by, self.seed) for name, data in measured.items()]
            received = interval_table(measured, [f"{by}_absorption"], self.seed).assign(measure="absorption")
            tables[f"{by}s"] = concat([*parts, received], ignore_index=True)
        return tables

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``tokens``: the head of Table 2, a panel per model; ``enrichment``: kinds and states, matched."""
        from sinklens.analyses.figures import nothing_to_show
        from sinklens.views.charts import interval_dots
        from sinklens.views.figures import panels

        tables = self.tables(measured)
        tokens, axes = panels(len(measured), size=(5.5, 4))
        for name, ax in zip(measured, axes, strict=True):
            head = tables["tokens"][tables["tokens"]["model"] == name].head(SHOWN)
            interval_dots(head, "token", ax) if len(head) else nothing_to_show(ax, name, "no sinks")
            ax.set(xlabel="share of all sinks", title=short(name))
        tokens.suptitle(f"Share of all sinks with 95 % intervals; {SINK}", fontsize=9)
        preference, axes = panels(len(SETS), size=(6, 4.5))
        table = tables["matched"]
        for by, ax in zip(SETS, axes, strict=True):
            strictest = [name for name in MATCHINGS[by] if (table["matched"] == name).any()][-1:]
            rows = table[(table["by"] == by) & table["matched"].isin(strictest)]
            rows = rows[rows["estimate"].notna() & ~np.isinf(rows[["estimate", "high"]]).any(axis=1)]
            interval_dots(rows, "set", ax, line=1.0)
            ax.set(xlabel=f"sinks relative to other places\nof the same {', '.join(strictest)}", title=f"by {by}")
        preference.suptitle(f"Pooled over prompts, 95 % intervals; {SINK}", fontsize=9)
        return {"tokens": tokens, "enrichment": preference}


def sinks_by_token(track: SinkTrack) -> xr.Dataset:
    """The contribution of each prompt to the tables.

    For ``by`` of `SETS`: ``{by}_sinks`` and ``{by}_positions`` [prompt, by], as `kinds.enrichment` counts them;
    ``{by}_expected``, the number of sinks expected there if those of each step fell on its positions at random;
    ``{by}_absorption``, percent of the attention, averaged over steps and layers. ``token_sinks`` and
    ``token_positions`` [prompt, token]: counts per token, labelled by id, kind and text. ``sinks_at`` [prompt, step,
    place], sinks of all layers and heads at a place, and its codes ``kind_at`` and ``state_at``, NaN where none exists;
    places count from the answer.
    """
    columns: dict[str, xr.DataArray] = {}
    for by in SETS:
        counts = enrichment(track, by=by)
        expected = (counts["matched_share"] * counts["sinks"].sum(by)).fillna(0)
        received = absorption(track, by=by).mean(("step", "layer"))
        columns |= {
            f"{by}_sinks": counts["sinks"], f"{by}_positions": counts["positions"], f"{by}_expected": expected,
            f"{by}_absorption": received,
        }  # fmt: skip
    data = xr.Dataset(columns).rename(batch="prompt").drop_vars("prompt", errors="ignore").astype(np.float64)
    return data.merge(tokens_of_rows(track)).merge(places_of(track))


def tokens_of_rows(track: SinkTrack) -> xr.Dataset:
    """``token_sinks`` and ``token_positions`` [prompt, token]; 0 for a token that only other rows have."""
    heads = track.data.sizes["layer"] * track.data.sizes["head"]
    rows = []
    for row in range(track.data.sizes["batch"]):
        part = track.isel(batch=row)
        table = frequency_table(part)
        places = int((part.scores().notnull().any(("layer", "head"))).sum()) * heads
        named = zip(table["id"], table["kind"], table["token"], strict=True)
        labels = [f"{token} {kind} {spelled(text)}" for token, kind, text in named]  # tokens may have the same text
        rows.append(
            xr.Dataset(
                {
                    "token_sinks": ("token", table["count"].to_numpy(dtype=np.float64)),
                    "token_positions": ("token", table["position_frequency"].to_numpy(dtype=np.float64) * places),
                },
                coords={"token": labels},
            ).sortby("token")
        )
    return xr.concat(rows, dim="prompt", join="outer").fillna(0)


def token_rows(name: str, data: xr.Dataset, seed: int) -> "DataFrame":
    """Rows of Table 2."""
    from pandas import DataFrame

    sinks, places = (data[part].fillna(0).to_numpy() for part in ("token_sinks", "token_positions"))
    found = pooled(_share, [sinks], seed)
    ids, kinds, texts = zip(*(str(label).split(" ", 2) for label in data["token"].to_numpy()), strict=True)
    rows = DataFrame(interval_rows(name, "frequency", found, {"token": texts}))
    rows = rows.assign(
        id=[int(token) for token in ids], kind=kinds, count=sinks.sum(axis=0).astype(int),
        position_frequency=_share(places.sum(axis=0)),
    )  # fmt: skip
    rows["enrichment"] = rows["estimate"] / rows["position_frequency"]
    return rows[rows["count"] > 0].sort_values(["count", "id"], ascending=[False, True], ignore_index=True)


def _preference(name: str, data: xr.Dataset, by: str, seed: int) -> "DataFrame":
    """Rows of `MEASURES`; ratios of a kind that no prompt has are NaN."""
    from pandas import DataFrame

    sinks, places, expected = (data[f"{by}_{part}"].to_numpy() for part in ("sinks", "positions", "expected"))
    found: dict[str, Estimate] = {
        "sink_share": pooled(_share, [sinks], seed),
        "position_share": pooled(_share, [places], seed),
        "enrichment": pooled(lambda one, all_: _share(one) / _share(all_), [sinks, places], seed),
        "matched": pooled(np.divide, [sinks, expected], seed),
    }
    labels = {by: data[by].to_numpy()}
    return DataFrame([row for measure, part in found.items() for row in interval_rows(name, measure, part, labels)])


def matched_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """The risk ratio of each kind and state against the others, for each choice of what places are matched by.

    ``matched``: what places of both must share; "group" where groups of prompts are known. ``matched_share``: share of
    the set's sinks at places that have others to compare with. A ratio is infinite where only other places have no
    sinks, and missing where neither has any.
    """
    rows, group = [], groups_of(data)
    for by in SETS:
        known = {name: axes for name, axes in MATCHINGS[by].items() if group is not None or "group" not in axes}
        claim = next(name for name in CLAIMS if name in known)
        for name, axes in known.items():
            sinks, places = counts_by_stratum(data, by, [axis for axis in axes if axis != "group"])
            for code in ENUMS[by]:
                if code >= 0 and places[:, code].any():
                    others = [part.sum(axis=1) - part[:, code] for part in (sinks, places)]
                    parts = [sinks[:, code], places[:, code], *others]
                    found = compare(parts, seed, group=group, within="group" in axes)
                    labels = {"by": by, "set": code.name.lower(), "matched": name}
                    rows.append(matched_row(model, "ratio", found, labels, name == claim))
    return rows


def _share(counts: np.ndarray) -> np.ndarray:
    """`counts` [..., set] as shares of their sum."""
    return counts / counts.sum(axis=-1, keepdims=True)
