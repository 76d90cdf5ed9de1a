"""What kind of token do sinks sit on, and do they prefer it?

    sinklens analyse token_types tiny-llada tiny-llama

The frequency table (Rulli et al., 2510.15731, Table 2), and, for every kind of token and every state (prompt, still
masked, committed), its share of the sinks compared with its share of the positions: on a canvas full of masks most
sinks are masks, preferred or not.

Numbers are pooled over prompts, so a prompt with many sinks counts more; intervals resample prompts and pool again.

Limitation: a token at the same position of every prompt, such as the start token or the last colon, cannot be
distinguished from that position; prompts of one form make any position look like a kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.intervals import Interval, interval_rows, interval_table, pooled
from sinklens.analyses.study import SINK, Study
from sinklens.sinks import SinkTrack
from sinklens.sinks.kinds import absorption, enrichment, frequency_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

SETS = ("kind", "state")
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

    def measure(self, model: "Model", prompts: Sequence[Any], settings: Mapping[str, Any]) -> xr.Dataset:
        """See `sinks_by_token`."""
        return sinks_by_token(self.generate(model, prompts, settings).track)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``tokens``: Table 2, all tokens that are a sink at least once, most frequent first; ``kinds`` and ``states``:
        `MEASURES` of each, and ``absorption``, the percentage of all attention that it receives.
        """
        from pandas import concat

        tables = {"tokens": concat([_tokens(name, data, self.seed) for name, data in measured.items()])}
        for by in SETS:
            parts = [_preference(name, data, by, self.seed) for name, data in measured.items()]
            received = interval_table(measured, [f"{by}_absorption"], self.seed).assign(measure="absorption")
            tables[f"{by}s"] = concat([*parts, received], ignore_index=True)
        return tables

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``tokens``: the head of Table 2, a panel per model; ``enrichment``: kinds and states, matched by step."""
        from sinklens.views.charts import frequency_bars, interval_dots, nothing_to_show
        from sinklens.views.figures import panels

        tables = self.tables(measured)
        tokens, axes = panels(len(measured), size=(5.5, 4))
        for name, ax in zip(measured, axes, strict=True):
            head = tables["tokens"][tables["tokens"]["model"] == name].head(SHOWN)
            frequency_bars(head, name, ax) if len(head) else nothing_to_show(ax, name, "no sinks")
        tokens.suptitle(f"Share of all sinks with 95 % intervals; {SINK}", fontsize=9)
        preference, axes = panels(len(SETS), size=(6, 4.5))
        for by, ax in zip(SETS, axes, strict=True):
            table = tables[f"{by}s"]
            rows = table[(table["measure"] == "matched") & table["estimate"].notna()]
            interval_dots(rows, by, ax, line=1.0)
            ax.set(xlabel="sinks relative to chance\nat the same steps (1: as by chance)", title=f"by {by}")
        preference.suptitle(f"Pooled over prompts, 95 % intervals; {SINK}", fontsize=9)
        return {"tokens": tokens, "enrichment": preference}


def sinks_by_token(track: SinkTrack) -> xr.Dataset:
    """The contribution of each prompt to the tables.

    For ``by`` of `SETS`: ``{by}_sinks`` and ``{by}_positions`` [prompt, by], as `kinds.enrichment` counts them;
    ``{by}_expected``, the number of sinks expected there if those of each step fell on its positions at random;
    ``{by}_absorption``, percent of the attention, averaged over steps and layers. ``token_sinks`` and
    ``token_positions`` [prompt, token]: counts per token, labelled by id, kind and text.
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
    return data.merge(_tokens_of_rows(track))


def _tokens_of_rows(track: SinkTrack) -> xr.Dataset:
    """``token_sinks`` and ``token_positions`` [prompt, token]; 0 for a token that only other rows have."""
    heads = track.data.sizes["layer"] * track.data.sizes["head"]
    rows = []
    for row in range(track.data.sizes["batch"]):
        part = track.isel(batch=row)
        table = frequency_table(part)
        places = int((part.scores().notnull().any(("layer", "head"))).sum()) * heads
        labels = [_token_label(*line) for line in zip(table["id"], table["kind"], table["token"], strict=True)]
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


def _token_label(token: int, kind: str, text: str) -> str:
    """``id kind text``: distinguishes tokens with the same text without a second table."""
    shown = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
    return f"{token} {kind} {shown}"


def _tokens(name: str, data: xr.Dataset, seed: int) -> "DataFrame":
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
    found: dict[str, Interval] = {
        "sink_share": pooled(_share, [sinks], seed),
        "position_share": pooled(_share, [places], seed),
        "enrichment": pooled(lambda one, all_: _share(one) / _share(all_), [sinks, places], seed),
        "matched": pooled(np.divide, [sinks, expected], seed),
    }
    labels = {by: data[by].to_numpy()}
    return DataFrame([row for measure, part in found.items() for row in interval_rows(name, measure, part, labels)])


def _share(counts: np.ndarray) -> np.ndarray:
    """`counts` [..., set] as shares of their sum."""
    return counts / counts.sum(axis=-1, keepdims=True)
