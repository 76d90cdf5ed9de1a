"""Can a context be compressed to its sinks?

    sinklens analyse budget tiny-llada tiny-llama

From step 1 on, every query sees itself and a fixed number of further keys (the *budget*), chosen in one of these ways:

- *strongest*: the keys with the highest scores at the previous step of the unchanged run, head by head (`KeepKeys`);
- *strongest and near* (``mixed``): half of them chosen so, the other half the query's neighbors (StreamingLLM's
  recipe, 2309.17453, with the measured sinks in place of the first tokens);
- *near*: only the query's neighbors, on both sides, or before it in an autoregressive model;
- *own*: the strongest keys by the scores of the restricted run. A key not kept at a step receives no attention and is
  not kept at the next, so this keeps its first choice;
- *random*, *weakest*: controls, with as many keys at random, and those with the lowest scores;
- *same mass*: a control, with as many random weaker keys of the head as receive the attention of the strongest.

If sinks hold a context together, a few of the strongest keys should achieve what many others cannot. In an
autoregressive model, scores are column sums over the text so far (the heavy hitters of H2O, 2306.14048), and for *own*
the last token's attention; only the answer's queries are restricted, the prompt is read unrestricted.

``curve`` sets what the restriction costs against the attention that it removes, for the keys that the unchanged run
determines: what the hidden keys receive there, as if no query saw itself.

Limitation: a hidden key may still have influenced the visible keys, in every layer. This study shows what can be
left out of attention, not what could have been left out of the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects, unchanged
from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.mass import SAME_MASS, acting, curve, removed
from sinklens.analyses.ratios import ratio_table
from sinklens.analyses.study import Study
from sinklens.families import settings_for
from sinklens.interventions import Intervention, KeepKeys, WindowAttention
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

BUDGETS = (2, 4, 8, 16, 32)
KEY_KINDS = {
    "strongest": "strongest keys",
    "mixed": "strongest and near",
    "near": "nearest keys",
    "own": "strongest by the restricted run's scores",
    "random": "random keys",
    "weakest": "weakest keys",
    SAME_MASS: "random weaker keys with as much attention",
}
CONTROLS = ("random", SAME_MASS)
SHOWN = ("kl", "changed", "right")
GAINS = {"changed": (-1, 1), "right": (-1, 1)}  # ranges of the differences between two kinds of keys


@dataclass
class Budget(Study):
    """See the module."""

    name: ClassVar[str] = "budget"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEANINGS` and ``removed`` [prompt, budget, kind]; ``removed`` is NaN for keys that depend on the run."""
        steps = settings_for(model, dict(settings)).steps
        axes = ("budget", "kind")

        def one(prompt: SinglePrompt) -> xr.Dataset:
            track = unchanged(self, model, prompt, settings)
            listed = {f"{kind} {keys}": restricted(kind, keys, steps, track) for keys in BUDGETS for kind in KEY_KINDS}
            found = effects(self, model, prompt, settings, listed)
            sizes = (len(BUDGETS), len(KEY_KINDS))
            hidden = np.array([_removed(kind, keys, track) for keys in BUDGETS for kind in KEY_KINDS])
            values = {**{name: found[name].to_numpy() for name in MEANINGS}, "removed": hidden}
            return xr.Dataset({name: (axes, value.reshape(sizes)) for name, value in values.items()})

        return each_prompt(prompts, one).assign_coords(budget=list(BUDGETS), kind=list(KEY_KINDS))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``budget``: every measure by number and kind of keys; ``gain``: strongest keys minus each control, one family
        of claims per model; ``curve``: KL against the attention removed; ``ratios``: KL with each control over KL with
        the strongest keys, beyond their means.
        """
        table = interval_table(measured, list(MEANINGS), self.seed)
        best = {name: data[list(MEANINGS)].sel(kind="strongest", drop=True) for name, data in measured.items()}
        control = {
            name: data[list(MEANINGS)].sel(kind=list(CONTROLS)).rename(kind="control")
            for name, data in measured.items()
        }
        gain = {name: best[name] - control[name] for name in measured}
        tables = {
            "budget": table,
            "gain": judged(interval_table(gain, list(MEANINGS), self.seed, GAINS, null=0.0), "more", "less"),
            "curve": curve(measured, "kl", "removed", self.seed),
        }
        named = {name: rows.assign(meaning=rows["measure"].map(MEANINGS)) for name, rows in tables.items()}
        kl = {name: data["kl"] for name, data in control.items()}
        strongest = {name: best[name]["kl"].broadcast_like(values) for name, values in kl.items()}
        return {**named, "ratios": ratio_table(kl, strongest, self.seed)}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``budget``: a row of panels per model, a curve per kind of keys; ``curve``: KL against attention removed."""
        from sinklens.views.effects import costs_by_mass, kinds_of_keys

        table = interval_table(measured, list(SHOWN), self.seed)
        along = "keys visible to every query besides itself"
        against = curve(measured, "kl", "removed", self.seed)
        return {
            "budget": kinds_of_keys(table, "budget", "kind", KEY_KINDS, MEANINGS, along),
            "curve": costs_by_mass(against, "kind", KEY_KINDS, MEANINGS["kl"]),
        }


def restricted(kind: str, keys: int, steps: int, track: SinkTrack) -> list[Intervention]:
    """Interventions that leave every query itself and `keys` keys, from step 1 on.

    Args:
        kind: a key of `KEY_KINDS`.
        keys: budget. An odd number of near keys is reduced by one where they are on both sides; the number of other
            keys is capped at the number of prompt tokens.
        steps: number of steps of the run.
        track: the track of the unchanged run.
    """
    later, causal = range(1, steps), track.causal
    near, most = keys // 2 if kind == "mixed" else 0, track.prompt_length
    if kind == "near":
        return [WindowAttention(width=keys if causal else keys // 2, steps=later)]
    kept = KeepKeys(top_k=min(keys - near, most), window=near if causal else near // 2, steps=later)
    if kind in ("own", "random"):
        return [replace(kept, pick="random_any" if kind == "random" else "strongest")]
    if kind == SAME_MASS:
        return [replace(kept, pick=SAME_MASS, persistent=True, source=track)]
    return [replace(kept, pick="weakest" if kind == "weakest" else "strongest", source=track)]


def _removed(kind: str, keys: int, track: SinkTrack) -> float:
    """Share of attention at the hidden keys of one kind; NaN for those that the unchanged run does not determine."""
    if kind not in ("strongest", "weakest") or track.causal:
        return float("nan")
    score = track.scores()
    sign = score if kind == "strongest" else -score
    rank = sign.copy(data=(-sign.fillna(-np.inf).to_numpy()).argsort(axis=-1, kind="stable").argsort(axis=-1))
    kept = (rank < min(keys, track.prompt_length)) & score.notnull()
    return float(removed(score.notnull() & ~kept, acting(track))[0])
