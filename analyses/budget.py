"""Can a context be compressed to its sinks?

    sinklens analyse budget tiny-llada tiny-llama

From step 1 on, every query sees itself and so many keys more (the *budget*), chosen in one of several ways:

- *strongest*: the keys with the highest scores of the step before in the unchanged run, head by head (`KeepKeys`);
- *strongest and near*: half of them so, the other half its neighbours (StreamingLLM's recipe, 2309.17453, with the
  measured sinks in place of the first tokens);
- *near*: its neighbours alone, on both sides, or before it where the model is autoregressive;
- *own*: the strongest by the restricted run's own scores. What is not kept at a step receives no attention and is not
  kept at the next, so that this holds on to the first choice;
- *random*, *weakest*: as controls, as many keys at random, and those with the lowest scores.

If sinks are what holds a context together, few strongest keys should do what many others cannot. In an autoregressive
model scores are column sums of the text so far (the heavy hitters of H2O, 2306.14048), of *own* the last token's
attention; the answer's queries are restricted, and the prompt is read as it is.

One way this fails: whatever is hidden may still have left its trace in the keys that are seen, in every layer; so this
is about what can be left out of attention, not about what could have been left out of the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects, unchanged
from sinklens.analyses.intervals import interval_table
from sinklens.analyses.study import Study
from sinklens.interventions import Intervention, KeepKeys, WindowAttention
from sinklens.sampling import settings_for
from sinklens.sinks import SinkTrack

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

BUDGETS = (2, 4, 8, 16, 32)
KINDS = {
    "strongest": "strongest keys",
    "mixed": "strongest and near",
    "near": "nearest keys",
    "own": "strongest by own scores",
    "random": "random keys",
    "weakest": "weakest keys",
}
SHOWN = ("kl", "changed", "right")


@dataclass
class Budget(Study):
    """See the module."""

    name: ClassVar[str] = "budget"
    together: ClassVar[bool] = False

    def measure(self, model: "Model", prompts: Sequence[Any], settings: Mapping[str, Any]) -> xr.Dataset:
        """`MEANINGS` [prompt, budget, kind]."""
        steps = settings_for(model, dict(settings)).steps
        axes = ("budget", "kind")

        def one(prompt: Any) -> xr.Dataset:
            track = unchanged(self, model, prompt, settings)
            listed = {f"{kind} {keys}": restricted(kind, keys, steps, track) for keys in BUDGETS for kind in KINDS}
            found = effects(self, model, prompt, settings, listed)
            sizes = (len(BUDGETS), len(KINDS))
            return xr.Dataset({name: (axes, found[name].to_numpy().reshape(sizes)) for name in MEANINGS})

        return each_prompt(prompts, one).assign_coords(budget=list(BUDGETS), kind=list(KINDS))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``budget``: every measure by number and kind of keys; ``gain``: the strongest less the random ones."""
        table = interval_table(measured, list(MEANINGS), self.seed)
        gain = {name: data.sel(kind="strongest") - data.sel(kind="random") for name, data in measured.items()}
        tables = {"budget": table, "gain": interval_table(gain, list(MEANINGS), self.seed)}
        return {name: rows.assign(meaning=rows["measure"].map(MEANINGS)) for name, rows in tables.items()}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``budget``: a line of panels per model, a curve per kind of keys."""
        from sinklens.views.effects import kinds_of_keys

        table = interval_table(measured, list(SHOWN), self.seed)
        along = "keys that every query sees beside itself"
        return {"budget": kinds_of_keys(table, "budget", "kind", KINDS, MEANINGS, along)}


def restricted(kind: str, keys: int, steps: int, track: SinkTrack) -> list[Intervention]:
    """What leaves every query `keys` keys and itself, from step 1 on.

    Args:
        kind: of `KINDS`.
        keys: an odd number of near ones loses one where they stand on both sides; of others there are no more than the
            prompt has tokens.
        track: of the unchanged run.
    """
    later, causal = range(1, steps), track.causal
    near, most = keys // 2 if kind == "mixed" else 0, track.prompt_length
    if kind == "near":
        return [WindowAttention(width=keys if causal else keys // 2, steps=later)]
    kept = KeepKeys(top_k=min(keys - near, most), window=near if causal else near // 2, steps=later)
    if kind in ("own", "random"):
        return [replace(kept, pick="random" if kind == "random" else "strongest")]
    return [replace(kept, pick="weakest" if kind == "weakest" else "strongest", source=track)]
