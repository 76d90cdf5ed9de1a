"""Which heads matter, and do they matter for their sinks?

    sinklens analyse heads tiny-llada tiny-llama

One head at a time, its strongest key is masked (as in the paper, and steadily: answers.py), its output is set to zero,
or set to its mean over other problems. Layer × head maps show, for each intervention, how far the predictions of a step
move (KL, on the unchanged run's canvas) and how many answers change.

The head with the largest effect is picked on every second prompt and reported on the others: the maximum of many heads
is too large on the prompts that picked it.

Caveat: heads back each other up. That no single head is needed does not mean that all of them can be removed; the last
rows of the table mask every head at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import MEANINGS, each_prompt, effects, masked, unchanged
from sinklens.analyses.estimates.tables import RANGES, interval_rows, interval_table, mean_interval
from sinklens.analyses.study import Study
from sinklens.experiments import head_outputs
from sinklens.interventions import AblateHeads
from sinklens.interventions.ablation import HeadOutputs
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack
from sinklens.tasks.word_problems import training

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

WAYS = {
    "strongest": "strongest key masked",
    "steady": "strongest key masked steadily",
    "same_mass": "random keys with as much attention masked",
    "zero": "output set to zero",
    "mean": "output set to its mean",
}
TOGETHER = ("strongest", "steady")  # the interventions that still make sense on all heads at once
MEASURES = ("kl", "changed", "right")
KL = "KL divergence from the unchanged run (nats)"


@dataclass
class Heads(Study):
    """See the module.

    Attributes:
        top_k: number of keys masked per head.
        reference: number of problems, none of them held out, over which mean outputs are taken.
    """

    name: ClassVar[str] = "heads"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False
    top_k: int = 1
    reference: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self._outputs: dict[Model, HeadOutputs] = {}

    def begin(self, models: Sequence[str], prompts: Sequence[SinglePrompt]) -> None:
        """Discard the mean outputs of an earlier run."""
        self._outputs.clear()

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt, way, layer, head]; ``kl_step`` [prompt, way, layer, step], mean over heads; and
        ``all_…`` [prompt, together], the keys of all heads masked at once.
        """
        sizes = (len(WAYS), model.cfg.n_layers, model.cfg.n_heads)

        def one(prompt: SinglePrompt) -> xr.Dataset:
            listed = self.interventions(model, unchanged(self, model, prompt, settings), settings)
            found = effects(self, model, prompt, settings, listed)
            single, joint = (found.isel(intervention=part) for part in (slice(0, -2), slice(-2, None)))
            joint = joint.rename(intervention="together")
            maps = {name: (("way", "layer", "head"), single[name].to_numpy().reshape(sizes)) for name in MEASURES}
            steps = single["kl_step"].transpose("intervention", "step").to_numpy().reshape(*sizes, -1)
            all_heads = {f"all_{name}": joint[name] for name in MEASURES}
            values = {**maps, "kl_step": (("way", "layer", "step"), steps.mean(axis=2)), **all_heads}
            return xr.Dataset(values, coords={"step": found["step"]})

        places: dict[str, Any] = {"way": list(WAYS), "layer": np.arange(sizes[1]), "head": np.arange(sizes[2])}
        return each_prompt(prompts, one).assign_coords({**places, "together": list(TOGETHER)})

    def interventions(self, model: "Model", track: SinkTrack, settings: Settings) -> dict[str, Any]:
        """One per kind of `WAYS`, layer and head, in that order; then all heads at once, one per kind of `TOGETHER`."""
        if model not in self._outputs:
            problems = [problem.prompt for problem in training(self.seed, self.reference)]
            self._outputs[model] = head_outputs(model, problems, seed=self.seed, **settings)
        single: dict[tuple[str, int, int], Any] = {}
        for layer, head in np.ndindex(model.cfg.n_layers, model.cfg.n_heads):
            place: dict[str, Any] = {"layers": [layer], "heads": [head]}
            kinds = masked(track, self.top_k, **place) | {
                "zero": AblateHeads(by="zero", **place),
                "mean": AblateHeads(by="mean", reference=self._outputs[model], **place),
            }
            single |= {(kind, layer, head): kinds[kind] for kind in WAYS}
        ordered = sorted(single, key=lambda entry: (list(WAYS).index(entry[0]), *entry[1:]))
        joint = masked(track, self.top_k)
        named = {" ".join(map(str, place)): single[place] for place in ordered}
        return named | {kind: joint[kind] for kind in TOGETHER}

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``map``: every head; ``ways``: mean over heads, the head with the largest effect (picked on every second
        prompt, reported on the others), and all heads at once; ``steps``: KL by layer and step.
        """
        from pandas import concat

        maps = interval_table(measured, MEASURES, self.seed)
        means = {name: data[list(MEASURES)].mean(("layer", "head")) for name, data in measured.items()}
        every = {name: data[[f"all_{measure}" for measure in MEASURES]] for name, data in measured.items()}
        together = interval_table(every, [f"all_{measure}" for measure in MEASURES], self.seed)
        ways = concat(
            [
                interval_table(means, MEASURES, self.seed).assign(heads="one, mean over all"),
                _confirmed(measured, self.seed),
                together.rename(columns={"together": "way"}).assign(heads="all at once"),
            ],
            ignore_index=True,
        )
        ways["measure"] = ways["measure"].str.removeprefix("all_")
        return {
            "map": maps,
            "ways": ways.assign(meaning=ways["measure"].map(MEANINGS)),
            "steps": interval_table(measured, ["kl_step"], self.seed),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``kl`` and ``changed``: layer × head maps, a row of panels per model; ``steps``: KL by layer and step."""
        from sinklens.views.effects import head_maps

        maps = interval_table(measured, MEASURES, self.seed)
        steps = interval_table(measured, ["kl_step"], self.seed)
        return {
            "kl": head_maps(maps[maps["measure"] == "kl"], WAYS, KL),
            "changed": head_maps(maps[maps["measure"] == "changed"], WAYS, MEANINGS["changed"]),
            "steps": head_maps(steps, WAYS, f"{KL}, mean over heads", along="step"),
        }


def _confirmed(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """Per model, measure and kind, the head with the largest effect on every second prompt, measured on the others.

    The largest effect is the smallest share of right answers, or the largest mean of other measures. A maximum of many
    heads is too large on the prompts that picked it; on the others its estimate and interval are those of any head.
    Without a second prompt the row is NaN.
    """
    from pandas import DataFrame

    rows = []
    for (name, data), measure, way in product(measured.items(), MEASURES, WAYS):
        values = data[measure].sel(way=way).transpose("prompt", "layer", "head")
        effect = (-values if measure == "right" else values).isel(prompt=slice(0, None, 2)).mean("prompt")
        layer, head = np.unravel_index(int(effect.fillna(-np.inf).to_numpy().argmax()), effect.shape)
        other = values.isel(prompt=slice(1, None, 2), layer=layer, head=head)
        nothing = other.sizes["prompt"] == 0
        column = np.full(1, np.nan) if nothing else other.to_numpy()
        found = mean_interval(column, RANGES.get(measure), seed)
        place = {"layer": int(values["layer"][layer]), "head": int(values["head"][head])}
        row = interval_rows(name, measure, found, {})[0]
        rows.append({**row, "way": way, **place, "heads": f"one, the strongest: {place['layer']}.{place['head']}"})
    return DataFrame(rows)
